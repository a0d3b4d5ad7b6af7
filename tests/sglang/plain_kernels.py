"""Torch in place of what keeps SGLang 0.5.23 from generating on a CPU without AMX, by its hooks.
Weights, and how they are loaded, are left alone.

- Latent attention: SGLang projects the keys and values of a prompt (its `MHA`) and hands them to a
  backend which then reads latents from the cache. Here prompts go the way of answers, which attends
  to latents.
- The gated norm of delta networks, the gate of a shared expert and MiniMax-M2's norms over all
  heads of q and k are Triton's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.nn import functional as F

FLA = "sglang.kernels.ops.attention.fla"


def hook() -> None:
    dispatch = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method"
    HookRegistry.register(dispatch, to_latents, HookType.AROUND)
    for target, function in (
        (f"{FLA}.fused_norm_gate.FusedRMSNormGated.forward", gated_norm),
        (f"{FLA}.layernorm_gated.RMSNorm.forward", gated_norm),
        ("sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul", add_gated),
        ("sglang.srt.models.minimax_m2.rms_sumsq_serial", squares),
        ("sglang.srt.models.minimax_m2.rms_apply_serial", norms),
    ):
        HookRegistry.register(target, function, HookType.REPLACE)
    HookRegistry.apply_hooks()


def to_latents(dispatch: Callable[..., Any], attn: Any, forward_batch: Any) -> Any:
    return type(dispatch(attn, forward_batch)).MLA


def gated_norm(self: Any, x: Any, z: Any) -> Any:
    return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) * F.silu(z)


def add_gated(hidden: Any, weight: Any, shared: Any, output: Any, *, do_add: bool) -> None:
    assert do_add
    output.add_((hidden @ weight).sigmoid()[:, None] * shared)


def squares(q: Any, k: Any) -> Any:
    """Their sums over a rank's heads, which ranks then add up."""
    return torch.cat([x.float().square().sum(-1) for x in (q, k)])


def norms(q: Any, k: Any, wq: Any, wk: Any, sums: Any, ranks: int, eps: float) -> tuple[Any, Any]:
    def norm(x: Any, weight: Any, total: Any) -> Any:
        return x * (total[:, None] / (x.shape[1] * ranks) + eps).rsqrt() * weight

    return norm(q, wq, sums[: len(q)]), norm(k, wk, sums[len(q) :])
