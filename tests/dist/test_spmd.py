"""Rank 0's result, or its failure, reaches every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megarl.parallel.groups import waiting_for
from megarl.trainer.spmd import RankZero
from megarl.wire.process_group import bounded
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


def bounds_of_the_world() -> list[float]:
    def now() -> float:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        return backend.options._timeout.total_seconds()

    before = now()
    with bounded(None, 7.0):
        inside = now()
        dist.barrier()
    return [before, inside, now()]


def test_a_bound_on_collectives_is_lifted_again(world):
    for before, inside, after in world.run(bounds_of_the_world):
        assert inside == 7.0 and before == after > 7.0


def said_of(text: str) -> str:
    try:
        with waiting_for(None, "train_batch"):
            raise RuntimeError(text)
    except RuntimeError as e:
        return str(e)


def test_only_gloos_own_report_is_that_of_a_lost_peer(world):
    gloo = "[/src/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"
    for rank, said in enumerate(world.run(said_of, gloo)):
        assert f"rank {rank} gave up waiting for other ranks in train_batch" in said
        assert "collective_timeout=1800 s" in said and gloo in said
    quoted = f"server 127.0.0.1:9: /update answered 400: {gloo}"
    assert world.run(said_of, quoted) == [quoted, quoted]
