"""Arithmetic of a model by sequence length: what balances micro-batches and what MFU counts."""

from __future__ import annotations

from collections.abc import Iterable

from megarl.models.families import SHARED_GATE
from megarl.models.hf_config import ModelConfig
from megarl.parallel.packing import Cost


def train_flops(m: ModelConfig, lengths: Iterable[int]) -> float:
    """Floating-point operations of forward and backward over sequences of `lengths` tokens.

    Matrix products only, two operations a multiply-add, and backward is two products for each of
    forward's. Recomputation, padding and what a causal kernel computes in vain do not count: this
    is what "model FLOPs utilisation" (Chowdhery et al., PaLM, 2022, appendix B) divides by.
    """
    cost = sequence_cost(m)
    return 6.0 * sum(cost(n) for n in lengths)


def sequence_cost(m: ModelConfig) -> Cost:
    """Multiply-adds of one forward pass over n tokens, by n and n^2.

    A token meets every matrix it is routed to once (the embedding's only at the output) and, under
    causal attention, the keys and values of (n + 1) / 2 tokens in every head and layer.
    """
    attention = m.num_attention_heads * (m.head_dim + m.v_head_dim) // 2  # by half a pair of tokens
    vocabulary = m.hidden_size * (m.vocab_size if m.head == "lm" else 1)
    linear = m.num_layers * (_projections(m) + attention) + _mlps(m) + vocabulary
    return Cost(linear, m.num_layers * attention)


def _projections(m: ModelConfig) -> int:
    """Of a layer's hidden state to queries, keys and values, and back."""
    heads, out = m.num_attention_heads, m.num_attention_heads * m.v_head_dim * m.hidden_size
    if m.mla is None:
        return m.hidden_size * (heads + 2 * m.num_key_value_heads) * m.head_dim + out
    a = m.mla
    queries, source = heads * m.head_dim, a.q_rank or m.hidden_size
    down = (a.q_rank or 0) + a.kv_rank + a.rope_dim
    up = source * queries + a.kv_rank * heads * (a.nope_dim + a.v_dim)
    return m.hidden_size * down + up + out


def _mlps(m: ModelConfig) -> int:
    """Gate, up and down of all layers, and the routers."""
    if m.moe is None:
        return m.num_layers * 3 * m.hidden_size * m.intermediate_size
    assert m.declaration.moe is not None
    dense = len(m.moe.dense_layers)
    routed = m.moe.top_k * m.moe.intermediate_size
    gates = m.moe.num_experts + (SHARED_GATE in m.declaration.moe.shared)
    expert = 3 * (routed + m.moe.shared_intermediate_size) + gates
    return m.hidden_size * (3 * dense * m.intermediate_size + (m.num_layers - dense) * expert)
