"""Declares Kimi-K2 (2025, arXiv 2507.20534) and the text model of Kimi-K2.5 (2026). Both have
DeepSeek-V3's architecture; the model_type differs."""

from dataclasses import replace

from megarl.models.families.deepseek import V3
from megarl.models.shapes import Wrapper

_K25 = Wrapper(
    architecture="KimiK25ForConditionalGeneration",
    model="language_model.model.",
    head="language_model.lm_head.",
)
FAMILIES = (replace(V3, name="kimi_k2", model_type="kimi_k2", wrappers=(_K25,)),)
