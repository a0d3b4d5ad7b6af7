"""Kimi-K2 (2025, arXiv 2507.20534): DeepSeek-V3's architecture under a model_type of its own."""

from dataclasses import replace

from megarl.models.families.deepseek import V3

FAMILIES = (replace(V3, name="kimi_k2", model_type="kimi_k2"),)
