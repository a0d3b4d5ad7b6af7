"""Makes the process groups of a layout, and the scope in which megatron-core's globals are one
engine's.

megatron-core keeps groups, sizes and the random-state tracker in module globals. Several engines
with different layouts live on the same ranks, so each has a ProcessGroups that remembers what those
globals should be, and `model_scope(groups)` swaps it in around every call into megatron-core. It
also enters the engine's world (worlds.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megarl.parallel import mcore  # noqa: F401  before megatron
from megarl.parallel.layout import Coords, Layout
from megarl.parallel.worlds import PerWorld, barrier, comm_backend, inside, proved
from megarl.utils.env import collective_timeout

from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import random as mcore_random

_Globals = dict[tuple[Any, str], Any]  # by module and name


def _read() -> _Globals:
    """Returns the state of megatron-core's modules, which is in _UPPERCASE names and one list of
    all groups."""
    return {
        (module, name): value.copy() if isinstance(value, dict | list) else value
        for module in (ps, mcore_random)
        for name, value in vars(module).items()
        if (name.startswith("_") and name.isupper()) or name == "_global_process_group_list"
    }


def _write(values: _Globals) -> None:
    for (module, name), value in values.items():
        setattr(module, name, value.copy() if isinstance(value, dict | list) else value)


_BLANK = _read()  # while no engine is in scope


@dataclass
class _Groups:
    """Holds the groups of one layout, shared by all engines that use it."""

    state: _Globals
    owned: list[Any]
    users: int = 0


_groups_by_layout = PerWorld(dict[Layout, _Groups])


def _create(layout: Layout) -> _Groups:
    """Makes megatron-core's groups for `layout`. Collective over the world."""
    outer = _read()
    _write(_BLANK)
    on_gloo = comm_backend() == "gloo"
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
        state = _read()
    finally:
        _write(outer)
    if not on_gloo:  # makes NCCL's communicator of the world, so that messages of some ranks can
        barrier()  # go over it (see BucketGatherer)
    owned = [g for g in state.get((ps, "_global_process_group_list")) or [] if g is not None]
    for group in owned:  # to the second
        c10d._set_pg_timeout(timedelta(seconds=collective_timeout()), group)
        if dist.get_backend(group) == "gloo":  # a proof over NCCL would create its communicator
            proved(group)
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
        c = self.coords
        # whether it reports for its data-parallel replica: the first rank of the last stage does
        self.speaks = c.pp == layout.pp - 1 and c.tp == 0 and c.cp == 0
        self.world: Any = dist.group.WORLD
        of_layout = _groups_by_layout.get()
        if layout not in of_layout:
            of_layout[layout] = _create(layout)
        self._shared: _Groups | None = of_layout[layout]
        self._shared.users += 1
        self._globals = dict(self._shared.state)
        with model_scope(self):
            self.tp = ps.get_tensor_model_parallel_group()
            self.pp = ps.get_pipeline_model_parallel_group()
            self.cp = ps.get_context_parallel_group()
            self.dp = ps.get_data_parallel_group()
            self.dp_cp = ps.get_data_parallel_group(with_context_parallel=True)
            self.ep = ps.get_expert_model_parallel_group()

    def barrier(self) -> None:
        """Waits for all ranks of the world. Collective."""
        with inside(self.world):
            barrier()

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
        outer = _read()
        _write(groups._globals)
        _in_scope.append(groups)
        try:
            yield
        finally:
            _in_scope.pop()
            groups._globals = _read()
            _write(outer)
