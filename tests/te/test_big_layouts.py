"""The public configs on hundreds of ranks: the first, a middle and the last one really built."""

from __future__ import annotations

import pytest

from tests.te.cases import BIG, BIG_RANKS
from tests.te.conftest import Facts

# ranks that send to the sender of a sync: of each pipeline stage those that hold other parts, and
# for experts the ranks of the expert-parallel group
MOST_SOURCES = {"qwen3-235b-a22b": 4 * 8, "deepseek-v3": 8 * 32, "llama-3.1-405b": 14 * 8}


@pytest.mark.parametrize("name", BIG)
def test_ranks_hold_what_the_piece_table_says(facts: Facts, name: str) -> None:
    layout = BIG[name]
    ranks = facts("newest", "big")[name]["ranks"]
    assert ranks.keys() == {f"{r} {s}" for r in BIG_RANKS(layout) for s in ("te", "sdpa")}
    for rank in BIG_RANKS(layout):
        te, local = (ranks[f"{rank} {s}"] for s in ("te", "sdpa"))
        assert not te["wrong"] and not local["wrong"] and te["params"] == local["params"] > 0
        assert te["keys"] == local["keys"]


@pytest.mark.parametrize("name", BIG)
def test_a_sender_gets_from_few_ranks(facts: Facts, name: str) -> None:
    """On GPUs each pair that exchanges messages by itself has a communicator for the whole run."""
    assert 0 < facts("newest", "big")[name]["sources"] < MOST_SOURCES[name]
