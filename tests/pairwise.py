"""Choices from a product too large to run. All pairs: most faults need one or two settings to meet
(Kuhn, Wallace, Gallo: Software fault interactions and implications for software testing, 2004).
Rows that are drawn, other ones by every word, for the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar

Row = dict[str, Any]
T = TypeVar("T")


def drawn(rows: Sequence[T], word: str, most: int) -> list[T]:
    """Returns `most` of the rows in their order, the same ones for the same word."""
    count = min(most, len(rows))
    return [rows[i] for i in sorted(random.Random(word).sample(range(len(rows)), count))]


def all_pairs(
    axes: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Rows such that every possible pair of values of two axes stands in at least one.

    Greedy: a row begins with the first pair that no row has yet, and each further axis takes the
    value that brings the most new pairs, the earliest where several do. So the same axes give the
    same rows, and values that come first in their axis are chosen where it does not matter.
    `possible` judges rows of which some axes may be missing; it must forbid pairs only.
    """
    missing = {  # a dict keeps its order
        ((a, x), (b, y)): None
        for a, b in combinations(axes, 2)
        for x in axes[a]
        for y in axes[b]
        if possible({a: x, b: y})
    }

    def new_pairs(row: Row) -> list[Any]:
        ordered = [(name, row[name]) for name in axes if name in row]
        return [pair for pair in combinations(ordered, 2) if pair in missing]

    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for name in (name for name in axes if name not in row):
            grown = [r for value in axes[name] if possible(r := {**row, name: value})]
            row = max(grown, key=lambda r: len(new_pairs(r)))  # max takes the first of equals
        for pair in new_pairs(row):
            del missing[pair]
        rows.append({name: row[name] for name in axes})
    return rows
