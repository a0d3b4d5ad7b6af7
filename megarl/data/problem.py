"""A problem: what every loader makes of its source, before any tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
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

    @property
    def row_keys(self) -> tuple[str, ...]:
        """Names what a reward gets by keyword: the keys of the row but for the prompt's."""
        return ("row_id", "messages", "answer", "task", *self.extra)


def stable_hash(text: str) -> int:
    """64 bits that depend on the text only: the same in every process and run."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def in_split(key: str, split: str, *, test_percent: int) -> bool:
    """Whether the problem with this key belongs to `split`: never to both, whatever the seed."""
    return (stable_hash(key) % 100 < test_percent) == (split == "test")


def take_options(
    options: dict[str, Any], defaults: dict[str, Any], *, of: str, lists: Collection[str] = ()
) -> dict[str, Any]:
    """The given options over their defaults; those in `lists` may have several values. Raises
    ValueError for an unknown one, naming the known, and for one of another type than its default.
    """
    if unknown := sorted(set(options) - set(defaults)):
        raise ValueError(f"dataset type {of}: unknown options {unknown}, known {sorted(defaults)}")
    for name, value in options.items():
        kind = type(defaults[name])
        values = value if isinstance(value, list) and name in lists else [value]
        if defaults[name] is not None and not all(_is_a(kind, v) for v in values):
            raise ValueError(
                f"dataset type {of}: options.{name}={value!r}: not of type {kind.__name__}"
            )
    return defaults | options


def _is_a(kind: type, value: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
