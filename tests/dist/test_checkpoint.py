"""Training checkpoints: resumed training is the uninterrupted one, in its layout bit for bit."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.api.records import SaveLoadMeta
from megarl.ckpt.files import write_marker
from megarl.utils.files import seal
from tests.dist.engine_jobs import batch, loss_fn, make_engine, save_model, state, weight_fn
from tests.dist.world import World
from tests.hostile import Hostile

Parallel = dict[str, Any]
ZERO: dict[str, Any] = {}
PLAIN: dict[str, Any] = dict(optimizer={"distributed": False})
BF16: dict[str, Any] = dict(dtype="bfloat16")
VERSION = 7


def dist_meta(path: Path | str, with_optim: bool = True) -> SaveLoadMeta:
    return SaveLoadMeta(path=str(path), weight_format="dist", with_optim=with_optim)


def engine_for(path: str, parallel: Parallel, over: dict[str, Any]) -> Any:
    schedule = dict(lr_scheduler_type="cosine", warmup_steps=0.25)
    own = {**over, "optimizer": {**schedule, **over.get("optimizer", {})}}
    return make_engine(path, parallel, **own)


def train(engine: Any, steps: int) -> list[tuple[float, float, float]]:
    """Returns (loss, learning rate, gradient norm) of each step."""
    figures = []
    for _ in range(steps):
        s = engine.train_batch(batch(), loss_fn, weight_fn, outputs=("logprobs", "entropy"))
        engine.step_lr_scheduler()
        figures.append((s["loss"], s["lr"], s["grad_norm"]))
    return figures


def local_tensors(engine: Any) -> dict[str, Any]:
    """Returns this rank's weights, fp32 weights, moments and their step counts."""
    found: dict[str, Any] = {n: p.detach().clone() for n, p in engine.state.params.items()}
    for part in engine.state.optimizer.chained_optimizers:
        for g, group in enumerate(part.optimizer.param_groups):
            found[f"group {g}"] = {k: v for k, v in group.items() if k != "params"}
            for i, p in enumerate(group["params"]):
                found[f"master {g} {i}"] = p.detach().clone()
                for name, value in part.optimizer.state[p].items():
                    found[f"{name} {g} {i}"] = value.clone()
    return found


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    assert set(a) == set(b), set(a) ^ set(b)
    return [
        k for k, v in a.items()
        if not (torch.equal(v, b[k]) if isinstance(v, torch.Tensor) else v == b[k])
    ]  # fmt: skip


def draws(engine: Any) -> list[float]:
    """Returns the number that each random state gives next."""
    from megarl.parallel.groups import model_scope

    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with model_scope(engine.groups), get_cuda_rng_tracker().fork():
        tracked = float(torch.rand(()))
    return [random.random(), float(np.random.rand()), float(torch.rand(())), tracked]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def resume(path: str, out: str, parallel: Parallel, over: dict[str, Any]) -> dict[str, Any]:
    first = engine_for(path, parallel, over)
    start = local_tensors(first)
    train(first, 2)
    first.set_version(VERSION)
    seed_all(100 + dist.get_rank())
    if away := dist.get_world_size() > 1:  # what is offloaded is saved from host memory
        first.offload()
    first.save(dist_meta(out))
    children = multiprocessing.active_children()
    occupied = sum(first.occupied().values())
    if away:
        first.onload()
    saved, drawn = local_tensors(first), draws(first)
    figures = train(first, 2)
    ended = local_tensors(first)
    first.destroy()

    second = engine_for(path, parallel, over)
    seed_all(1)
    second.load(dist_meta(out))
    result = dict(
        children=len(children),
        occupied=(away, occupied),
        at_load=differing(saved, local_tensors(second)),
        draws=(drawn, draws(second)),
        version=second.get_version(),
        figures=(figures, train(second, 2)),
        at_end=differing(ended, local_tensors(second)),
        trained=len(differing({k: start[k] for k in saved if k in start}, {
            k: saved[k] for k in start})),
        resumed=len(differing(saved, ended)),
        tensors=len(saved),
    )  # fmt: skip
    second.destroy()
    return result


# name: (ranks, layout, engine settings, family, tied)
CASES: dict[str, tuple[int, Parallel, dict[str, Any], str, bool]] = {
    "dp1": (1, dict(), ZERO, "llama", True),
    "tp2": (2, dict(tp=2), ZERO, "qwen3", False),
    "tp2sp": (2, dict(tp=2, sequence_parallel=True), PLAIN, "qwen2", True),
    "pp2": (2, dict(pp=2), PLAIN, "qwen3", True),
    "pp2vpp2": (2, dict(pp=2, vpp=2), ZERO, "llama", True),
    "dp2": (2, dict(), ZERO, "qwen2", False),
    "dp2-plain": (2, dict(), PLAIN, "llama", False),
    "tp2-bf16": (2, dict(tp=2), BF16, "qwen3", True),
    "cp2": (2, dict(cp=2), ZERO, "qwen3", True),
    "pp2-uneven": (2, dict(pp=2, pipeline_split=[1, 3]), ZERO, "qwen2", True),
    "ep2": (2, dict(ep=2), ZERO, "qwen3_moe", False),
    "tp2sp-sandwich": (2, dict(tp=2, sequence_parallel=True), ZERO, "olmo3", False),
    "dp2-bf16-plain": (2, dict(), BF16 | PLAIN, "qwen2", False),
    "pp2-dense-first": (2, dict(pp=2), ZERO, "qwen3_moe-dense-first", False),
    "cp2-states": (2, dict(cp=2), ZERO, "qwen3_next", False),
    "tp2sp-ep2-sinks": (2, dict(tp=2, sequence_parallel=True, ep=2), ZERO, "gpt_oss", False),
}


def check_resume(world: World, out: Path, path: str, parallel: Parallel, over: Any) -> None:
    results = world.run(resume, path, str(out), parallel, over)
    for r in results:
        assert r["at_load"] == [] and r["at_end"] == []
        assert r["draws"][0] == r["draws"][1]
        assert r["figures"][0] == r["figures"][1]
        assert r["version"] == VERSION and r["children"] == 0
        away, occupied = r["occupied"]
        assert occupied == 0 if away else occupied > 0  # nothing was brought back for the save
        assert r["trained"] > 0 and r["resumed"] > 0.9 * r["tensors"]
    lrs = [lr for _, lr, _ in results[0]["figures"][0]]
    assert lrs[0] > lrs[1] > 0
    assert len({tuple(r["draws"][0]) for r in results}) == len(results)


@pytest.mark.parametrize("case", CASES)
def test_resumed_training_is_bitwise_the_uninterrupted_one(world1, world2, models, tmp_path, case):
    size, parallel, over, kind, tie = CASES[case]
    world = {1: world1, 2: world2}[size]
    check_resume(world, tmp_path / "ck", save_model(models, kind, tie), parallel, over)


@pytest.mark.full
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("over", [ZERO, PLAIN, BF16, BF16 | PLAIN], ids=str)
@pytest.mark.parametrize(
    "parallel",
    [dict(), dict(tp=2), dict(tp=2, sequence_parallel=True), dict(pp=2), dict(pp=2, vpp=2)],
    ids=str,
)
def test_resume_product(world2, models, tmp_path, parallel, over, kind, tie):
    check_resume(world2, tmp_path / "ck", save_model(models, kind, tie), parallel, over)


def train_and_save(path: str, out: str, parallel: Parallel, over: dict[str, Any]) -> dict[str, Any]:
    engine = engine_for(path, parallel, over)
    train(engine, 2)
    engine.save(dist_meta(out))
    weights, local = state(engine), local_tensors(engine)
    result = dict(weights=weights, local=local, figures=train(engine, 2), ended=state(engine))
    engine.destroy()
    return result


def load_and_train(
    path: str, source: str, parallel: Parallel, over: dict[str, Any], with_optim: bool = True,
    out: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    engine = engine_for(path, parallel, over)
    seed_all(1)
    engine.load(dist_meta(source, with_optim))
    result = dict(weights=state(engine), local=local_tensors(engine), draws=draws(engine))
    if out is not None:
        engine.save(dist_meta(out))
    result |= dict(figures=train(engine, 2), ended=state(engine), version=engine.get_version())
    engine.destroy()
    return result


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert set(a) == set(b)
    return max(float((a[n] - b[n]).abs().max()) for n in a)


SP2: Parallel = dict(tp=2, sequence_parallel=True)
Place = tuple[int, Parallel]  # ranks, layout
# (family, settings, tied, from, to)
MOVES: dict[str, tuple[str, dict[str, Any], bool, Place, Place]] = {
    "tp2pp2-dp2": ("qwen3", ZERO, True, (4, dict(tp=2, pp=2)), (2, dict())),
    "ep2-tp2sp": ("qwen3_moe", ZERO, False, (2, dict(ep=2)), (2, SP2)),
    "cp2-pp2-uneven": (
        "qwen3", ZERO, True, (2, dict(cp=2)), (2, dict(pp=2, pipeline_split=[3, 1])),
    ),
    "tp2sp-cp2-states": ("qwen3_next", ZERO, False, (2, SP2), (2, dict(cp=2))),
    "pp2vpp2-tp2sp-plain": ("qwen3", PLAIN, False, (2, dict(pp=2, vpp=2)), (2, SP2)),
    "pp2-ep2-dense-first": (
        "deepseek_v3-dense-first", ZERO, False, (2, dict(pp=2)), (2, dict(ep=2)),
    ),
    "pp2-ep2-dense-first-plain": (
        "qwen2_moe-dense-first", PLAIN, False, (2, dict(pp=2)), (2, dict(ep=2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("move", MOVES)
def test_another_layout_continues_with_the_same_state(world2, world4, models, tmp_path, move):
    kind, over, tie, (size, before), (other, after) = MOVES[move]
    here, there = ({2: world2, 4: world4}[n] for n in (size, other))
    check_move(here, there, models, tmp_path, over, tie, before, after, kind=kind)


@pytest.mark.full
@pytest.mark.parametrize("over", [ZERO, PLAIN], ids=["zero", "plain"])
@pytest.mark.parametrize(
    "before, after",
    [(dict(ep=2), dict(pp=2)), (SP2, dict(etp=2)), (SP2 | dict(ep=2), dict())],
    ids=str,
)
def test_experts_move(world2, models, tmp_path, before, after, over):
    check_move(world2, world2, models, tmp_path, over, False, before, after, kind="qwen3_moe")


STAGES: list[Parallel] = [dict(pp=2), dict(pp=2, pipeline_split=[1, 3]), dict(pp=2, vpp=2)]


@pytest.mark.full
@pytest.mark.parametrize("over", [ZERO, PLAIN, BF16], ids=["zero", "plain", "bf16"])
@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("parallel", STAGES, ids=str)
def test_resume_with_stages_without_experts(world2, models, tmp_path, parallel, kind, over):
    path = save_model(models, f"{kind}-dense-first", False)
    check_resume(world2, tmp_path / "ck", path, parallel, over)


@pytest.mark.full
@pytest.mark.parametrize("over", [ZERO, PLAIN], ids=["zero", "plain"])
@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("after", [dict(), SP2, dict(ep=2), dict(pp=2, vpp=2)], ids=str)
def test_experts_move_from_stages_without_them(world2, models, tmp_path, after, kind, over):
    kind = f"{kind}-dense-first"
    check_move(world2, world2, models, tmp_path, over, False, dict(pp=2), after, kind=kind)


@pytest.mark.full
def test_experts_move_from_four_ranks_to_two_and_back(world4, world2, models, tmp_path):
    """TP2xPP2 with experts over EP2 becomes one stage under TP2 and EP1, and returns."""
    before = SP2 | dict(pp=2, ep=2)
    check_move(world4, world2, models, tmp_path, ZERO, False, before, SP2, kind="qwen3_moe")


@pytest.mark.full
@pytest.mark.parametrize("over", [ZERO, PLAIN], ids=["zero", "plain"])
@pytest.mark.parametrize(
    "before, after",
    [(dict(ep=4), dict(ep=2)), (dict(ep=2, pp=2), {}), (dict(ep=4), SP2 | dict(etp=2, ep=2))],
    ids=str,
)
def test_experts_move_between_four_ranks(world4, models, tmp_path, before, after, over):
    check_move(world4, world4, models, tmp_path, over, False, before, after, kind="qwen3_moe")


@pytest.mark.full
@pytest.mark.parametrize("over", [ZERO, PLAIN], ids=["zero", "plain"])
@pytest.mark.parametrize(
    "before, after",
    [
        (dict(tp=2, pp=2), dict()),
        (dict(), dict(tp=2, sequence_parallel=True)),
        (dict(tp=2), dict(pp=2, vpp=2)),
        (dict(tp=4), dict(pp=4)),
        (dict(tp=2, cp=2), dict(pp=2, pipeline_split=[1, 3])),
    ],
    ids=str,
)
def test_moves_between_four_ranks(world4, models, tmp_path, before, after, over):
    check_move(world4, world4, models, tmp_path, over, True, before, after)


def check_move(
    here: World, there: World, models: Path, tmp_path: Path, over: dict[str, Any], tie: bool,
    before: Parallel, after: Parallel, kind: str = "qwen3",
) -> None:  # fmt: skip
    path, ck, back = save_model(models, kind, tie), str(tmp_path / "a"), str(tmp_path / "b")
    want = here.run(train_and_save, path, ck, before, over)
    got = there.run(load_and_train, path, ck, after, over, out=back)
    for name, weight in want[0]["weights"].items():
        assert torch.equal(got[0]["weights"][name], weight), name
    (loss, lr, norm), _ = got[0]["figures"]
    assert (loss, lr, norm) == pytest.approx(want[0]["figures"][0], rel=1e-5, abs=1e-6)
    assert apart(got[0]["ended"], want[0]["ended"]) < 1e-5

    # without moments the next two steps give other weights
    bare = there.run(load_and_train, path, ck, after, over, with_optim=False)
    assert apart(bare[0]["weights"], want[0]["weights"]) == 0
    assert apart(bare[0]["ended"], want[0]["ended"]) > 1e-3

    # and back again: the moments are untouched, random states are new but the same each time
    first = here.run(load_and_train, path, back, before, over)
    assert [differing(w["local"], f["local"]) for w, f in zip(want, first, strict=True)] == (
        [[]] * here.size
    )
    assert first[0]["draws"] == here.run(load_and_train, path, back, before, over)[0]["draws"]


def weights_only(path: str, out: str) -> dict[str, Any]:
    """Saves the weights after two bf16 steps; forward-only and trained engines load them."""
    trained = engine_for(path, dict(tp=2), BF16)
    train(trained, 2)
    trained.set_version(VERSION)
    trained.save(dist_meta(out, with_optim=False))
    result = dict(saved=state(trained))
    trained.destroy()
    reference = make_engine(path, dict(), trained=False, **BF16)
    result["before"] = state(reference)
    reference.load(dist_meta(out, with_optim=False))
    result["reference"] = state(reference)
    reference.destroy()
    wide = make_engine(path, dict(pp=2), trained=False)
    wide.load(dist_meta(out, with_optim=False))
    result["wide"] = state(wide)
    wide.destroy()
    # a step of almost no size writes back the optimizer's fp32 weights: these must be loaded ones
    still = make_engine(path, dict(), optimizer={"lr": 1e-30}, **BF16)
    still.load(dist_meta(out, with_optim=False))
    still.train_batch(batch(), loss_fn, weight_fn, outputs=("logprobs", "entropy"))
    result |= dict(still=state(still), version=still.get_version())
    still.destroy()
    return result


def test_weights_alone(world2, models, tmp_path):
    out = tmp_path / "ck"
    r = world2.run(weights_only, save_model(models, "llama", False), str(out))[0]
    assert apart(r["before"], r["saved"]) > 1e-3
    assert apart(r["reference"], r["saved"]) == 0 == apart(r["still"], r["saved"])
    assert (
        apart(r["wide"], r["saved"]) == 0 and r["wide"]["model.norm.weight"].dtype == torch.float32
    )
    assert r["version"] == 0
    size = sum(f.stat().st_size for f in out.glob("*.distcp"))
    assert size < 3 * sum(2 * t.numel() for t in r["saved"].values())  # with moments: 7 times


def never_trained(path: str, out: str, over: dict[str, Any]) -> tuple[list[str], list[Any]]:
    engine = engine_for(path, dict(), over)
    engine.save(dist_meta(out))
    engine.load(dist_meta(out))
    want = train(engine, 2)
    ended = local_tensors(engine)
    engine.destroy()
    plain = engine_for(path, dict(), over)
    figures = [want, train(plain, 2)]
    differ = differing(ended, local_tensors(plain))
    plain.destroy()
    return differ, figures


@pytest.mark.parametrize("over", [ZERO, PLAIN], ids=["zero", "plain"])
def test_before_the_first_step(world2, models, tmp_path, over):
    out = str(tmp_path / "ck")
    for differ, (a, b) in world2.run(never_trained, save_model(models, "llama", False), out, over):
        assert differ == [] and a == b


def changed_config(path: str, out: str) -> tuple[float, float, int]:
    engine = engine_for(path, dict(), ZERO)
    train(engine, 3)
    engine.save(dist_meta(out))
    engine.destroy()
    other = engine_for(path, dict(), dict(optimizer=dict(lr=4e-3, lr_scheduler_type="linear")))
    other.load(dist_meta(out))
    (_, lr, _) = train(other, 1)[0]
    group = other.state.optimizer.param_groups[0]
    other.destroy()
    return lr, group["max_lr"], group["step"]


def save_under_settled_names(path: str, out: Path) -> dict[str, Any]:
    """Returns the keys of a saved state, and the figures of a step after the save and the load."""
    from megarl.ckpt.restricted import read_metadata

    engine = engine_for(path, {}, ZERO)
    train(engine, 1)
    engine.save(dist_meta(out))
    figures = [train(engine, 1)]
    engine.destroy()
    stored = read_metadata(out).state_dict_metadata
    engine = engine_for(path, {}, ZERO)
    engine.load(dist_meta(out))
    figures.append(train(engine, 1))
    engine.destroy()
    keys = {k.removeprefix("optimizer.state.exp_avg.") for k in stored}
    return dict(figures=figures, keys=keys)


# kind: a norm's names in Transformer Engine's layers and in local ones; layer 0 of deepseek_v3 and
# layer 1 of qwen3_moe are dense
NORMS = {
    "deepseek_v3": (
        ("0.input_layernorm", "0.input_layernorm"),
        ("0.self_attention.linear_q_up_proj.layer_norm", "0.self_attention.q_layernorm"),
        ("0.self_attention.linear_kv_up_proj.layer_norm", "0.self_attention.kv_layernorm"),
        ("0.mlp.linear_fc1.layer_norm", "0.pre_mlp_layernorm"),
        ("1.pre_mlp_layernorm", "1.pre_mlp_layernorm"),
    ),
    "qwen3_moe": (
        ("0.pre_mlp_layernorm", "0.mlp.linear_fc1.layer_norm"),
        ("1.mlp.linear_fc1.layer_norm", "1.mlp.linear_fc1.layer_norm"),
        ("1.self_attention.linear_qkv.layer_norm", "1.self_attention.linear_qkv.layer_norm"),
    ),
}


def norm_key(name: str) -> str:
    return f"decoder.layers.{name}{'_' if name.endswith('layer_norm') else '.'}weight"


@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_saved_under_the_same_names_for_all_layers(world1, models, tmp_path, kind):
    path = save_model(models, kind, False)
    found = world1.run(save_under_settled_names, path, tmp_path / "ck")[0]
    after_save, after_load = found["figures"]
    assert after_load == after_save
    for te, local in (map(norm_key, pair) for pair in NORMS[kind]):
        assert te in found["keys"]
        assert te == local or local not in found["keys"]


def test_learning_rate_is_the_configs_at_the_checkpoints_position(world1, models, tmp_path):
    """Step 3 (from 0): the rate rises for two steps, the second at the peak, and is 0 at step 8."""
    path = save_model(models, "llama", False)
    lr, peak, step = world1.run(changed_config, path, str(tmp_path / "ck"))[0]
    assert lr == pytest.approx(4e-3 * (8 - 3) / (8 - 1)) and peak == 4e-3 and step == 4


def error_of(fn: Any, *args: Any) -> str:
    try:
        fn(*args)
    except (ValueError, RuntimeError, OSError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


WRITERS = {
    "data": ("torch.distributed.checkpoint.FileSystemWriter.write_data", 1),
    "common": ("megarl.ckpt.dist.save_common", 0),
    "plan": ("megarl.ckpt.dist.save_preprocess", 1),
    "rename": ("megarl.ckpt.dist.put_in_place", 0),
}


def failing_save(path: str, out: str) -> dict[str, Any]:
    """Saves well, then fails in every place of a save, then loads the good checkpoint."""
    engine = engine_for(path, dict(), ZERO)
    train(engine, 1)
    engine.save(dist_meta(out))
    saved = local_tensors(engine)
    train(engine, 1)
    errors = {}
    for where, (name, rank) in WRITERS.items():
        if dist.get_rank() == rank:
            with patch(name, side_effect=OSError("disk full")):
                errors[where] = error_of(engine.save, dist_meta(out))
        else:
            errors[where] = error_of(engine.save, dist_meta(out))
    dist.barrier()  # rank 0 has removed what was staged
    left = sorted(p.name for p in Path(out).parent.iterdir())
    engine.load(dist_meta(out))
    result = dict(errors=errors, left=left, differ=differing(saved, local_tensors(engine)))
    engine.save(dist_meta(out))  # over the older one
    train(engine, 1)
    engine.load(dist_meta(out))
    result["again"] = differing(saved, local_tensors(engine))
    result["left_again"] = sorted(p.name for p in Path(out).parent.iterdir())
    engine.destroy()
    return result


def test_a_rank_that_fails_to_save_is_named_and_the_older_checkpoint_stays(
    world2, models, tmp_path
):
    path = save_model(models, "llama", False)
    results = world2.run(failing_save, path, str(tmp_path / "ck"))
    for rank, r in enumerate(results):
        for where, (_, bad) in WRITERS.items():
            error = r["errors"][where]
            assert "disk full" in error, where
            named = rank != bad or where == "data"
            assert (f"failed on rank {bad}" in error) == named, (where, error)
        assert r["left"] == r["left_again"] == ["ck"]
        assert r["differ"] == [] == r["again"]


class Gate:
    """Holds back the writing threads; `broken`: this rank's disk is full."""

    def __init__(self) -> None:
        self.begun, self.opened, self.broken = threading.Event(), threading.Event(), False
        self.real = torch.distributed.checkpoint.FileSystemWriter.write_data

    def write_data(self, writer: Any, *args: Any, **kw: Any) -> Any:
        self.begun.set()
        assert self.opened.wait(120)
        if self.broken:
            raise OSError(28, "disk full")
        return self.real(writer, *args, **kw)

    def __enter__(self) -> Gate:
        def held(writer: Any, *args: Any, **kw: Any) -> Any:
            return self.write_data(writer, *args, **kw)

        torch.distributed.checkpoint.FileSystemWriter.write_data = held  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        self.opened.set()
        torch.distributed.checkpoint.FileSystemWriter.write_data = self.real  # type: ignore[method-assign]


def save_behind(path: str, out: str, parallel: Parallel) -> dict[str, Any]:
    """Runs two steps while the writers stand still; the saved state is from before the steps."""
    engine = engine_for(path, parallel, ZERO)
    train(engine, 1)
    engine.set_version(VERSION)
    saved = local_tensors(engine)
    with Gate() as gate:
        pending = engine.begin_save(dist_meta(out))
        figures = train(engine, 2)
        assert gate.begun.wait(120)
        held = [pending.is_done(), Path(out).exists()]
        second = engine.begin_save(dist_meta(f"{out}-2"))  # waits for the first
        gate.opened.set()
        pending.finish()
    later = local_tensors(engine)
    second.finish()
    done = [pending.is_done(), second.is_done()]
    engine.load(dist_meta(out))
    result = dict(
        held=held, done=done, figures=figures, version=engine.get_version(),
        differ=differing(saved, local_tensors(engine)), resumed=len(differing(saved, later)),
        again=train(engine, 2),
    )  # fmt: skip
    engine.load(dist_meta(f"{out}-2"))
    result["differ2"] = differing(later, local_tensors(engine))
    with Gate() as gate:
        gate.broken = dist.get_rank() == 1
        pending = engine.begin_save(dist_meta(out))
        figures = train(engine, 1)
        gate.opened.set()
        result["error"] = error_of(pending.finish)
    dist.barrier()  # rank 0 has removed what was staged
    result["left"] = sorted(p.name for p in Path(out).parent.iterdir())
    engine.load(dist_meta(out))
    result["older"] = differing(saved, local_tensors(engine))
    engine.destroy()
    return result


@pytest.mark.parametrize(
    "kind, parallel", [("llama", {}), ("qwen3_moe", dict(tp=2, sequence_parallel=True, ep=2))],
    ids=str,
)  # fmt: skip
def test_training_goes_on_while_a_checkpoint_is_written(world2, models, tmp_path, kind, parallel):
    path = save_model(models, kind, False)
    for rank, r in enumerate(world2.run(save_behind, path, str(tmp_path / "ck"), parallel)):
        assert r["held"] == [False, False] and r["done"] == [True, True]
        assert r["differ"] == [] == r["differ2"] and r["resumed"] > 0
        assert r["figures"] == r["again"] and r["version"] == VERSION
        assert re.search(
            r"DiskFull: saving .*ck failed on rank 1: .*disk full: .*MiB are needed, "
            r".* free .*fileroot",
            r["error"],
        ), (rank, r["error"])
        assert r["left"] == ["ck", "ck-2"] and r["older"] == []


def flip_bytes(path: Path, count: int = 64) -> None:
    content = bytearray(path.read_bytes())
    for i in range(0, len(content), max(1, len(content) // count)):
        content[i] ^= 0xFF
    path.write_bytes(content)


def bad_loads(path: str, other: str, root: str) -> dict[str, str]:
    names = ("good", "weights", "cut", "bare", "flipped", "object", "common", "newer")
    good, weights, cut, bare, flipped, hostile, common, newer = (Path(root) / n for n in names)
    engine = engine_for(path, dict(tp=2), ZERO)
    before = state(engine)
    errors = {}
    for target in (good, weights, cut, bare, flipped, common, newer):
        engine.save(dist_meta(target, with_optim=target != weights))
    with patch("megarl.engine.checkpoint.rng_state", lambda: Hostile(f"{root}/ran")):
        engine.save(dist_meta(hostile))
    if dist.get_rank() == 0:
        with (cut / "__1_0.distcp").open("r+b") as f:
            f.truncate(100)
        (bare / "megarl.json").unlink()
        (Path(root) / "file").write_text("")
        flip_bytes(flipped / "__1_0.distcp")
        torch.save({"evil": Hostile(f"{root}/ran")}, common / "common.pt")
        (newer / "common.pt").unlink()  # as megatron-core's own writer from 0.19 on
        for changed in (common, newer):
            write_marker(changed, json.loads((changed / "megarl.json").read_text())["info"])
    dist.barrier()
    for name in ("missing", "cut", "bare", "file", "flipped", "object", "common", "newer"):
        errors[name] = error_of(engine.load, dist_meta(f"{root}/{name}"))
    errors["weights"] = error_of(engine.load, dist_meta(weights))
    errors["occupied"] = error_of(engine.save, dist_meta(bare))
    errors["occupied by a file"] = error_of(engine.save, dist_meta(f"{root}/file"))
    after = state(engine)
    assert all(torch.equal(before[n], after[n]) for n in before)
    engine.destroy()
    for name, source, over in (("dtype", path, BF16), ("plain", path, PLAIN), ("model", other, {})):
        engine = engine_for(source, dict(tp=2), over)
        errors[name] = error_of(engine.load, dist_meta(good))
        engine.destroy()
    frozen = make_engine(path, dict(tp=2), trained=False)
    errors["no optimizer"] = error_of(frozen.load, dist_meta(good))
    frozen.destroy()
    return errors


def test_what_cannot_be_loaded_is_named(world2, models, tmp_path):
    paths = (save_model(models, "llama", tie) for tie in (False, True))
    results = world2.run(bad_loads, *paths, str(tmp_path))
    parts = {
        "missing": ("missing holds no whole checkpoint", "weight_format='dist'"),
        "cut": ("__1_0.distcp has 100 bytes", "damaged"),
        "bare": ("bare holds no whole checkpoint", "megarl.json"),
        "file": ("file holds no whole checkpoint",),
        "weights": ("weights only", "with_optim=False"),
        "occupied": ("is not empty and holds no checkpoint", "choose another directory"),
        "occupied by a file": ("a file is there",),
        "dtype": ("dtype='float32'", "'bfloat16'", "with_optim=False"),
        "plain": ("optimizer='distributed'", "'plain'", "optimizer.distributed"),
        "model": ("tie_word_embeddings=False", "True", "path"),
        "no optimizer": ("has no optimizer", "with_optim=False"),
        "flipped": ("__1_0.distcp is damaged", "checksum"),
        "object": ("failed on rank 0", "mkdir"),
        "common": ("mkdir",),
        "newer": ("newer", "common.pt"),
    }
    assert not (tmp_path / "ran").exists()
    for errors in results:
        assert set(errors) == set(parts)
        for name, texts in parts.items():
            assert all(t in errors[name] for t in texts), (name, errors[name])
    for name, error in results[0].items():
        assert error.startswith("ValueError") or name in ("object", "common"), (name, error)
    assert results[0]["flipped"] == results[1]["flipped"]


def test_the_marker_tells_what_is_inside(world1, models, tmp_path):
    from megarl.ckpt.files import read_info

    world1.run(train_and_save, save_model(models, "llama", True), str(tmp_path / "ck"), {}, ZERO)
    info = read_info(tmp_path / "ck")
    assert info["with_optim"] is True and info["schedule_steps"] == 3  # it begins at 1
    assert info["model"]["family"] == "llama" and info["layout"]["dp"] == 1
    assert info["dtype"] == "float32" and info["versions"]["megatron-core"]
    marker = json.loads((tmp_path / "ck" / "megarl.json").read_text())
    del marker["checksum"]
    (tmp_path / "ck" / "megarl.json").write_text(json.dumps(seal({**marker, "format": 99})))
    with pytest.raises(ValueError, match="format 99"):
        read_info(tmp_path / "ck")
