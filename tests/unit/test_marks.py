"""The gradient norm counts every number of the model once, whatever the layers say of it.

Two ranks in one process, over torch's fake process group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config.engine import LoRAConfig
from megarl.models.adapters import Adapters
from megarl.models.build import build_model
from megarl.models.hf_config import parse_hf_config
from megarl.models.params import mark_params, named_params
from megarl.models.piece_table import PieceTable
from megarl.parallel.groups import ProcessGroups, model_scope
from megarl.parallel.layout import Layout
from tests.tiny import tiny_hf

from megatron.core.tensor_parallel.layers import (
    param_is_not_tensor_parallel_duplicate,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import param_is_not_shared

LAYOUTS = {
    "qwen2": Layout(tp=2, sequence_parallel=True),
    "qwen3_moe": Layout(tp=2, ep=2, sequence_parallel=True),
    "mixtral": Layout(tp=2, etp=2, sequence_parallel=True),
    "deepseek_v3": Layout(tp=2, ep=2, sequence_parallel=True),
    "gpt_oss": Layout(tp=2, ep=2, sequence_parallel=True),
}


@contextmanager
def rank_of(layout: Layout, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    groups = ProcessGroups(layout)
    try:
        with model_scope(groups):
            model_parallel_cuda_manual_seed(1)
            yield
    finally:
        groups.release()
        dist.destroy_process_group()


def counted(table: PieceTable, params: dict[str, torch.Tensor], rank: int) -> dict[str, int]:
    """Returns how many numbers of each parameter this rank's gradient norm counts, but padding."""
    local = table.local_params(table.layout.coords(rank))
    return {
        name: param.numel() - (local[name].padding[1] - local[name].padding[0]) * param[0].numel()
        for name, param in params.items()
        if name not in table.buffers
        and param_is_not_shared(param)
        and param_is_not_tensor_parallel_duplicate(param)
    }


def clear(params: dict[str, torch.Tensor]) -> None:
    for param in params.values():
        for mark in ("tensor_model_parallel", "allreduce"):
            vars(param).pop(mark, None)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_marks_come_from_the_piece_table_and_not_from_the_layers(kind: str) -> None:
    layout = LAYOUTS[kind]
    model = parse_hf_config(tiny_hf(kind, layers=2).config.to_dict())
    total = 0
    for rank in range(2):
        with rank_of(layout, rank):
            state = build_model(model, layout, dtype=torch.float32)
            params = named_params(state.chunks)
            as_built = counted(state.table, params, rank)
            clear(params)
            mark_params(state.table, layout.coords(rank), params)
            assert counted(state.table, params, rank) == as_built
            total += sum(as_built.values())
            experts = {n for n, p in params.items() if not getattr(p, "allreduce", True)}
            assert experts == {n for n in params if ".experts." in n}
    assert total == sum(t.numel for t in state.table.trained.tensors)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_adapters_are_counted_once(kind: str) -> None:
    layout = LAYOUTS[kind]
    model = parse_hf_config(tiny_hf(kind, layers=2).config.to_dict())
    total = 0
    for rank in range(2):
        with rank_of(layout, rank):
            state = build_model(model, layout, dtype=torch.float32)
            kw: Any = dict(dtype=torch.float32, device=torch.device("cpu"), seed=0)
            adapters = Adapters(state.chunks, model, layout, LoRAConfig(r=2), **kw)
            total += sum(counted(adapters.table, adapters.params, rank).values())
    assert total == sum(t.numel for t in adapters.table.tensors)
