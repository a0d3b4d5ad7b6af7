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
    """Returns the inverse frequencies, float32 [rotary_dim / 2] on the host, with linear or Llama-3
    scaling where the model has it (Su et al., 2021, arXiv 2104.09864). window: those of layers with
    a sliding window."""
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
    return _llama3(freq, scaling)


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
