"""Gated delta networks (Yang et al., 2024, arXiv 2412.06464) token by token: kernels for which
SGLang has no other path on a CPU.

T tokens of all sequences, H heads of values, each of size V, G heads of keys, each of size K. A
state is [V, K]. Pools, which SGLang indexes by slot, are written in place.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """x: [channels, T]. weight: [channels, kernel]. conv_states: [slots, channels, kernel - 1]."""
    out = torch.empty_like(x)
    for (first, last), slot, goes_on in _sequences(
        query_start_loc, cache_indices, has_initial_state
    ):
        inputs = torch.cat((conv_states[slot] * goes_on, x[:, first:last]), 1)
        out[:, first:last] = F.conv1d(inputs, weight[:, None], bias, groups=len(weight))
        conv_states[slot] = inputs[:, -conv_states.shape[2] :]
    return F.silu(out)


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """x: [sequences, channels], one token of each."""
    starts = torch.arange(len(x) + 1)
    ones = torch.ones(len(x), dtype=torch.bool)
    return causal_conv1d_fn_cpu(
        x.t(), weight, bias, conv_states=conv_states, has_initial_state=ones,
        cache_indices=conv_state_indices, query_start_loc=starts,
    ).t()  # fmt: skip


def fused_gdn_gating_cpu(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Logarithms of decays and rates of change, each [1, T, H]."""
    decays = -A_log.float().exp() * F.softplus(a.float() + dt_bias)
    return decays[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    *,
    initial_state_indices: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """q, k: [1, T, G, K]. v: [1, T, H, V]. g, beta: [1, T, H]. initial_state: [slots, H, V, K]."""
    out = torch.zeros_like(v)
    serves = v.shape[2] // k.shape[2]
    q, k = (_unit(x[0]).repeat_interleave(serves, 1) for x in (q, k))
    q = q * q.shape[2] ** -0.5
    for (first, last), slot, _ in _sequences(cu_seqlens, initial_state_indices):
        state = initial_state[slot].float()
        for t in range(first, last):
            state = state * g[0, t, :, None, None].exp()
            error = v[0, t] - torch.einsum("hvk,hk->hv", state, k[t])
            state = state + torch.einsum("hv,hk->hvk", beta[0, t, :, None] * error, k[t])
            out[0, t] = torch.einsum("hvk,hk->hv", state, q[t])
        initial_state[slot] = state
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> Tensor:
    """Both of the above for one token of each sequence."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    return chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, initial_state_source, cu_seqlens,
        initial_state_indices=initial_state_indices,
    )[0]  # fmt: skip


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the convolution, of the gate [T, H, V], rates and decays [T, H]."""
    values = value_heads * value_dim
    mixed, z = qkvz.split((2 * key_heads * key_dim + values, values), -1)
    b, a = ba.split((value_heads, value_heads), -1)
    return mixed.contiguous(), z.reshape(len(z), value_heads, value_dim), b, a


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, size: int
) -> tuple[Tensor, Tensor]:
    """Each head's norm, whose weight counts from 1: [T * heads, size] of both."""
    pairs = ((q, q_weight), (k, k_weight))
    q, k = (F.rms_norm(x.reshape(-1, size), (size,), 1 + w, eps) for x, w in pairs)
    return q, k


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, size: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, of heads that each have a gate behind their query."""
    q, gate = q_gate.view(-1, heads, 2 * size).chunk(2, -1)
    return (*fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, size), gate.contiguous())


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    x.mul_(gate.reshape(x.shape).sigmoid())


def _sequences(starts: Tensor, slots: Tensor, goes_on: Tensor | None = None) -> Any:
    """((first token, the one after the last), slot, whether it has a state) by sequence."""
    bounds = list(pairwise(starts.tolist()))
    return zip(bounds, slots.tolist(), [True] * len(bounds) if goes_on is None else goes_on)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
