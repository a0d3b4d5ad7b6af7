"""Core attention on torch SDPA, for megatron-core's local layer spec: causal, GQA, packed sequences,
context parallelism. The contract is that of TEDotProductAttention:

sbhd: query [s, b, nq, d], key and value [s, b, nk, d]  ->  [s, b, nq * d]
thd:  query [T, nq, d], key and value [T, nk, d]        ->  [T, nq * d]

T packed tokens of this rank, nq query and nk key heads of this rank, d head dimension. Attention is
causal always; attention masks are ignored, as padding comes after every real token.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarl.models.packing_plan import Group, plan_groups
from megarl.parallel import mcore  # noqa: F401  before megatron

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.process_groups_config import ProcessGroupCollection  # isort: skip
from megatron.core.transformer.enums import AttnMaskType  # isort: skip
from megatron.core.transformer.module import MegatronModule  # isort: skip


class SDPACoreAttention(MegatronModule):
    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        assert not attention_dropout and not config.attention_dropout
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.cp_group = pg_collection.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

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
        assert attention_bias is None
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            return self._packed(query, key, value, packed_seq_params)
        s, b = query.shape[:2]
        if self.cp_group.size() == 1:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = self._sdpa(q, k, v, None)
            return out.permute(2, 0, 1, 3).reshape(s, b, -1)
        # one path for context parallelism: b sequences of equal length, packed
        lengths = [s * self.cp_group.size()] * b
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = self._grouped(q, *self._gather_kv(k, v, lengths), self._plan(lengths, q.device))
        return out.view(b, s, -1).transpose(0, 1)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams) -> Tensor:
        # every layer of a micro-batch sees the same PackedSeqParams: the plan is made once and kept
        # on it, which on a GPU also saves a device synchronisation per layer
        made = getattr(packed, "_megarl_plan", None)
        if made is None:
            cu = packed.cu_seqlens_q_padded
            cu = packed.cu_seqlens_q if cu is None else cu
            lengths = (cu[1:] - cu[:-1]).tolist()
            made = (lengths, self._plan(lengths, q.device))
            packed._megarl_plan = made
        lengths, plan = made
        assert sum(lengths) == q.shape[0] * self.cp_group.size(), "cu_seqlens must span all tokens"
        return self._grouped(q, *self._gather_kv(k, v, lengths), plan)

    def _plan(self, lengths: list[int], device: torch.device) -> tuple[Group, ...]:
        return plan_groups(lengths, self.cp_group.size(), self.cp_group.rank(), device)

    def _grouped(self, q: Tensor, k: Tensor, v: Tensor, plan: tuple[Group, ...]) -> Tensor:
        """q [T, nq, d], k and v [T * cp, nk, d] in global order -> [T, nq * d]."""
        pieces = []
        for g in plan:
            qs = q[g.q_index].transpose(1, 2)  # [n, nq, Lq, d]
            ks, vs = (x[g.k_index].transpose(1, 2) for x in (k, v))
            out = self._sdpa(qs, ks, vs, g.mask).transpose(1, 2)  # [n, Lq, nq, d]
            pieces.append(out.reshape(-1, q.shape[1] * q.shape[2])[g.real])
        order = torch.argsort(torch.cat([g.rows for g in plan]))
        return torch.cat(pieces)[order]

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    def _gather_kv(self, k: Tensor, v: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """[T, nk, d] twice -> [T * cp, nk, d] twice, in global order."""
        cp = self.cp_group.size()
        if cp == 1:
            return k, v
        kv = _AllGather.apply(torch.stack((k, v), dim=1), self.cp_group)
        held = torch.cat([zigzag_index(lengths, cp, r, k.device) for r in range(cp)])
        kv = kv.index_select(0, torch.argsort(held))
        return kv[:, 0], kv[:, 1]

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}


def zigzag_index(lengths: list[int], cp: int, rank: int, device: torch.device) -> Tensor:
    """Positions, in the packed global order, of the tokens that context-parallel rank holds."""
    out, base = [], 0
    for n in lengths:
        c = n // (2 * cp)
        for chunk in (rank, 2 * cp - 1 - rank):
            out.append(torch.arange(base + chunk * c, base + (chunk + 1) * c, device=device))
        base += n
    return torch.cat(out)


class _AllGather(torch.autograd.Function):
    """[n, ...] -> [n * cp, ...], rank after rank; backward sums over ranks and scatters."""

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
