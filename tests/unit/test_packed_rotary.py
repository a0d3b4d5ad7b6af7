"""Rotary embedding of packed tokens where it is not fused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megarl.api.batch import Batch
from megarl.engine.micro_batch import alignment, build
from megarl.parallel import mcore  # noqa: F401  before megatron
from megarl.parallel.layout import Layout

from megatron.core.models.common.embeddings import rope_utils

WAITS = {"tolist", "item", "__bool__", "__int__", "__index__", "cpu", "numpy", "nonzero"}


class Waits(TorchFunctionMode):
    """Counts calls for which a host waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in WAITS:
            self.calls.append(func.__name__)
        return func(*args, **(kwargs or {}))


def batch() -> Batch:
    lengths = [5, 1, 8]
    ids = torch.zeros(3, 8, dtype=torch.long)
    mask = torch.arange(8)[None] < torch.tensor(lengths)[:, None]
    return Batch.from_padded({"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize(
    ("cp", "cp_rank", "share_prefixes"),
    [(1, 0, False), (2, 0, False), (2, 1, False), (1, 0, True)],  # a trie stays whole
)
def test_packed_tokens_are_rotated_by_their_positions_without_a_wait(
    cp: int, cp_rank: int, share_prefixes: bool
) -> None:
    align = alignment(Layout(cp=cp))
    how = dict(cp=cp, cp_rank=cp_rank, share_prefixes=share_prefixes)
    (mb,) = build(batch(), [[0, 1, 2]], align, **how)
    params, positions = mb.params(), mb.packed.position_ids
    table = torch.rand(params.max_seqlen_q, 1, 1, 4).repeat(1, 1, 1, 2)
    angles = table[positions] if share_prefixes else table
    t = torch.rand(len(positions), 3, 8)
    config = SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False
    )
    group = SimpleNamespace(size=lambda: cp, rank=lambda: cp_rank)
    with Waits() as waits:
        out = rope_utils.apply_rotary_pos_emb(
            t, angles, config, cu_seqlens=params.cu_seqlens_q, cp_group=group
        )
    assert waits.calls == []
    one_by_one = [
        rope_utils.apply_rotary_pos_emb(x[None, None], table[p : p + 1], config, cp_group=group)
        for x, p in zip(t, positions.tolist(), strict=True)
    ]
    assert torch.equal(out, torch.cat(one_by_one)[:, 0])
