"""Parameters that a family publishes in fp32 are fp32 in a bfloat16 engine, its files and syncs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.api.records import SaveLoadMeta, WeightUpdateMeta
from megarl.ckpt.convert import dist2hf, hf2dist
from megarl.config.engine import LoRAConfig
from megarl.models.hf_config import load_transformers
from megarl.models.piece_table import PieceTable
from megarl.weight_sync.plan import plan_sync
from tests.dist.engine_jobs import (
    PLAIN,
    SP,
    ZERO,
    batch,
    loss_fn,
    make_engine,
    state,
    weight_fn,
)
from tests.dist.test_optimizer_options import self_keeping_adam
from tests.embedded_server import address, checksums, embedded_server, load
from tests.tiny import save_tiny

DELTA = ("linear_attn.A_log", "linear_attn.norm.weight")
ROUTER = ("block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias")
FP32 = (*DELTA, *ROUTER)
KW: dict[str, Any] = dict(outputs=("logprobs", "entropy"))
CPU_OFFLOAD: dict[str, Any] = dict(
    optimizer=dict(options=dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.4))
)
PRECISE: dict[str, Any] = dict(optimizer=dict(options=dict(use_precision_aware_optimizer=True)))


def published(root: Path, kind: str, **kw: Any) -> Path:
    """Saves a tiny model as its family is published: bfloat16, except FP32."""
    path = save_tiny(root / kind, kind, **kw)
    tensors = load_file(path / "model.safetensors")
    rounded = {n: t if n.endswith(FP32) else t.bfloat16() for n, t in tensors.items()}
    save_file(rounded, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return path


def is_rounded(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor.bfloat16().float(), tensor.float())


def train(engine: Any) -> None:
    engine.train_batch(batch(), loss_fn, weight_fn, **KW)


def dist_meta(out: str) -> SaveLoadMeta:
    return SaveLoadMeta(path=out + "/dist", weight_format="dist", with_optim=True)


def run(path: str, parallel: dict[str, Any], out: str, over: dict[str, Any]) -> Any:
    """Saves, trains, saves a checkpoint, trains on; a fresh engine resumes there."""
    with self_keeping_adam() if over == PRECISE else nullcontext():
        engine = make_engine(path, parallel, dtype="bfloat16", **over)
        engine.save(SaveLoadMeta(path=out + "/first", weight_format="hf"))
        sent = {n: t.dtype for n, t in engine.hf_state()}
        train(engine)
        engine.offload()
        engine.onload()
        engine.save(dist_meta(out))
        trained = state(engine)
        train(engine)
        last = state(engine)
        engine.destroy()
        engine = make_engine(path, parallel, dtype="bfloat16", init_from_scratch=True, **over)
        engine.load(dist_meta(out))
        loaded = state(engine)
        train(engine)
        resumed = state(engine)
        engine.destroy()
    return sent, trained, loaded, last, resumed


@pytest.mark.parametrize(
    ("n", "kind", "parallel", "over"),
    [
        (1, "qwen3_5_text", {}, {}),
        (2, "qwen3_5_text", SP, PLAIN),
        (2, "qwen3_5_moe_text", dict(ep=2), ZERO),
        (2, "minimax_m2", dict(tp=2, sequence_parallel=True, ep=2), {}),
        (2, "qwen3_5_text", {}, CPU_OFFLOAD),
        (2, "qwen3_5_text", {}, PRECISE),
        pytest.param(2, "minimax_m2", dict(pp=2), PLAIN, marks=pytest.mark.full),
        pytest.param(2, "qwen3_5_text", dict(pp=2), ZERO, marks=pytest.mark.full),
        pytest.param(2, "qwen3_5_text", dict(cp=2), {}, marks=pytest.mark.full),
    ],
)
def test_published_fp32_stays_fp32(
    n: int, kind: str, parallel: dict[str, Any], over: Any, worlds: Any, tmp_path: Path
) -> None:
    path = published(tmp_path, kind)
    (tmp_path / "out").mkdir()
    before = load_file(path / "model.safetensors")
    sent, trained, loaded, last, resumed = worlds(n).run(
        run, str(path), parallel, str(tmp_path / "out"), over
    )[0]
    after = load_file(tmp_path / "out" / "first" / "model.safetensors")
    assert after.keys() == before.keys()
    kept = [name for name in before if name.endswith(FP32)]
    assert kept and all(before[name].dtype == torch.float32 for name in kept)
    for name, tensor in before.items():
        assert after[name].dtype == sent[name] == tensor.dtype, name
        assert torch.equal(after[name], tensor), name
        assert torch.equal(trained[name], loaded[name]), name
        assert torch.equal(last[name], resumed[name]), name
    for name in kept:
        assert not is_rounded(before[name]) and not is_rounded(trained[name]), name
        assert torch.equal(trained[name], before[name]) == name.endswith("bias"), name


# ---- checkpoints from before: all parameters are bfloat16


@contextmanager
def as_before() -> Iterator[None]:
    """Makes engines as they were when only buffers were fp32."""
    buffers = property(lambda table: table.buffers)
    with mock.patch.object(PieceTable, "fp32", buffers):
        yield


def save_as_before(path: str, out: str, over: dict[str, Any]) -> Any:
    with as_before():
        engine = make_engine(path, {}, dtype="bfloat16", **over)
        params = {n: p.dtype for n, p in engine.state.params.items()}
        train(engine)
        engine.save(dist_meta(out))
        engine.destroy()
    return params


def load_now(path: str, out: str, over: dict[str, Any]) -> Any:
    engine = make_engine(path, {}, dtype="bfloat16", init_from_scratch=True, **over)
    engine.load(dist_meta(out))
    loaded = state(engine)
    train(engine)
    stepped = state(engine)
    engine.destroy()
    return loaded, stepped


@pytest.mark.parametrize(
    ("kind", "over"), [("qwen3_5_text", ZERO), ("qwen3_5_text", PLAIN), ("minimax_m2", ZERO)]
)
def test_a_checkpoint_whose_parameters_are_all_bfloat16_loads(
    kind: str, over: dict[str, Any], world2: Any, tmp_path: Path
) -> None:
    """Parameters that are fp32 now become the fp32 weights that the optimizer had of them."""
    path, out = published(tmp_path, kind), str(tmp_path)
    before = world2.run(save_as_before, str(path), out, over)[0]
    assert {d for n, d in before.items() if "expert_bias" not in n} == {torch.bfloat16}
    dist2hf(tmp_path / "dist", tmp_path / "saved", base=path)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    loaded, stepped = world2.run(load_now, str(path), out, over)[0]
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name].to(tensor.dtype), tensor), name
        if name.endswith(FP32):
            assert loaded[name].dtype == stepped[name].dtype == torch.float32
            assert not is_rounded(loaded[name])
        assert torch.isfinite(stepped[name]).all()


# ---- adapters, averages, servers, conversion


def run_lora(path: str, out: str) -> Any:
    cfg = LoRAConfig(r=4, alpha=8)
    engine = make_engine(path, {}, dtype="bfloat16", lora=cfg)
    train(engine)
    trained = state(engine)
    engine.save(SaveLoadMeta(path=out + "/merged"))
    engine.save(dist_meta(out))
    train(engine)
    last = state(engine)
    engine.destroy()
    engine = make_engine(path, {}, dtype="bfloat16", lora=cfg)
    engine.load(dist_meta(out))
    train(engine)
    resumed = state(engine)
    engine.destroy()
    return trained, last, resumed


@pytest.mark.parametrize("kind", ("qwen3_5_text", "minimax_m2"))
def test_adapters_leave_fp32_parameters_as_they_are(kind: str, world1: Any, tmp_path: Path) -> None:
    path = published(tmp_path, kind)
    trained, last, resumed = world1.run(run_lora, str(path), str(tmp_path))[0]
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    moved = 0
    for name, tensor in load_file(path / "model.safetensors").items():
        assert merged[name].dtype == trained[name].dtype == tensor.dtype, name
        assert torch.equal(merged[name], trained[name]), name
        assert torch.equal(last[name], resumed[name]), name
        moved += not torch.equal(merged[name], tensor)
        assert torch.equal(merged[name], tensor) or not name.endswith(FP32), name
    assert moved > 0


def run_average(path: str, other: str, out: str) -> Any:
    """Averages two models twice, with a checkpoint between."""
    meta = SaveLoadMeta(path=out + "/average", weight_format="dist")
    actor, ref = (make_engine(p, {}, dtype="bfloat16", trained=False) for p in (other, path))
    ref.copy_weights(actor, keep=0.75)
    once = state(ref)
    ref.save(meta)
    again = make_engine(path, {}, dtype="bfloat16", trained=False)
    again.load(meta)
    twice = []
    for engine in (ref, again):
        engine.copy_weights(actor, keep=0.75)
        twice.append(state(engine))
    for engine in (actor, ref, again):
        engine.destroy()
    return once, *twice


def test_a_moving_average_is_fp32(world1: Any, tmp_path: Path) -> None:
    path = published(tmp_path / "a", "qwen3_5_text")
    other = published(tmp_path / "b", "qwen3_5_text", seed=1)
    once, twice, resumed = world1.run(run_average, str(path), str(other), str(tmp_path))[0]
    a, b = (load_file(p / "model.safetensors") for p in (path, other))
    for name in (name for name in a if name.endswith(DELTA)):
        assert once[name].dtype == torch.float32
        torch.testing.assert_close(once[name], 0.75 * a[name] + 0.25 * b[name])
        torch.testing.assert_close(twice[name], 0.75 * once[name] + 0.25 * b[name])
    assert all(torch.equal(twice[name], resumed[name]) for name in a)


def run_sync(path: str, server: str, out: str) -> Any:
    engine = make_engine(path, SP, dtype="bfloat16")
    train(engine)
    meta = WeightUpdateMeta(
        type="distributed", version=3, addresses=(server,), bucket_bytes=20_000, verify="full"
    )
    engine.upload_weights(meta)
    engine.save(SaveLoadMeta(path=out))
    table = engine.state.table
    engine.destroy()
    buckets = plan_sync(table, torch.bfloat16, 20_000).buckets
    return {m.name: m.dtype for b in buckets for m in b.members}


@pytest.mark.parametrize("kind", ("qwen3_5_text", "minimax_m2"))
def test_a_server_gets_and_keeps_fp32_parameters(kind: str, world2: Any, tmp_path: Path) -> None:
    path, saved = published(tmp_path, kind), tmp_path / "saved"
    with embedded_server(path, log=tmp_path / "log") as server:
        before = checksums(server)
        sent = world2.run(run_sync, str(path), address(server), str(saved))[0]
        streamed = checksums(server)
        load(server, saved)
        assert checksums(server) == streamed != before
    assert sent == {n: t.dtype for n, t in load_file(path / "model.safetensors").items()}
    served = load_transformers(saved, dtype=torch.bfloat16).state_dict()
    names = {n.replace(".block_sparse_moe.", ".mlp.") for n in sent if n.endswith(FP32)}
    assert {n for n, t in served.items() if t.dtype == torch.float32} == names


def test_conversion_keeps_the_dtype_of_every_tensor(tmp_path: Path) -> None:
    """Qwen3.6 has the architecture of Qwen3.5 and is published in bfloat16 alone."""
    path = published(tmp_path, "qwen3_5_text")
    rounded = save_tiny(tmp_path / "rounded", "qwen3_5_text", dtype=torch.bfloat16)
    for i, source in enumerate((path, rounded)):
        hf2dist(source, tmp_path / f"dist{i}")
        dist2hf(tmp_path / f"dist{i}", tmp_path / f"back{i}")
        tensors, back = (
            load_file(p / "model.safetensors") for p in (source, tmp_path / f"back{i}")
        )
        assert all(back[n].dtype == t.dtype and torch.equal(back[n], t) for n, t in tensors.items())
    dist2hf(tmp_path / "dist0", tmp_path / "cast", dtype=torch.bfloat16)
    cast = load_file(tmp_path / "cast" / "model.safetensors")
    assert {n for n, t in cast.items() if t.dtype == torch.float32} == {
        n for n in cast if n.endswith(DELTA)
    }
