"""Chooses the activations that backward computes again, in megatron-core's words."""

from __future__ import annotations

from typing import Any

from megarl.config.engine import TrainEngineConfig
from megarl.parallel.layout import Layout


def recompute_fields(cfg: TrainEngineConfig, layout: Layout, num_layers: int) -> dict[str, Any]:
    """Returns the TransformerConfig's fields. Granularity "full" recomputes whole layers, chosen by
    a method; "selective" recomputes core attention in every layer.

    Raises ValueError where "uniform" would reach beyond the end of a pipeline chunk.
    """
    if cfg.recompute_granularity != "full":
        granularity = cfg.recompute_granularity
        return {"recompute_granularity": None if granularity == "none" else granularity}
    n = cfg.recompute_num_layers
    chunks = {
        len(layout.layers(num_layers, pp, vpp))
        for pp in range(layout.pp)
        for vpp in range(layout.vpp)
    }
    if cfg.recompute_method == "uniform" and any(size % n for size in chunks):
        raise ValueError(
            f"recompute_num_layers={n} does not divide the layers of a pipeline chunk "
            f"({', '.join(map(str, sorted(chunks)))}); use 1, or recompute_method='block'"
        )
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    return {name: getattr(cfg, name) for name in names}
