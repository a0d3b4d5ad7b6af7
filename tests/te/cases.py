"""Models and layouts of the contract; nothing here needs Transformer Engine."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.parallel.layout import Layout
from tests.tiny import (
    GLM_KINDS,
    HYBRID_KINDS,
    HYBRID_MOE_KINDS,
    KINDS,
    MLA_KINDS,
    MOE_KINDS,
)

SP = dict(tp=2, sequence_parallel=True)
# (kind of tiny model, layout, rank, head)
Case = tuple[str, Layout, int, str]


def _cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for kind in (*KINDS, *GLM_KINDS, *MOE_KINDS, *MLA_KINDS, *HYBRID_KINDS):
        sparse = kind in MOE_KINDS + MLA_KINDS + HYBRID_MOE_KINDS
        found[f"{kind}-one"] = (kind, Layout(), 0, "lm")
        found[f"{kind}-tp"] = (kind, Layout(**SP), 1, "lm")
        last = Layout(**SP, pp=2, ep=2) if sparse else Layout(**SP, pp=2)
        found[f"{kind}-last"] = (kind, last, 3, "lm")
    found["gemma3_text-tp"] = ("gemma3_text", Layout(**SP), 1, "lm")
    found["olmo3-tp"] = ("olmo3", Layout(**SP), 1, "lm")
    found["gpt_oss-tp"] = ("gpt_oss", Layout(**SP, ep=2), 1, "lm")
    found["qwen3-value"] = ("qwen3", Layout(**SP), 1, "value")
    found["qwen2-cp"] = ("qwen2", Layout(tp=2, cp=2), 3, "lm")
    found["mixtral-etp"] = ("mixtral", Layout(**SP, ep=2, etp=2, dp=2), 3, "lm")
    found["llama-vpp"] = ("llama", Layout(pp=2, vpp=2), 1, "lm")
    return found


CASES = _cases()
NEWEST_ALONE = ("gpt_oss-tp",)  # the oldest has no sinks
LORA_CASES = ("qwen3-tp", "qwen3_moe-tp", "deepseek_v3-tp")
FUSED_CASES = ("qwen3-one", "qwen3_moe-tp", "deepseek_v3-last", "qwen3-value", "llama-vpp")
# name in configs/models -> (layout, owners of a sync)
BIG = {
    "qwen3-235b-a22b": Layout(**SP | dict(tp=4), pp=4, dp=16, ep=8, split=(24, 24, 23, 23)),
    "deepseek-v3": Layout(**SP | dict(tp=8), pp=8, dp=4, ep=32, split=(8,) * 5 + (7,) * 3),
    "llama-3.1-405b": Layout(**SP | dict(tp=8), pp=14, cp=2, dp=2),
}  # fmt: skip


def BIG_RANKS(layout: Layout) -> Sequence[int]:
    """Returns the first rank, one of a stage in the middle, and the last."""
    return 0, layout.world_size // 2 + 1, layout.world_size - 1
