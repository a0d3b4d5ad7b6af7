"""`make pair`: turns of two trees, and what their ratios say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import pair


@pytest.mark.parametrize("n", [6, 8, 9, 10, 17, 30, 100])
def test_the_interval_holds_the_median_in_95_of_100_cases_and_a_narrower_one_does_not(
    n: int,
) -> None:
    """The median lies outside where fewer than k values are below it, or above it: a binomial."""
    low, high = pair.interval([float(i) for i in range(n, 0, -1)])
    k = int(low)
    assert high == n + 1 - k
    outside = [2 * sum(math.comb(n, i) for i in range(j)) / 2**n for j in (k, k + 1)]
    assert outside[0] <= 0.05 < outside[1]


def test_sides_take_turns() -> None:
    order: list[str] = []
    seconds = {"old": 2.0, "new": 3.0}

    def run(side: Path) -> pair.Seconds:
        order.append(side.name)
        return {"step": seconds[side.name] + len(order) / 100}

    said: list[str] = []
    turns = pair.take_turns(run, Path("old"), Path("new"), 6, say=said.append)
    assert order == ["new", "old", *3 * ["old", "new", "new", "old"]]
    assert len(turns) == len(said) == 6  # the first is not counted
    assert turns[0] == ({"step": 2.03}, {"step": 3.04})
    header, _, row = pair.table(turns, "abc")
    assert "| abc | this tree |" in header
    found = [cell.strip() for cell in row.split("|")]
    assert found[1] == "step" and 1.4 < float(found[4]) < 1.5 and found[6] == "6"


def test_trees_of_a_revision() -> None:
    there = pair.tree("HEAD")
    assert (there / "megarl" / "run.py").is_file()
    assert pair.tree("HEAD") == there
    with pytest.raises(SystemExit, match="no revision nowhere"):
        pair.tree("nowhere")
