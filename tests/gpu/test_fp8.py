"""FP8 recipes of Transformer Engine: near fp32 as eight bits can be, in both directions. Where a
recipe cannot run, the engine says so: no case is left out.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.models.build import runs_on
from tests.dist.engine_jobs import batch, loss_fn, make_engine, state, weight_fn
from tests.dist.reference import hf_outputs
from tests.tiny import save_tiny, tiny_hf

# ratios of norms; with inputs and weights of every product rounded to e4m3 and gradients to e5m2,
# fp32 on a CPU comes to 0.035 and 0.12
OUTPUTS, GRADIENTS = 0.1, 0.3
SIZES: dict[str, Any] = dict(hidden_size=256, intermediate_size=512, head_dim=64, layers=2)
KINDS = {"qwen3": SIZES, "qwen3_moe": SIZES | dict(moe_intermediate_size=256)}
KW: dict[str, Any] = dict(outputs=("logprobs", "entropy"), temperature=0.8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ("delayed", "tensorwise", "blockwise", "mxfp8"))
def test_fp8_is_near_fp32(recipe: str, kind: str, tmp_path: Path) -> None:
    path, over = str(save_tiny(tmp_path / "m", kind, **KINDS[kind])), dict(dtype="bfloat16")
    te = importlib.util.find_spec("transformer_engine") is not None
    if not (te and runs_on(recipe, torch.cuda.get_device_capability())):
        with pytest.raises(ValueError, match=f"fp8='{recipe}' needs"):
            make_engine(path, {}, fp8=recipe, **over)
        return
    want = hf_outputs(tiny_hf(kind, **KINDS[kind]), batch())["logprobs"].detach()
    plain, rounded = (figures(path, fp8=fp8, **over) for fp8 in ("none", recipe))
    assert not torch.equal(rounded["logprobs"], plain["logprobs"]), "FP8 is not in effect"
    assert (rounded["logprobs"] - want).norm() < OUTPUTS * want.norm()
    for name, grad in plain["grads"].items():
        assert (rounded["grads"][name] - grad).norm() < GRADIENTS * plain["size"], name
    assert rounded["losses"][-1] < rounded["losses"][0]


def figures(path: str, **over: Any) -> dict[str, Any]:
    engine = make_engine(path, {}, optimizer={"distributed": False}, max_tokens=10**6, **over)
    result: dict[str, Any] = {"logprobs": engine.forward(batch(), temperature=0.8)}
    engine.backward_batch(batch(), loss_fn, weight_fn, **KW)
    result["grads"] = state(engine, grads=True)
    result["size"] = sum(g.square().sum() for g in result["grads"].values()) ** 0.5
    stats = [engine.train_batch(batch(), loss_fn, weight_fn, **KW) for _ in range(3)]
    assert all(s["update_successful"] == 1 for s in stats)
    result["losses"] = [s["loss"] for s in stats]
    engine.destroy()
    return result
