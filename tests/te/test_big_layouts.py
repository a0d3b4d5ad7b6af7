"""The public configs on hundreds of ranks: the first, a middle and the last one really built."""

from __future__ import annotations

import pytest

from tests.te.cases import BIG, BIG_RANKS
from tests.te.conftest import Facts

# ranks that send to one owner of a sync: those of its pipeline stage that hold other parts, and for
# experts the ranks of the expert-parallel group
MOST_SOURCES = {"qwen3-235b-a22b": 7, "deepseek-v3": 31, "llama-3.1-405b": 7}


@pytest.mark.parametrize("name", BIG)
def test_ranks_hold_what_the_piece_table_says(facts: Facts, name: str) -> None:
    layout, _ = BIG[name]
    ranks = facts("newest", "big")[name]["ranks"]
    assert ranks.keys() == {f"{r} {s}" for r in BIG_RANKS(layout) for s in ("te", "sdpa")}
    for rank in BIG_RANKS(layout):
        te, local = (ranks[f"{rank} {s}"] for s in ("te", "sdpa"))
        assert not te["wrong"] and not local["wrong"] and te["params"] == local["params"] > 0
        assert te["keys"] == local["keys"]


@pytest.mark.parametrize("name", BIG)
def test_an_owner_gets_from_few_ranks(facts: Facts, name: str) -> None:
    """On GPUs each pair that exchanges messages by itself has a communicator for the whole run."""
    _, owners = BIG[name]
    pairs = facts("newest", "big")[name]["pairs"]
    assert len(pairs) == owners and max(pairs.values()) <= MOST_SOURCES[name]
