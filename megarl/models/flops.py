"""Counts the arithmetic of a model by sequence length, to balance micro-batches and for MFU."""

from __future__ import annotations

from collections.abc import Iterable

from megarl.models.shapes import ModelConfig
from megarl.parallel.packing import Cost


def train_flops(m: ModelConfig, lengths: Iterable[int]) -> float:
    """Returns the floating-point operations of forward and backward over sequences of `lengths`
    tokens.

    Only matrix products count, two operations a multiply-add, and backward is two products for each
    of forward's. Recomputation, padding and the masked half of causal attention do not count: this
    is the work that "model FLOPs utilisation" (Chowdhery et al., PaLM, 2022, appendix B) divides
    by.
    """
    cost = sequence_cost(m)
    return 6.0 * sum(cost(n) for n in lengths)


def sequence_cost(m: ModelConfig) -> Cost:
    """Returns the cost of a sequence of n tokens, in multiply-adds of one forward pass.

    A token meets every matrix it is routed to once (the embedding's only at the output) and, under
    causal attention, the keys and values of (n + 1) / 2 tokens in every head and attending layer,
    or of those in the layer's window; in a recurrent layer it meets the state.
    """
    a = m.attention
    pair = a.heads * (a.head_dim + a.v_head_dim) // 2  # by half a pair of tokens
    vocabulary = m.hidden_size * (m.vocab_size if m.head == "lm" else 1)
    sliding = len(a.window_layers)
    recurrent = len(m.recurrent.layers) if m.recurrent else 0
    states = recurrent * m.recurrent.products if m.recurrent else 0
    full = (m.num_layers - sliding - recurrent) * pair
    mixers = sum(m.mixer(i).weights(m.hidden_size) for i in range(m.num_layers))
    linear = mixers + states + full + _mlps(m) + vocabulary
    return Cost(linear, full, windowed=sliding * pair, window=a.window or 0)


def _mlps(m: ModelConfig) -> int:
    """Returns how many numbers of gates, ups, downs and routers a token meets in all layers."""
    if m.moe is None:
        return m.num_layers * 3 * m.hidden_size * m.intermediate_size
    dense = len(m.moe.dense_layers)
    routed = m.moe.top_k * m.moe.intermediate_size
    gates = m.moe.num_experts + m.moe.shared_gate
    expert = 3 * (routed + m.moe.shared_intermediate_size) + gates
    return m.hidden_size * (3 * dense * m.intermediate_size + (m.num_layers - dense) * expert)
