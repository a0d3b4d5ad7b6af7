"""What backward computes again does not change a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.engine_jobs import SP, batch, loss_fn, make_engine, save_model, state, weight_fn

LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": dict(SP),
    "qwen3_moe": dict(ep=2),
    "deepseek_v3-dense-first": dict(**SP, ep=2),
    "qwen3_5_text": dict(SP),
}


def steps(path: str, parallel: dict[str, Any], ways: list[dict[str, Any]]) -> list[Any]:
    """Returns (metrics, gradients, weights) of two steps for each way of recomputation, and how
    often each kind of module ran in them."""
    return [two_steps(path, parallel, over) for over in ways]


def two_steps(path: str, parallel: dict[str, Any], over: dict[str, Any]) -> Any:
    engine = make_engine(path, parallel, optimizer=dict(distributed=False), **over)
    calls: dict[str, int] = {}
    for model in engine.state.models:
        for module in model.modules():
            module.register_forward_hook(
                lambda module, *_: calls.update(
                    {type(module).__name__: calls.get(type(module).__name__, 0) + 1}
                )
            )
    wanted = ("logprobs", "entropy")
    stats = [engine.train_batch(batch(), loss_fn, weight_fn, outputs=wanted) for _ in range(2)]
    result = stats, state(engine, grads=True), state(engine), calls
    engine.destroy()
    return result


@pytest.mark.parametrize(
    ("family", "modules"),
    [
        ("llama", {"core_attn": "SDPACoreAttention", "layernorm": "RMSNorm", "mlp": "MLP"}),
        ("qwen3_moe", {"layernorm": "RMSNorm", "moe": "TopKRouter"}),
        (
            "deepseek_v3-dense-first",
            {"mla_up_proj": "", "shared_experts": "SharedExpertMLP", "moe": "TopKRouter"},
        ),
        (
            "qwen3_5_text",
            {"core_attn": "SDPACoreAttention", "layernorm": "ZeroCentredRMSNorm", "mlp": "MLP"},
        ),
    ],
)
def test_a_step_is_the_same_to_the_bit(
    family: str, modules: dict[str, str], worlds: Any, models: Path
) -> None:
    path, parallel = save_model(models, family, tie=False), LAYOUTS[family]
    named = [[name] for name in modules] + [list(modules)]
    ways = [{}] + [
        dict(recompute_granularity="selective", options={"recompute_modules": names})
        for names in named
    ]
    plain, *others = worlds(2).run(steps, path, parallel, ways)[0]
    for names, (stats, grads, weights, calls) in zip(named, others):
        for mine, want in zip(stats, plain[0]):
            same = {k for k in want if k in ("loss", "grad_norm", "rows", "entropy")}
            assert same and all(mine[k] == want[k] for k in same), names
        for have, want in ((grads, plain[1]), (weights, plain[2])):
            assert all(torch.equal(have[n], want[n]) for n in want), names
        for name in names:
            if kind := modules[name]:
                assert calls[kind] > plain[3][kind], name
