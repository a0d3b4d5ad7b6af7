"""Makes the process groups of a layout, and the scope in which megatron-core's globals are one
engine's.

megatron-core keeps groups, sizes and the random-state tracker in module globals. Several engines
with different layouts live on the same ranks, so each has a ProcessGroups that remembers what those
globals should be, and `model_scope(groups)` swaps it in around every call into megatron-core. It
also enters the engine's world (worlds.py).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megarl.api.failures import OtherRankFailed
from megarl.parallel import mcore
from megarl.parallel.layout import Coords, Layout
from megarl.parallel.worlds import PerWorld, inside, this_rank
from megarl.utils.env import CONTROLS, collective_timeout, set_collective_timeout, set_nccl_default
from megarl.utils.http import split_address
from megarl.utils.rendezvous import meet

from megatron.core import parallel_state as ps  # isort: skip
from megatron.core.tensor_parallel import random as mcore_random  # isort: skip

_RNG_GLOBALS = ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED")


def init_distributed(addr: str | None = None, *, timeout: float | None = None) -> None:
    """Starts torch.distributed once: from torchrun's environment, else as a world of one.

    `addr` ("host:port") replaces MASTER_ADDR and MASTER_PORT. `timeout`, in seconds (default: that
    of a script's configuration, else 1800), bounds every collective of the world and of the
    layouts' groups. Raises ValueError where torchrun's environment is incomplete, and in a
    controller, whose workers are the world.
    """
    set_nccl_default(os.environ)  # for scripts that torchrun starts without megarl.run
    if mcore.on_cuda():
        # a scheduler may have each process see its own device alone
        seen = torch.cuda.device_count()
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) if seen > 1 else 0)
    if dist.is_initialized():
        return
    set_collective_timeout(timeout or collective_timeout())
    rank, world_size = 0, 1
    store: dist.Store = dist.HashStore()
    if "WORLD_SIZE" in os.environ:
        host, port, rank, world_size = _place_in_world(addr)
        store = meet(host, port, rank=rank, world_size=world_size, timeout=collective_timeout())
    elif CONTROLS in os.environ:
        raise ValueError(
            "trainer.mode=controller: this process starts the trainers and is none itself; "
            "wrap the role in megarl.TrainController(role, config, scheduler), or leave "
            "trainer.mode=spmd, where every trainer runs the script"
        )
    dist.init_process_group(
        mcore.comm_backend(),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=collective_timeout()),
    )


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
            _barrier()
        dist.destroy_process_group()


def _barrier() -> None:
    """Waits for all ranks of the world. On GPUs the device is named, else NCCL guesses it."""
    on_gpu = mcore.comm_backend() == "nccl"
    dist.barrier(device_ids=[torch.cuda.current_device()] if on_gpu else None)


def _is_state(name: str) -> bool:
    """Returns whether the name is part of parallel_state's state, which is in _UPPERCASE names and
    one list of all groups."""
    return (name.startswith("_") and name.isupper()) or name == "_global_process_group_list"


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list) else value


def _read_parallel_state() -> dict[str, Any]:
    return {k: _copy(v) for k, v in vars(ps).items() if _is_state(k)}


def _write(module: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(module, name, _copy(value))


def _read_rng() -> dict[str, Any]:
    return {k: getattr(mcore_random, k) for k in _RNG_GLOBALS}


# what the globals are while no engine is in scope
_BLANK_STATE = _read_parallel_state()
_BLANK_RNG = _read_rng()


@dataclass
class _Groups:
    """Holds the groups of one layout, shared by all engines that use it."""

    state: dict[str, Any]
    owned: list[Any]
    users: int = 0


_groups_by_layout = PerWorld(dict[Layout, _Groups])


def _create(layout: Layout) -> _Groups:
    """Makes megatron-core's groups for `layout`. Collective over the world."""
    outer = _read_parallel_state()
    _write(ps, _BLANK_STATE)
    on_gloo = mcore.comm_backend() == "gloo"
    try:
        ps.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            distributed_timeout_minutes=math.ceil(collective_timeout() / 60),
            create_gloo_process_groups=not on_gloo,
        )
        if on_gloo:  # the host-side twins would be the same groups a second time
            for name in [n for n in vars(ps) if n.endswith("_GLOO")]:
                setattr(ps, name, getattr(ps, name.removesuffix("_GLOO")))
        state = _read_parallel_state()
    finally:
        _write(ps, outer)
    if not on_gloo:  # makes NCCL's communicator of the world, so that messages of some ranks can
        _barrier()  # go over it (see BucketGatherer)
    owned = [g for g in state.get("_global_process_group_list") or [] if g is not None]
    for group in owned:  # to the second
        c10d._set_pg_timeout(timedelta(seconds=collective_timeout()), group)
    return _Groups(state, owned)


class ProcessGroups:
    """Holds one engine's view: the groups of its layout and its own random-state tracker.

    They belong to the world in scope, and creating them is a collective over it. Engines of the
    same layout share the groups; `release()` gives them back, and the last user destroys them.
    Raises ValueError for a layout of another number of ranks than are running.
    """

    def __init__(self, layout: Layout) -> None:
        world = dist.get_world_size()
        if layout.world_size != world:
            raise ValueError(f"{layout} is for {layout.world_size} ranks, but {world} are running")
        self.layout = layout
        self.rank = dist.get_rank()
        self.coords: Coords = layout.coords(self.rank)
        self.world: Any = dist.group.WORLD
        of_layout = _groups_by_layout.get()
        if layout not in of_layout:
            of_layout[layout] = _create(layout)
        self._shared: _Groups | None = of_layout[layout]
        self._shared.users += 1
        self._state = dict(self._shared.state)
        self._rng = dict(_BLANK_RNG)
        with model_scope(self):
            self.tp = ps.get_tensor_model_parallel_group()
            self.pp = ps.get_pipeline_model_parallel_group()
            self.cp = ps.get_context_parallel_group()
            self.dp = ps.get_data_parallel_group()
            self.dp_cp = ps.get_data_parallel_group(with_context_parallel=True)
            self.ep = ps.get_expert_model_parallel_group()

    @property
    def is_last_stage(self) -> bool:
        """Returns whether this rank is on the last pipeline stage, which has the output layer."""
        return self.coords.pp == self.layout.pp - 1

    def barrier(self) -> None:
        """Waits for all ranks of the world. Collective."""
        with inside(self.world):
            _barrier()

    def release(self) -> None:
        """Gives the groups back; a layout's last user destroys them. Collective over the world."""
        shared, self._shared = self._shared, None
        if shared is None:
            return
        shared.users -= 1
        if shared.users:
            return
        with inside(self.world):
            del _groups_by_layout.get()[self.layout]
        self.barrier()
        for group in shared.owned:
            dist.destroy_process_group(group)


_in_scope: list[ProcessGroups] = []


@contextmanager
def model_scope(groups: ProcessGroups) -> Iterator[None]:
    """Makes megatron-core's globals those of `groups`, and torch's default group their world's,
    inside the `with`; scopes may nest."""
    with inside(groups.world):
        if _in_scope and _in_scope[-1] is groups:
            yield
            return
        outer_state, outer_rng = _read_parallel_state(), _read_rng()
        _write(ps, groups._state)
        _write(mcore_random, groups._rng)
        _in_scope.append(groups)
        try:
            yield
        finally:
            _in_scope.pop()
            groups._state, groups._rng = _read_parallel_state(), _read_rng()
            _write(ps, outer_state)
            _write(mcore_random, outer_rng)


# how gloo begins its report of a timeout or of a peer that died
_LOST_PEER = re.compile(r"\[\S*gloo\S*\]|Application timeout caused pair closure")


@contextmanager
def waiting_for(groups: ProcessGroups | None, what: str) -> Iterator[None]:
    """Names the rank and what it was doing when a collective inside times out or loses a peer, in a
    RuntimeError.

    gloo raises in the waiting thread. NCCL's watchdog ends the process with its own dump instead.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _LOST_PEER.match(str(error)):
            raise
        where = f" ({groups.coords})" if groups else ""
        raise OtherRankFailed(
            f"rank {this_rank()}{where} gave up waiting for other ranks in {what}: one of them "
            f"ended, or did not come within collective_timeout={collective_timeout():g} s; look at "
            f"the other ranks' logs for the first error. Cause: {error}"
        ) from error
