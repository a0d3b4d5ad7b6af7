"""A placeholder of helper trie's file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Segment:
    start: int
    end: int
    parent: int | None


@dataclass(frozen=True)
class Trie:
    segments: Sequence[Segment]
    depth: Tensor  # [T] int64
