"""Computes the inverse frequencies of rotary embeddings, equal to Hugging Face's bit for bit.

megatron-core hardcodes everything of Llama-3 scaling but the factor, so the model's frequencies are
always computed here and put in place of its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.models.shapes import ModelConfig, RopeScaling


def inv_freq(model: ModelConfig, *, window: bool = False) -> Tensor:
    """Returns the inverse frequencies, float32 [rotary_dim / 2] on the host, with linear, Llama-3
    or YaRN scaling where the model has it (Su et al., 2021, arXiv 2104.09864). window: those of
    layers with a sliding window."""
    d = model.attention.rotary_dim
    theta, scaling = model.rope_theta, model.rope_scaling
    if window and model.window_rope is not None:
        theta, scaling = model.window_rope
    exponent = torch.arange(0, d, 2, dtype=torch.int64).float() / d
    freq = 1.0 / (theta**exponent)
    if scaling is None:
        return freq
    if scaling.type == "linear":
        return freq / scaling.factor
    if scaling.type == "yarn":
        return _yarn(theta, d, scaling)
    return _llama3(freq, scaling)


def _yarn(base: float, d: int, s: RopeScaling) -> Tensor:
    """Scales as YaRN does (Peng et al., 2023, arXiv 2309.00071, section 3.2): a pair of
    numbers that turns at least beta_fast times over the original context keeps its frequency. One
    that turns at most beta_slow times is stretched by `factor`. Between them both are blended,
    linearly in the pair's place."""

    def place(turns: float) -> float:
        ratio = s.original_max_position_embeddings / (turns * 2 * math.pi)
        return d * math.log(ratio) / (2 * math.log(base))

    first, last = place(s.beta_fast), place(s.beta_slow)
    if not s.exact:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, d - 1)
    last += 0.001 * (first == last)
    powers = base ** (torch.arange(0, d, 2).float() / d)
    unscaled = 1 - ((torch.arange(d // 2).float() - first) / (last - first)).clamp(0, 1)
    return 1.0 / (s.factor * powers) * (1 - unscaled) + 1.0 / powers * unscaled


def _llama3(freq: Tensor, s: RopeScaling) -> Tensor:
    """Scales as Llama 3.1 does: wavelengths longer than the original context are stretched by
    `factor`, short ones kept, those between blended linearly in original_context / wavelength."""
    context = s.original_max_position_embeddings
    wavelength = 2 * math.pi / freq
    long, short = context / s.low_freq_factor, context / s.high_freq_factor
    smooth = (context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    scaled = torch.where(wavelength > long, freq / s.factor, freq)
    blended = (1 - smooth) * scaled / s.factor + smooth * scaled
    between = ~(wavelength < short) & ~(wavelength > long)
    return torch.where(between, blended, scaled)
