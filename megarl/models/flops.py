"""Arithmetic of a model by sequence length: what balances micro-batches."""

from __future__ import annotations

from megarl.models.hf_config import ModelConfig
from megarl.parallel.packing import Cost


def sequence_cost(m: ModelConfig) -> Cost:
    """Multiply-adds of one forward pass over n tokens, by n and n^2.

    A token meets every matrix it is routed to once (the embedding's only at the output) and, under
    causal attention, the keys and values of (n + 1) / 2 tokens in every head and layer.
    """
    q, kv = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
    attention = m.num_layers * (2 * m.hidden_size * (q + kv) + q)
    vocabulary = m.hidden_size * m.vocab_size if m.head == "lm" else 0
    return Cost(attention + _mlps(m) + vocabulary, m.num_layers * q)


def _mlps(m: ModelConfig) -> int:
    """Gate, up and down of all layers, and the routers."""
    if m.moe is None:
        return m.num_layers * 3 * m.hidden_size * m.intermediate_size
    dense = len(m.moe.dense_layers)
    routed = m.moe.top_k * m.moe.intermediate_size
    expert = 3 * (routed + m.moe.shared_intermediate_size) + m.moe.num_experts
    return m.hidden_size * (3 * dense * m.intermediate_size + (m.num_layers - dense) * expert)
