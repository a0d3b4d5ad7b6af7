"""Plays a rank of any layout in one process: torch's fake process group, fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

MARKS = ("tensor_model_parallel", "sequence_parallel", "allreduce", "shared")


def pretend_gpu() -> None:
    """Says that there is a GPU, as Transformer Engine asks when a layer is made. megarl has seen a
    CPU before."""
    import megarl.parallel.mcore  # noqa: F401

    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[method-assign]


@cache
def tiny(kind: str, head: str) -> Any:
    from megarl.models.hf_config import parse_hf_config, value_model
    from tests.tiny import tiny_hf

    raw = tiny_hf(kind).config.to_dict()
    model = parse_hf_config(raw)
    return value_model(model, raw, "tiny") if head == "value" else model


@contextmanager
def built_model(model: Any, layout: Any, rank: int, spec: str, **fields: Any) -> Iterator[Any]:
    """Yields the rank's BuiltModel of `spec`'s layers and its groups, in their scope."""
    from megarl.models import build
    from megarl.parallel.groups import ProcessGroups, model_scope

    from megatron.core.tensor_parallel.random import (
        model_parallel_cuda_manual_seed,
    )

    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    groups = ProcessGroups(layout)
    build.resolve_attention = lambda *_: spec
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), model_scope(groups):
            model_parallel_cuda_manual_seed(1)
            made = build.build_model(
                model, layout, dtype=torch.bfloat16, device="cpu", attention=spec, **fields
            )
            yield made, groups
    finally:
        groups.release()
        dist.destroy_process_group()


def describe(made: Any, groups: Any) -> dict[str, Any]:
    """Returns the parameters by name (shape, marks, whether the gradient norm counts it), the piece
    table's view of them, and what a checkpoint would hold."""
    from megarl.ckpt.dist import settle_keys
    from megarl.models.params import named_params

    from megatron.core.tensor_parallel.layers import (
        param_is_not_tensor_parallel_duplicate,
    )

    metadata = dict(
        non_homogeneous_layers=True, singleton_local_shards=False, dp_cp_group=groups.dp_cp
    )
    kept: dict[str, Any] = {}
    for i, chunk in enumerate(made.chunks):
        state = chunk.sharded_state_dict(metadata=metadata)
        kept |= {f"{i} {k}": v for k, v in state.items() if "_extra_state" not in k}
    own = sorted({v.key for v in kept.values()})
    settle_keys(kept, made.table)
    params = named_params(made.chunks)
    table = made.table.local_params(groups.coords)
    return dict(
        params={
            name: dict(
                shape=list(p.shape),
                counted=param_is_not_tensor_parallel_duplicate(p),
                **{mark: getattr(p, mark, None) for mark in MARKS},
            )
            for name, p in params.items()
        },
        table={
            name: dict(shape=list(p.shape), replicated=p.replicated, expert=p.place.ep is not None)
            for name, p in table.items()
        },
        buffers=sorted(made.table.buffers & table.keys()),
        megatron_keys=own,
        stored=sorted(stored(kept.values())),
    )


def stored(parts: Any) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yields (key, shape of the whole, this part's offset) for each part of a sharded state."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    for part in parts:
        for tensor in nested_values(part.build()) if hasattr(part, "build") else [part]:
            yield tensor.key, list(tensor.global_shape), list(tensor.global_offset)
