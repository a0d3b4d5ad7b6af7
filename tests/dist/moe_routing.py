"""Routers of Hugging Face's models, and routing to replay."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.dist.engine_jobs import batch

REPLAY: dict[str, Any] = dict(router_replay="trainer")


def hf_routers(hf: Any) -> dict[int, Any]:
    mlps = {i: layer.mlp for i, layer in enumerate(hf.model.layers)}
    found = {i: getattr(mlp, "gate", getattr(mlp, "router", None)) for i, mlp in mlps.items()}
    return {i: router for i, router in found.items() if router is not None}


def hf_routes(path: Path, tokens: list[int]) -> torch.Tensor:
    """[n,L,k], ascending: what transformers' routers choose for all tokens but the last; 0 in dense
    layers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found: dict[int, torch.Tensor] = {}
    for i, router in hf_routers(model).items():
        router.register_forward_hook(lambda _m, _a, said, i=i: found.update({i: said[2]}))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    config = model.config
    out = torch.zeros(
        len(tokens), config.num_hidden_layers, config.num_experts_per_tok, dtype=torch.long
    )
    for i, chosen in found.items():
        out[:, i] = chosen.sort().values
    return out[:-1]


def perturb(hf: Any, noise: float = 1.0) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Makes every router of `hf` choose by its scores plus noise, as a server does whose numerics
    are not the trainer's; what the chosen experts weigh stays as it was. Returns what the routers
    of the last pass chose, {layer: ([tokens,k], [tokens,k] without the noise)}.
    """
    chosen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer, router in hf_routers(hf).items():
        router.forward = _noisy(hf.config, router, noise, partial(chosen.__setitem__, layer))
    return chosen


def _noisy(config: Any, router: Any, noise: float, note: Any) -> Any:
    plain, k = router.forward, config.num_experts_per_tok

    def forward(hidden: torch.Tensor) -> Any:
        said = plain(hidden)
        own = said[2]
        if not noise:
            note((own, own))
            return said
        logits = torch.nn.functional.linear(hidden.flatten(0, -2), router.weight)
        g = torch.Generator().manual_seed(5)
        chosen = (logits + noise * torch.randn(logits.shape, generator=g)).topk(k).indices
        sigmoid = config.model_type in ("deepseek_v3", "glm4_moe")
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        weights = scores.gather(1, chosen)
        if getattr(config, "norm_topk_prob", True) and config.model_type != "deepseek_v2":
            weights = weights / weights.sum(-1, keepdim=True)
        note((chosen, own))
        return logits, weights * getattr(config, "routed_scaling_factor", 1.0), chosen

    return forward


def random_routing(layers: int = 4, experts: int = 4, k: int = 2) -> torch.Tensor:
    g = torch.Generator().manual_seed(5)
    rows, width = batch()["input_ids"].shape
    return torch.rand(rows, width, layers, experts, generator=g).argsort(-1)[..., :k].byte()
