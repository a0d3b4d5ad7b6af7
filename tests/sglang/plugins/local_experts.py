"""Lets SGLang 0.5.23 generate with `--ep-size` on a CPU without AMX, as one of its own plugins.

A rank of expert parallelism numbers the experts of other ranks -1, which compiled kernels pass
over. SGLang's plain torch path does not: `moe_forward_native` scatters by expert, so the first
request ends the scheduler with "index -1 is out of bounds for dimension 1". Here the path is asked
for one choice of each token at a time, and for expert 0 with weight 0 in place of -1: the ranks'
outputs are summed, so that adds nothing. Weights, and how they are loaded, are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
    HookRegistry.register(target, by_choice, HookType.AROUND)


def by_choice(forward: Callable[..., Any], layer: Any, x: Any, topk: Any, config: Any) -> Any:
    """The sum of the experts' outputs, choice by choice: one that a token has twice is counted once
    by `forward`."""
    out = 0.0
    for ids, weights in zip(topk.topk_ids.split(1, 1), topk.topk_weights.split(1, 1), strict=True):
        away = ids < 0
        known = topk._replace(
            topk_ids=ids.masked_fill(away, 0), topk_weights=weights.masked_fill(away, 0)
        )
        out = out + forward(layer, x, known, config)
    return out
