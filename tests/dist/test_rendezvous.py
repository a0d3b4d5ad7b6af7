"""A process that lacks the job's token does not join its groups."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megarl.utils.env import JOB_TOKEN
from megarl.utils.rendezvous import meet
from megarl.wire.process_group import destroy_update_group, join_group
from tests.dist.world import World, free_port


@pytest.fixture(scope="module")
def world(worlds: Any) -> World:
    return worlds(2)


def run_meeting(port: int, tokens: list[str], timeout: float) -> float | None:
    """Returns an all-reduced sum over the two ranks, None where they have not met."""
    rank = dist.get_rank()
    with mock.patch.dict(os.environ, {JOB_TOKEN: tokens[rank]}):
        store = meet("127.0.0.1", port, rank=rank, world_size=2, timeout=timeout)
    try:
        group = join_group(
            store, rank=rank, world_size=2, group_name="pair", backend="gloo", timeout=timeout
        )
    except RuntimeError:
        return None
    finally:
        dist.barrier()  # rank 0 has the store
    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total, group=group)
    destroy_update_group(group)
    return float(total)


def test_ranks_meet_under_the_jobs_token(world: World) -> None:
    assert world.run(run_meeting, free_port(), ["ours", "ours"], 30.0) == [3.0, 3.0]
    assert world.run(run_meeting, free_port(), ["ours", "theirs"], 1.0) == [None, None]
