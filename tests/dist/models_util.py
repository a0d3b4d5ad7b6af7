"""Helpers that the model tests run on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.ckpt.hf import load_hf
from megarl.config.engine import ParallelConfig
from megarl.models.build import BuiltModel, build_model
from megarl.models.hf_config import read_hf_config
from megarl.models.params import named_params
from megarl.parallel.groups import ProcessGroups, model_scope
from megarl.parallel.layout import Layout

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


@contextmanager
def built_model(
    path: Path, parallel: dict[str, Any], *, load: bool = True, **kw: Any
) -> Iterator[tuple[BuiltModel, ProcessGroups]]:
    """Yields the model of `path` and its groups, in their scope; `load`: with its weights."""
    kw.setdefault("dtype", torch.float32)
    layout = Layout.from_config(ParallelConfig(**parallel), dist.get_world_size())
    groups = ProcessGroups(layout)
    try:
        with model_scope(groups):
            model_parallel_cuda_manual_seed(1)
            out = build_model(read_hf_config(path), layout, **kw)
            if load:
                load_hf(path, out.table, layout, groups.rank, named_params(out.chunks))
            yield out, groups
    finally:
        groups.release()


def thd(lengths: list[int]) -> PackedSeqParams:
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def all_gather_dim(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def positions(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1])[None].expand_as(ids)
