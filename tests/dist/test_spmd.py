"""Rank 0's result, or its failure, reaches every rank."""

from __future__ import annotations

import pytest
import torch

from megarl.trainer.spmd import RankZero
from tests.dist.world import World


@pytest.fixture(scope="module")
def world():
    with World(2) as w:
        yield w


def only_on_zero(zero: RankZero, value: object) -> object:
    assert zero.is_zero, "called on another rank"
    return value


def result(value):
    zero = RankZero(60.0)
    return zero(only_on_zero, zero, value)


def failure():
    def fail():
        raise ValueError("servers are gone")

    zero = RankZero(60.0)
    try:
        zero(fail)
    except (ValueError, RuntimeError) as e:
        return type(e).__name__, str(e)
    return None


def test_result_reaches_every_rank(world):
    batch = {"x": torch.arange(6).view(2, 3)}
    for got in world.run(result, batch):
        assert torch.equal(got["x"], batch["x"])


def test_failure_reaches_every_rank_as_rank_zeros_error(world):
    first, second = world.run(failure)
    assert first == ("ValueError", "servers are gone")
    assert second[0] == "RuntimeError"
    assert "rank 0 failed in" in second[1]
    assert "ValueError: servers are gone" in second[1]
