"""Constructs a rank of any layout in one process, without its memory and without its peers."""

from __future__ import annotations

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config.engine import TrainEngineConfig
from megarl.engine.setup import make_modules, resolve
from megarl.models.names import named_params
from megarl.parallel.groups import ProcessGroups, model_scope


def construct_rank(cfg: TrainEngineConfig, world_size: int, rank: int) -> int:
    """Builds the modules of `rank` among `world_size` ranks from fake tensors and a fake process
    group; returns how many parameters the rank has. `cfg.path` needs no more than a config.json.

    Raises ValueError for what model, layout or world cannot do, AssertionError where a parameter is
    not as the piece table has it, and RuntimeError where a process group exists already.
    """
    if dist.is_initialized():
        raise RuntimeError("a process group exists: construct ranks in a process of their own")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        what = resolve(cfg, world_size)
        groups = ProcessGroups(what.layout)
        with FakeTensorMode(allow_non_fake_inputs=True), model_scope(groups):
            made = make_modules(cfg, what, groups, seed=0)
            params = named_params(made.chunks)
            made.table.check_params(groups.coords, {n: p.shape for n, p in params.items()})
        return sum(p.numel() for p in params.values())
    finally:
        dist.destroy_process_group()
