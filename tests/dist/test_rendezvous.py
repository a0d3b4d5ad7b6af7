"""A process without the job's token reads no secret in the store, and joins none of its groups."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megarl.ckpt.background import new_writers_group
from megarl.parallel import worlds as parallel_worlds
from megarl.parallel.groups import ProcessGroups
from megarl.parallel.layout import Layout
from megarl.parallel.ranks import Ranks
from megarl.utils.env import JOB_TOKEN
from megarl.utils.rendezvous import meet
from megarl.wire.process_group import destroy_update_group, join_group, prove
from tests.dist.world import World, free_port

TOKEN = "5ecret-of-this-job"
Read = dict[str, bytes]  # what a store holds


@pytest.fixture(scope="module")
def world(worlds: Any) -> World:
    return worlds(2)


def client(port: int) -> dist.TCPStore:
    """A stranger's connection, which takes no token."""
    wait = timedelta(seconds=20)
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=wait)


def everything(port: int) -> Read:
    store = client(port)
    return {key: bytes(store.get(key)) for key in store.list_keys()}


def run_meeting(port: int) -> tuple[float, Read]:
    """Returns an all-reduced sum over the two ranks, and what a stranger then reads."""
    rank = dist.get_rank()
    with mock.patch.dict(os.environ, {JOB_TOKEN: TOKEN}):
        store, key = meet("127.0.0.1", port, rank=rank, world_size=2, timeout=30)
    group = join_group(
        store, rank=rank, world_size=2, group_name="pair", backend="gloo", timeout=30
    )
    prove(group, key)
    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total, group=group)
    read = everything(port)
    dist.barrier()
    destroy_update_group(group)
    return float(total), read


def test_ranks_meet_and_nobody_reads_their_token(world: World) -> None:
    for total, read in world.run(run_meeting, free_port()):
        assert total == 3.0 and len(read) >= 6
        assert not [key for key, value in read.items() if TOKEN in key or TOKEN.encode() in value]


def run_hostile(port: int, act: Callable[[int, int], None]) -> str | None:
    """Rank 0 of two meets at `port`; rank 1 is a stranger, who does `act`. Returns its error."""
    error = None
    with mock.patch.dict(os.environ, {JOB_TOKEN: TOKEN}):
        if dist.get_rank() == 1:
            act(port, 1)
        else:
            try:
                meet("127.0.0.1", port, rank=0, world_size=2, timeout=60)
            except PermissionError as e:
                error = str(e)
    dist.barrier()
    return error


def prefix_at(port: int) -> str:
    """The prefix under which rank 0 waits, as a stranger reads it."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if found := [key for key in client(port).list_keys() if key.endswith("/nonce/0")]:
                return found[0].removesuffix("nonce/0")
        except RuntimeError:  # it does not listen yet
            pass
        time.sleep(0.02)
    raise AssertionError("nobody waits")


def guess(port: int, rank: int) -> None:
    store, prefix = client(port), prefix_at(port)
    store.set(f"{prefix}nonce/{rank}", os.urandom(32))
    store.set(f"{prefix}proof/{rank}", pickle.dumps(Planted()))


def reflect(port: int, rank: int) -> None:
    """Says what rank 0 says."""
    store, prefix = client(port), prefix_at(port)
    store.set(f"{prefix}nonce/{rank}", store.get(f"{prefix}nonce/0"))
    store.set(f"{prefix}proof/{rank}", store.get(f"{prefix}proof/0"))


class Planted:
    """Writes a file where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (f"/tmp/megarl-planted-{os.getppid()}",)


@pytest.mark.parametrize("act", (guess, reflect))
def test_a_stranger_at_the_store_is_refused_by_rank(world: World, act: Any) -> None:
    error = world.run(run_hostile, free_port(), act)[0]
    assert error.startswith("rank 0: rank 1 ") and JOB_TOKEN in error
    assert not os.path.exists(f"/tmp/megarl-planted-{os.getpid()}")


def run_forged(port: int, forge: str) -> list[str | None]:
    """Rank 1 records an honest exchange of one group, then joins another group without the key, and
    sends there what `forge` names. Returns the errors of rank 0."""
    rank, key, errors = dist.get_rank(), os.urandom(32), list[str | None]()
    everyone: list[Any] = [key]
    dist.broadcast_object_list(everyone)
    key, recorded = everyone[0], dict[str, torch.Tensor]()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    dist.barrier()
    store = store if rank == 0 else client(port)
    honest = dist.all_to_all_single

    def exchange(got: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
        if group.group_name == "second" and rank == 1:
            sent = recorded[forge]
        honest(got, sent, group=group)
        planted = bytearray(pickle.dumps(Planted()).ljust(64))
        recorded["garbage"] = torch.frombuffer(planted, dtype=torch.uint8)
        recorded["replay"], recorded["reflect"] = sent, torch.cat((got[:32], got[:32]))

    for name in ("first", "second"):
        group = join_group(
            store, rank=rank, world_size=2, group_name=name, backend="gloo", timeout=30
        )
        with mock.patch.object(dist, "all_to_all_single", exchange):
            try:
                prove(group, key)
                errors.append(None)
            except PermissionError as e:
                errors.append(str(e))
        dist.barrier()
        destroy_update_group(group)
    return errors


@pytest.mark.parametrize("forge", ("garbage", "replay", "reflect"))
def test_a_stranger_in_a_group_is_refused_by_rank(world: World, forge: str) -> None:
    first, second = world.run(run_forged, free_port(), forge)[0]
    assert first is None
    assert "rank 0 of 2 in group second: rank 1 " in second
    assert not os.path.exists(f"/tmp/megarl-planted-{os.getpid()}")


def start(key: bytes) -> None:
    """Starts torch.distributed, but with the default group that is there, after a meeting of that
    `key`; an empty one ends the proofs."""
    with (
        mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}),
        mock.patch.object(parallel_worlds, "meet", lambda *at, **given: (None, key)),
        mock.patch.object(dist, "is_initialized", return_value=False),
        mock.patch.object(dist, "init_process_group"),
    ):
        parallel_worlds.init_distributed()


MAKES: dict[str, Callable[[], Any]] = {
    "mesh": lambda: parallel_worlds.World([0, 1]),
    "ranks": Ranks,
    "ranks of a group": lambda: Ranks(dist.new_group([0, 1])),
    "writers": new_writers_group,
    "layout": lambda: ProcessGroups(Layout(tp=2)),
}


def run_made(make: str, same: bool) -> list[str]:
    """Starts, and makes a group, among ranks with the same key or with different ones. Returns the
    errors."""
    rank, before, errors = dist.get_rank(), set(dist.distributed_c10d._world.pg_map), list[str]()
    for act in (lambda: start(b"same" if same else bytes([1 + rank])), MAKES[make]):
        try:
            act()
        except PermissionError as e:
            errors.append(str(e))
    dist.barrier()
    start(b"")
    for group in set(dist.distributed_c10d._world.pg_map) - before:
        dist.destroy_process_group(group)
    return errors


@pytest.mark.parametrize("make", MAKES)
def test_every_group_begins_with_proofs(world: World, make: str) -> None:
    for rank, errors in enumerate(world.run(run_made, make, False)):
        assert len(errors) == 2  # of the default group, and of this one
        for error in errors:
            assert f"rank {rank} of 2 in group" in error and f": rank {1 - rank} " in error
    assert world.run(run_made, make, True) == [[], []]
