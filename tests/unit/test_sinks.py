"""Attention sinks against a softmax with one more score, and what is refused of them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.models.attention import SinkAttention, SlotParams

from megatron.core.transformer.enums import AttnMaskType

HEADS, KV, DIM = 6, 2, 8
LENGTHS = (3, 40, 1, 17, 12, 12)


class Alone:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def attention(window: int | None) -> SinkAttention:
    config: Any = SimpleNamespace(
        num_attention_heads=HEADS, kv_channels=DIM, params_dtype=torch.float32,
        use_cpu_initialization=True, attention_dropout=0.0, window_attn_skip_freq=None,
        window_size=None if window is None else (window - 1, 0),
    )  # fmt: skip
    groups: Any = SimpleNamespace(tp=Alone(), cp=Alone())
    module = SinkAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    with torch.no_grad():
        module.softmax_offset.copy_(torch.linspace(-2.0, 3.0, HEADS))
    return module


def by_formula(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """Returns the attention of one sequence: q [n,HEADS,DIM], k, v [n,KV,DIM] -> [n,HEADS*DIM]."""
    k, v = (x.repeat_interleave(HEADS // KV, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(DIM)
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (back >= 0) & (back < (window or len(q)))
    scores = scores.masked_fill(~seen, -math.inf)
    sink = sinks[:, None, None].expand(-1, len(q), 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return torch.einsum("hij,jhd->ihd", weights, v).flatten(1)


def close(got: Tensor, want: Tensor) -> None:
    """Both sum in fp32, in another order."""
    assert float((got - want).norm() / want.norm()) < 2e-6


@pytest.mark.parametrize("window", (None, 5))
@pytest.mark.parametrize("packed", (True, False))
def test_a_sink_is_one_more_score_without_a_value(window: int | None, packed: bool) -> None:
    lengths = LENGTHS if packed else (20, 20)
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), n, DIM, generator=g).requires_grad_() for n in (HEADS, KV, KV)
    )
    module = attention(window)
    if packed:
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        params = SlotParams(
            qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, slots=list(lengths),
            cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
        )  # fmt: skip
        out = module(q, k, v, packed_seq_params=params)
    else:
        by_place = (x.unflatten(0, (2, 20)).transpose(0, 1) for x in (q, k, v))
        out = module(*by_place).transpose(0, 1).flatten(0, 1)
    sinks = module.softmax_offset.detach().clone().requires_grad_()
    parts = zip(*(x.split(lengths) for x in (q, k, v)))
    want = torch.cat([by_formula(*x, sinks, window) for x in parts])
    close(out, want)
    weight = torch.randn(out.shape, generator=g)
    got = torch.autograd.grad((out * weight).sum(), (q, k, v, module.softmax_offset))
    for mine, theirs in zip(got, torch.autograd.grad((want * weight).sum(), (q, k, v, sinks))):
        close(mine, theirs)
