"""The converter and engines load each other's checkpoints, on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.api.records import SaveLoadMeta
from megarl.ckpt.convert import dist2hf, hf2dist, inspect, verify
from tests.dist.engine_jobs import batch, loss_fn, make_engine, save_model, weight_fn
from tests.dist.models_util import built_model
from tests.dist.world import World
from tests.tiny import HYBRID_KINDS, KINDS, MLA_KINDS, MOE_KINDS, OSS_KINDS

Parallel = dict[str, Any]
SP2: Parallel = dict(tp=2, sequence_parallel=True)
# name: (family, tied, the layout that trains and saves, the layout that loads), of two ranks
CASES: dict[str, tuple[str, bool, Parallel, Parallel]] = {
    "llama": ("llama", True, dict(tp=2), dict(pp=2)),
    "qwen2": ("qwen2", False, dict(pp=2, vpp=2), dict(tp=2)),
    "qwen3": ("qwen3", True, dict(pp=2), SP2),
    "qwen2_moe": ("qwen2_moe", False, SP2, dict(ep=2)),
    "qwen3_moe": ("qwen3_moe", False, SP2 | dict(ep=2), dict(etp=2)),
    "mixtral": ("mixtral", False, dict(etp=2), dict(pp=2)),
    "deepseek_v2": ("deepseek_v2", False, SP2, dict(pp=2)),
    "deepseek_v2_lite": ("deepseek_v2_lite", False, dict(ep=2), SP2),
    "deepseek_v3": ("deepseek_v3", False, dict(pp=2), SP2 | dict(ep=2)),
}


def train(path: str, root: Path, parallel: Parallel, with_optim: bool, dtype: str) -> None:
    engine = make_engine(path, parallel, dtype=dtype)
    engine.train_batch(batch(), loss_fn, weight_fn, outputs=("logprobs", "entropy"))
    engine.step_lr_scheduler()
    for kind, optim in (("dist", with_optim), ("hf", False)):
        engine.save(SaveLoadMeta(path=str(root / kind), weight_format=kind, with_optim=optim))
    engine.destroy()


def load_and_save(path: str, root: Path, parallel: Parallel) -> None:
    """Loads the converter's output into an engine with other weights and saves it again."""
    engine = make_engine(path, parallel, trained=False)
    for p in engine.state.params.values():
        p.data.fill_(7.0)
    meta = dict(path=str(root / "made"), weight_format="dist", with_optim=False)
    engine.load(SaveLoadMeta(**meta))
    engine.save(SaveLoadMeta(path=str(root / "again"), weight_format="hf", with_optim=False))
    engine.destroy()


def check(world: World, path: str, root: Path, before: Parallel, after: Parallel, optim: bool,
          dtype: str = "float32") -> None:  # fmt: skip
    """Checks that dist -> HF and HF -> dist -> engine -> HF equal the engine's own HF save."""
    world.run(train, path, root, before, optim, dtype)
    dist2hf(root / "dist", root / "converted")
    assert verify(root / "converted", root / "hf") == []
    assert verify(root / "dist", root / "hf") == []
    assert verify(path, root / "hf")  # it was trained
    found = inspect(root / "dist")
    assert found["complete"] == "yes" and (found["optimizer state"] == "no") != optim
    degrees = {k: v for k, v in before.items() if k != "sequence_parallel"}
    assert all(f"{k}={v}" in found["layout"] for k, v in degrees.items())
    hf2dist(root / "hf", root / "made", part_bytes=100_000)
    world.run(load_and_save, path, root, after)
    if dtype == "float32":
        assert verify(root / "again", root / "hf") == []


@pytest.mark.parametrize("case", CASES)
def test_every_family_between_training_and_conversion(
    world2: World, tmp_path: Path, case: str
) -> None:
    kind, tie, before, after = CASES[case]
    path, optim = save_model(tmp_path, kind, tie), list(CASES).index(case) % 2 == 0
    check(world2, path, tmp_path, before, after, optim)


TP2PP2: Parallel = SP2 | dict(pp=2)


def test_trained_at_tp2_pp2(world4: World, tmp_path: Path) -> None:
    path = save_model(tmp_path, "qwen2_moe", False)
    check(world4, path, tmp_path, TP2PP2 | dict(ep=2), TP2PP2 | dict(etp=2), optim=False)


@pytest.mark.full
@pytest.mark.parametrize("optim", [False, True], ids=["weights", "optimizer"])
@pytest.mark.parametrize("kind", [*KINDS, *MOE_KINDS, *MLA_KINDS, *HYBRID_KINDS, *OSS_KINDS])
def test_trained_at_tp2_pp2_product(world4: World, tmp_path: Path, kind: str, optim: bool) -> None:
    path = save_model(tmp_path, kind, tie=kind == "qwen3")
    experts = {} if kind in (*KINDS, "qwen3_5_text") else dict(ep=2)
    check(world4, path, tmp_path, TP2PP2 | experts, dict(pp=4), optim, "bfloat16")


def megatron_loads(path: str, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Loads by megatron-core's own code, with the names of either kind of layer."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    metadata = {"non_homogeneous_layers": True}
    with built_model(Path(path), dict(tp=2), load=False) as (model, groups):
        chunk = model.chunks[0]
        state = chunk.sharded_state_dict(metadata=metadata | {"dp_cp_group": groups.dp_cp})
        for name, sharded in state.items():
            if isinstance(sharded, ShardedTensor) and name.endswith("pre_mlp_layernorm.weight"):
                sharded.key = name
        state = {k: v for k, v in state.items() if "_extra_state" not in k}
        loaded = dist_checkpointing.load(state, str(checkpoint))
        return {k: v.clone() for k, v in loaded.items() if "norm" in k}


def test_megatrons_own_load(world2: World, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = save_model(tmp_path, "llama", False)
    hf2dist(path, tmp_path / "ck")
    want = load_file(Path(path) / "model.safetensors")
    for got in world2.run(megatron_loads, path, tmp_path / "ck"):
        for i in range(4):
            norm = got[f"decoder.layers.{i}.pre_mlp_layernorm.weight"]
            assert torch.equal(norm, want[f"model.layers.{i}.post_attention_layernorm.weight"])
        assert torch.equal(got["decoder.final_layernorm.weight"], want["model.norm.weight"])
