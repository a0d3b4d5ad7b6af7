"""Starts torch.distributed, and makes worlds: process groups of a part of the ranks, which are all
that an engine there knows of.

Much code, megatron-core's and torch's own among it, takes torch's default process group for all
ranks that matter. So a device mesh has a process group of its own, with ranks from 0, and `inside`
makes it the default group: what is made and called there knows no other ranks. Meshes may be
disjoint, and then run side by side, or overlap, and then take turns.

The default group is the process's, not a thread's, since backward passes on GPUs run in threads of
torch's own. A thread that works while the main thread goes on has one for itself: `thread_inside`.
What is remembered of a group or a rank is kept for each world: `PerWorld`.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megarl.api.failures import OtherRankFailed
from megarl.parallel.layout import Coords
from megarl.utils.env import (
    CONTROLS,
    collective_timeout,
    prefer_flash_attention,
    set_collective_timeout,
    set_nccl_default,
)
from megarl.utils.http import split_address
from megarl.utils.rendezvous import meet
from megarl.wire.handles import expand_segments
from megarl.wire.process_group import join_group, prove

T = TypeVar("T")


@cache
def on_cuda() -> bool:
    """Returns whether the engine runs on GPUs. MEGARL_DEVICE=cpu says no even where there are some.
    Raises ValueError for another value of it, or for "cuda" where torch sees no GPU."""
    choice = os.environ.get("MEGARL_DEVICE", "")
    if choice not in ("", "cpu", "cuda"):
        raise ValueError(f"MEGARL_DEVICE={choice!r}: use 'cpu' or 'cuda', or leave it unset")
    if choice == "cuda" and not torch.cuda.is_available():
        raise ValueError("MEGARL_DEVICE=cuda, but torch sees no CUDA device")
    return choice != "cpu" and torch.cuda.is_available()


def device() -> torch.device:
    """Returns this rank's device: the current CUDA device (set from LOCAL_RANK), or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda() else torch.device("cpu")


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the host where a GPU can copy it while the host goes on; on a CPU, and
    where it is on a device already, the tensor itself."""
    return tensor.pin_memory() if on_cuda() and tensor.device.type == "cpu" else tensor


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the host on this rank's device, behind what its stream has to do: the
    host does not wait for the copy. On a CPU the tensor itself."""
    return pinned(tensor).to(device(), non_blocking=True) if on_cuda() else tensor


def comm_backend() -> str:
    """Returns torch.distributed's backend for the device: "nccl" on GPUs, "gloo" on the CPU."""
    return "nccl" if on_cuda() else "gloo"


def init_distributed(addr: str | None = None, *, timeout: float | None = None) -> None:
    """Starts torch.distributed once: from torchrun's environment, else as a world of one.

    `addr` ("host:port") replaces MASTER_ADDR and MASTER_PORT. `timeout`, in seconds (default: that
    of a script's configuration, else 1800), bounds every collective of the world and of the
    layouts' groups. Raises ValueError where torchrun's environment is incomplete, and in a
    controller, whose workers are the world.
    """
    prefer_flash_attention(os.environ)
    set_nccl_default(os.environ)  # for scripts that torchrun starts without megarl.run
    if on_cuda():
        # a scheduler may have each process see its own device alone
        seen = torch.cuda.device_count()
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) if seen > 1 else 0)
        expand_segments(os.environ)
    if dist.is_initialized():
        return
    set_collective_timeout(timeout or collective_timeout())
    global _key
    rank, world_size = 0, 1
    store: dist.Store = dist.HashStore()
    if "WORLD_SIZE" in os.environ:
        host, port, rank, world_size = _place_in_world(addr)
        store, _key = meet(
            host, port, rank=rank, world_size=world_size, timeout=collective_timeout()
        )
    elif CONTROLS in os.environ:
        raise ValueError(
            "trainer.mode=controller: this process starts the trainers and is none itself; "
            "wrap the role in megarl.TrainController(role, config, scheduler), or leave "
            "trainer.mode=spmd, where every trainer runs the script"
        )
    dist.init_process_group(
        comm_backend(),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=collective_timeout()),
    )
    proved(dist.group.WORLD)


def proved(group: Any) -> Any:
    """Returns a new process group after each of its ranks has proved that it knows the job's token.
    The ranks of a world that megarl did not start have not met, and prove nothing. Collective over
    the group, as its first exchange. Raises PermissionError that names a rank without a proof."""
    if _key and group.size() > 1:
        with waiting_for(None, f"the proofs of the group {group.group_name}"):
            prove(group, _key)
    return group


def _place_in_world(addr: str | None) -> tuple[str, int, int, int]:
    """Returns host and port where the ranks meet, this rank and the number of ranks, of torchrun's
    environment. Raises ValueError where it is incomplete."""
    missing = [k for k in ("RANK", "WORLD_SIZE") if k not in os.environ]
    if addr is None:
        missing += [k for k in ("MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
    if missing:
        raise ValueError(
            f"WORLD_SIZE is set but {', '.join(missing)} is not: start the processes with torchrun"
        )
    host, port = split_address(addr or "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ))
    return host, port, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def shutdown_distributed(*, failed: bool = False) -> None:
    """Ends torch.distributed in an orderly way, all ranks together.

    With `failed` it waits for nobody: the other ranks may be stuck in a collective, and the process
    is about to exit with the error.
    """
    if dist.is_initialized() and not failed:
        with waiting_for(None, "the end of the run"):
            barrier()
        dist.destroy_process_group()


def barrier() -> None:
    """Waits for all ranks of the world. On GPUs the device is named, else NCCL guesses it."""
    on_gpu = comm_backend() == "nccl"
    dist.barrier(device_ids=[torch.cuda.current_device()] if on_gpu else None)


# torch names groups by a count. A name is in use once in a process, so each world counts from its
# own start.
_NAMES = 1_000_000

_of_thread = threading.local()


class _Groups(c10d._World):
    """Holds torch's record of all groups; a thread may have a default group for itself."""

    @property
    def default_pg(self) -> Any:
        return getattr(_of_thread, "group", None) or self._default_pg

    @default_pg.setter
    def default_pg(self, group: Any) -> None:
        self._default_pg = group


c10d._world.__class__ = _Groups  # torch's "extension point to override it"; others hold the object

_outer: list[Any] = []  # the default groups around the scopes that are entered
_worlds: dict[Any, World] = {}  # by process group
_names_given: dict[Any, int] = {}  # torch's count, of worlds that are not the default now
_made = 0
_key = b""  # that of the meeting of all ranks


def everyone() -> Any:
    """Returns the process group of all ranks, whatever scopes are entered."""
    return _outer[0] if _outer else c10d._get_default_group()


def meeting_store() -> dist.Store:
    """Returns the store at which all ranks met."""
    store: dist.Store = c10d._world.pg_map[everyone()][1]
    return store


@contextmanager
def inside(group: Any) -> Iterator[None]:
    """Makes `group`, that of a world or of all ranks, torch's default group inside the `with`. An
    error that leaves a mesh says whose ranks it names. Raises RuntimeError for a world that has
    ended."""
    if group is dist.group.WORLD:
        yield
        return
    if group not in _names_given:
        raise RuntimeError("this world has ended: destroy the engines in it before")
    _outer.append(dist.group.WORLD)
    _switch(group)
    try:
        yield
    except Exception as error:
        if group in _worlds:
            error.add_note(f"(this is rank {this_rank()}, whose ranks the error names)")
        raise
    finally:
        _switch(_outer.pop())


def _switch(group: Any) -> None:
    _names_given[dist.group.WORLD] = c10d._world.group_count
    c10d._world.default_pg = group  # what C++ logs as this process's rank stays as it is
    c10d._world.group_count = _names_given.pop(group)


@contextmanager
def thread_inside(group: Any) -> Iterator[None]:
    """Makes `group` the default group of this thread alone, whatever scope the others enter."""
    _of_thread.group = group
    try:
        yield
    finally:
        _of_thread.group = None


class PerWorld(Generic[T]):
    """Keeps one thing for each world, and forgets it after the world has ended. Threads may ask."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._kept = make, dict[Any, T]()
        self._lock = threading.RLock()

    def get(self) -> T:
        """Returns the thing of the world in scope; the first call makes it."""
        world = dist.group.WORLD
        with self._lock:
            if world not in self._kept:
                self._kept = {w: x for w, x in self._kept.items() if w in c10d._world.pg_map}
                self._kept[world] = self._make()
            return self._kept[world]


class World:
    """Holds the process group of one mesh: its rank i is `ranks[i]` of all. Making one is a
    collective over all ranks, members or not. It starts torch.distributed where nothing has yet.

    Raises ValueError for ranks that do not exist or do not ascend, and inside another world.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        global _made
        if _outer:
            raise ValueError(
                f"rank {this_rank()}: make worlds outside of every scope, on all ranks"
            )
        init_distributed()
        size = dist.get_world_size()
        wrong = [r for r in ranks if not 0 <= r < size]
        if wrong or not ranks or list(ranks) != sorted(set(ranks)):
            fault = f"there is no rank {wrong[0]}" if wrong else "they have to ascend"
            raise ValueError(
                f"a world of ranks {list(ranks)}: name some of the ranks 0 to {size - 1}; {fault}"
            )
        _made += 1
        self.ranks, self._number = tuple(ranks), _made
        self._group: Any = None
        bound = _timeout(everyone())
        group = dist.new_group(list(ranks), timeout=bound, group_desc=f"mesh {list(ranks)}")
        if dist.get_rank() in ranks:
            c10d._world.pg_group_ranks[group] = {i: i for i in range(len(ranks))}
            _worlds[group], _names_given[group] = self, _made * _NAMES
            self._group = proved(group)

    @property
    def member(self) -> bool:
        """Returns whether this process is one of the mesh's."""
        return self._group is not None

    @property
    def group(self) -> Any:
        """Returns the mesh's process group. Raises RuntimeError on a rank that is not of it."""
        if self._group is None:
            raise RuntimeError(f"rank {this_rank()} is not of {self}: call this there")
        return self._group

    def __str__(self) -> str:
        return f"the mesh of ranks {list(self.ranks)}"

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Makes the mesh torch's default group inside the `with`. Raises RuntimeError on a rank
        that is not of it."""
        with inside(self.group):
            yield

    def destroy(self) -> None:
        """Ends the mesh's process groups, the newest first; engines on it have to be destroyed
        before. Does nothing on other ranks. Collective over the mesh."""
        if self._group is None:
            return
        with self.scope():
            everybody_came = [None] * len(self.ranks)
            dist.all_gather_object(everybody_came, None)
        group, self._group = self._group, None
        names = {int(n): g for g, n in c10d._world.pg_names.items() if n.isdigit()}
        for name in sorted(names, reverse=True):
            if name // _NAMES == self._number:
                dist.destroy_process_group(names[name])
        dist.destroy_process_group(group)
        del _worlds[group], _names_given[group]


def ranks_of(group: Any) -> tuple[int, ...]:
    """Returns which of all ranks a world's process group consists of."""
    return _worlds[group].ranks if group in _worlds else tuple(range(group.size()))


def this_rank() -> str:
    """Returns this rank's number among all, for errors; in a world's scope with that world's."""
    world, rank = dist.group.WORLD, dist.get_rank()
    if world not in _worlds:
        return str(rank)
    ranks = list(ranks_of(world))
    return f"{ranks[rank]} (rank {rank} of the mesh of ranks {ranks})"


_unions = PerWorld(dict[tuple[int, ...], Any])


def union_group(ranks: Sequence[int]) -> Any:
    """Returns a process group of these ranks of all, ascending, to exchange messages over. The
    first call for some ranks is a collective over those alone."""
    with inside(everyone()):
        if len(ranks) == dist.get_world_size():
            return everyone()
        groups = _unions.get()
        if tuple(ranks) not in groups:
            group = join_group(
                meeting_store(),
                rank=list(ranks).index(dist.get_rank()),
                world_size=len(ranks),
                group_name="megarl_union_" + "_".join(map(str, ranks)),
                backend=dist.get_backend(),
                timeout=_timeout(everyone()).total_seconds(),
            )
            groups[tuple(ranks)] = proved(group)
        return groups[tuple(ranks)]


def _timeout(group: Any) -> Any:
    return group._get_backend(group._device_types[0]).options._timeout


# how gloo begins its report of a timeout or of a peer that died
_LOST_PEER = re.compile(r"\[\S*gloo\S*\]|Application timeout caused pair closure")


@contextmanager
def waiting_for(place: Coords | None, what: str) -> Iterator[None]:
    """Names the rank, its place in a layout, and what it was doing, in a RuntimeError where a
    collective inside times out or loses a peer.

    gloo raises in the waiting thread. NCCL's watchdog ends the process with its own dump instead.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _LOST_PEER.match(str(error)):
            raise
        where = f" ({place})" if place else ""
        raise OtherRankFailed(
            f"rank {this_rank()}{where} gave up waiting for other ranks in {what}: one of them "
            f"ended, or did not come within collective_timeout={collective_timeout():g} s; look at "
            f"the other ranks' logs for the first error. Cause: {error}"
        ) from error
