"""Routers of Hugging Face's models, and routing to replay."""

from __future__ import annotations

from typing import Any

import torch

from megarl.config.engine import MoEConfig
from tests.dist.engine_jobs import batch

REPLAY: dict[str, Any] = dict(moe=MoEConfig(router_replay=True))


def hf_routers(hf: Any) -> dict[int, Any]:
    mlps = {i: layer.mlp for i, layer in enumerate(hf.model.layers)}
    return {i: mlp.gate for i, mlp in mlps.items() if hasattr(mlp, "gate")}


def random_routing(layers: int = 4, experts: int = 4, k: int = 2) -> torch.Tensor:
    g = torch.Generator().manual_seed(5)
    rows, width = batch()["input_ids"].shape
    return torch.rand(rows, width, layers, experts, generator=g).argsort(-1)[..., :k].byte()
