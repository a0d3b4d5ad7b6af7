"""A problem: what every loader makes of its source, before any tokenizer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`answer` is what the reward compares with; `response` is what SFT learns to write (default:
    the answer); `extra` goes into the RL row as it is and must survive JSON.
    """

    question: str
    answer: str
    task: str
    response: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def stable_hash(text: str) -> int:
    """64 bits that depend on the text only: the same in every process and run."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def in_split(key: str, split: str, *, test_percent: int) -> bool:
    """Whether the problem with this key belongs to `split`: never to both, whatever the seed."""
    return (stable_hash(key) % 100 < test_percent) == (split == "test")


def take_options(options: dict[str, Any], defaults: dict[str, Any], *, of: str) -> dict[str, Any]:
    """The given options over their defaults; an unknown one is a ValueError naming the known."""
    if unknown := sorted(set(options) - set(defaults)):
        raise ValueError(f"dataset type {of}: unknown options {unknown}, known {sorted(defaults)}")
    return defaults | options
