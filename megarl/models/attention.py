"""Core attention on torch SDPA for megatron-core's local layer spec: causal, grouped-query, packed
sequences and tries of them, context parallelism, sliding windows, sinks. The contract is that of
TEDotProductAttention:

sbhd: query [s, b, nq, d], key [s, b, nk, d], value [s, b, nk, v]  ->  [s, b, nq * v]
thd:  query [T, nq, d], key [T, nk, d], value [T, nk, v]           ->  [T, nq * v]

T packed tokens of this rank, nq query and nk key heads of this rank, d dimension of a key's head, v
of a value's (another in latent attention). Attention is always causal; attention masks are ignored,
as padding comes after every real token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarl.models.attention_batching import AttentionPlan, make_plan
from megarl.models.trie_params import TrieParams
from megarl.parallel import mcore  # noqa: F401  before megatron

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)


@dataclass(kw_only=True)
class SlotParams(PackedSeqParams):
    """Holds the lengths of cu_seqlens on the host, too: a device would have to stop for them."""

    slots: Sequence[int]


class SDPACoreAttention(MegatronModule):
    """Replaces megatron-core's core attention by torch's scaled_dot_product_attention; the module's
    text gives the shapes. Raises AssertionError for dropout, and for attention that is not causal
    self-attention."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        assert not attention_dropout and not config.attention_dropout
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.cp_group, self.tp_group = pg_collection.cp, pg_collection.tp
        self.scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        skip = config.window_attn_skip_freq
        slides = is_layer_window_attention(config.window_size, skip, layer_number)
        self.window = config.window_size[0] + 1 if slides else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Returns the attention's output: [T, nq*v] for packed sequences ("thd"), else [s, b,
        nq*v]. Masks and mask types are ignored. Raises AssertionError for an attention bias, for
        cu_seqlens that do not span all tokens, and for a trie under context parallelism or with a
        path longer than a sliding window."""
        assert attention_bias is None
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            return self._packed(query, key, value, packed_seq_params)
        s, b = query.shape[:2]
        if self.cp_group.size() == 1 and (self.window is None or s <= self.window):
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = self._sdpa(q, k, v, None)
            return out.permute(2, 0, 1, 3).reshape(s, b, -1)
        # b sequences of equal length, packed
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = self._grouped(q, k, v, self._plan([s * self.cp_group.size()] * b, q.device))
        return out.view(b, s, -1).transpose(0, 1)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams) -> Tensor:
        if isinstance(packed, TrieParams):
            assert self.cp_group.size() == 1
            assert self.window is None or packed.max_seqlen_q <= self.window
            return packed.attend(q, k, v, self.scale).flatten(1)
        # every layer of a micro-batch sees the same params: plans are made once and kept on them
        plans = packed.__dict__.setdefault("_megarl_plans", {})
        if self.window not in plans:
            plans[self.window] = self._plan(packed_lengths(packed), q.device)
        return self._grouped(q, k, v, plans[self.window])

    def _plan(self, lengths: Sequence[int], device: torch.device) -> AttentionPlan:
        cp = self.cp_group
        return make_plan(lengths, cp.size(), cp.rank(), device, self.window)

    def _grouped(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        """Computes attention group by group: q [T, nq, d], k [T, nk, d], v [T, nk, v] -> [T, nq *
        v]."""
        assert plan.tokens == len(q), "cu_seqlens must span all tokens"
        k, v = self._gather_kv(k, v, plan)
        outs = []
        for g, *qkv in zip(
            plan.groups,
            _split(_take(q, plan.q_index), [g.n * g.q_len for g in plan.groups]),
            *(_split(_take(x, plan.k_index), [g.n * g.k_len for g in plan.groups]) for x in (k, v)),
            strict=True,
        ):
            qs, ks, vs = (x.unflatten(0, (g.n, -1)).transpose(1, 2) for x in qkv)
            out = self._sdpa(qs, ks, vs, g.mask)  # [n, nq, Lq, v]
            outs.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        return _take(outs[0] if len(outs) == 1 else torch.cat(outs), plan.take)

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Computes one group: q [n, nq, Lq, d], k [n, nk, Lk, d], v [n, nk, Lk, v] -> [n, nq, Lq,
        v]."""
        grouped = q.shape[1] != k.shape[1]
        if grouped and q.is_cuda and (mask is not None or q.dtype == torch.float32):
            # the only CUDA kernel that takes grouped heads, flash, takes neither masks nor fp32:
            # without repeated heads another would materialise all Lq * Lk scores
            repeats = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
            grouped = False
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
        )

    def _gather_kv(self, k: Tensor, v: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        """Gathers k [T, nk, d], v [T, nk, v] as [T * cp, nk, d], [T * cp, nk, v], in global
        order."""
        if plan.kv_order is None:
            return k, v
        kv = _AllGather.apply(torch.cat((k, v), dim=-1), self.cp_group)
        k, v = kv.index_select(0, plan.kv_order).split((k.shape[-1], v.shape[-1]), dim=-1)
        return k, v

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns megatron-core's sharded tensors: of sinks, which ranks cut by heads, or none."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return sharded


class SinkAttention(SDPACoreAttention):
    """Attention in which each head has a sink: a learnable number that is one more score of every
    query, without a value (gpt-oss, 2025, arXiv 2508.10925). Tries are not supported.

    A key in front of a sequence is the sink. Its score with a query of head i is number i of
    further numbers of the key, as many as query heads share it; its value is zero. A query in
    front keeps torch's causal kernel:

        keys      s  k0 k1
        query -   x            causal: its output is left out
        query 0   x  x
        query 1   x  x  x
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        heads = config.num_attention_heads // self.tp_group.size()
        sinks = torch.empty(heads, dtype=config.params_dtype, device=device)
        self.softmax_offset = torch.nn.Parameter(sinks)  # Transformer Engine's name

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        nk, repeats = k.shape[1], q.shape[1] // k.shape[1]
        which = torch.eye(repeats, dtype=q.dtype, device=q.device).repeat(nk, 1)[None, :, None]
        q = torch.cat([q, which.expand(len(q), -1, q.shape[2], -1)], -1)
        scores = (self.softmax_offset / self.scale).to(k.dtype).view(1, nk, 1, repeats)
        sink = F.pad(scores, (k.shape[-1], 0)).expand(len(k), -1, -1, -1)
        k = torch.cat([sink, F.pad(k, (0, repeats))], 2)
        v = F.pad(v, (0, 0, 1, 0))
        if mask is not None:
            return super()._sdpa(q, k, v, F.pad(mask, (1, 0), value=True))
        return super()._sdpa(F.pad(q, (0, 0, 1, 0)), k, v, None)[:, :, 1:]


def packed_lengths(packed: PackedSeqParams) -> Sequence[int]:
    """Returns the lengths of packed sequences with their padding; a device stops for them, unless
    they are SlotParams."""
    if isinstance(packed, SlotParams):
        return packed.slots
    cu = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    lengths: list[int] = (cu[1:] - cu[:-1]).tolist()
    return lengths


def te_attention_with_tries() -> type:
    """Returns Transformer Engine's core attention with this project's attention over tries."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class TEAttentionWithTries(TEDotProductAttention):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            width = kwargs.get("k_channels") or config.kv_channels
            self.trie_scale = kwargs.get("softmax_scale") or 1.0 / math.sqrt(width)

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **how: Any) -> Any:
            packed = how.get("packed_seq_params")
            if isinstance(packed, TrieParams):
                return packed.attend(query, key, value, self.trie_scale).flatten(1)
            return super().forward(query, key, value, *args, **how)

    return TEAttentionWithTries


def _take(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index)


def _split(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """Splits x along its first dimension. A single part stays x: the backward of a split copies."""
    return x.split(sizes) if len(sizes) > 1 else (x,)


class _AllGather(torch.autograd.Function):
    """Gathers [n, ...] to [n * cp, ...], rank after rank; backward sums over ranks and scatters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None
