"""Weights go by slices from sharded ranks to real servers.

What is right: a server's own checksums after a sync equal those it shows after it has loaded, from
disk, what `save` wrote.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.api.records import SaveLoadMeta, WeightUpdateMeta
from megarl.utils.http import call_json
from megarl.weight_sync.receiver import RECEIVER
from megarl.weight_sync.verify import Fingerprints
from megarl.wire import block_fp8, handles
from tests.dist.engine_jobs import SP, batch, loss_fn, make_engine, weight_fn
from tests.dist.uploads import Upload, flipped, run_uploads
from tests.dist.world import World
from tests.sglang.conftest import Pair
from tests.sglang.servers import SAID, RealServer, hf_logprobs, launch, save_model, serving
from tests.tiny import is_linear

SOME = 100_000  # bytes of two rounds: several of them
PLUGINS = Path(__file__).parent / "plugins"
_versions = itertools.count(1000)


def check(
    world: World,
    servers: Sequence[RealServer],
    models: tuple[Path, Path],
    saved: Path,
    parallel: dict[str, Any],
) -> dict[str, float]:
    """Sends the second model, the first, the second; returns the last figures."""
    uploads = [
        Upload(models[i], saved if last else None, meta_for(servers))
        for i, last in ((1, False), (0, False), (1, True))
    ]
    found: dict[str, float] = {}
    for figures in world.run(run_uploads, parallel, uploads):
        assert all(isinstance(f, dict) and f["weight_sync/sharded"] for f in figures), figures
        assert all(f["weight_sync/verified"] for f in figures), figures
        found = figures[-1]
    check_held(servers, saved, uploads[-1].meta.version)
    return found


def meta_for(servers: Sequence[RealServer]) -> WeightUpdateMeta:
    return WeightUpdateMeta(
        type="distributed",
        version=next(_versions),
        addresses=tuple(s.address for s in servers),
        bucket_bytes=SOME,
        timeout=120.0,
        sharded="on",
        verify="full",
    )


def check_held(servers: Sequence[RealServer], saved: Path, version: int | None) -> None:
    """They hold, and answer by, what a load of `saved` gives them."""
    assert [s.version for s in servers] == [str(version)] * len(servers)
    held, said = [s.checksums() for s in servers], [s.said() for s in servers]
    for s in servers:
        s.load(saved)
    assert [s.checksums() for s in servers] == held
    assert [s.said() for s in servers] == said


@pytest.mark.parametrize("parallel", (dict(tp=2), dict(pp=2)), ids=("tp2", "pp2"))
def test_slices_are_what_a_load_from_disk_makes_of_them(
    pair: Pair, world: World, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    """To servers of tp 1 and tp 2 at once: both ranks of two keep all norms."""
    pair.load(pair.m0)
    figures = check(world, pair.both, (pair.m0, pair.m1), tmp_path / "saved", parallel)
    tensors = load_file(next(pair.m1.glob("*.safetensors")))
    whole = sum(t.nbytes for t in tensors.values())
    norms = sum(t.nbytes for t in tensors.values() if t.dim() == 1)
    assert figures["weight_sync/slice_bytes"] == whole  # of tp 1
    assert figures["weight_sync/bytes"] == 2 * whole + norms
    assert figures["weight_sync/senders"] == 2
    assert figures["weight_sync/server_extra_bytes"] <= SOME


def share_of_rank_0(model: Path) -> float:
    """Half of everything and all norms, and more of what SGLang pads: of 130 tokens 96 (a
    vocabulary is a multiple of 64), of an intermediate size of 96 on a CPU 64 (of 32 a rank)."""
    share = 0.0
    for name, tensor in load_file(next(model.glob("*.safetensors"))).items():
        part = 1.0 if tensor.dim() == 1 else 0.5
        part = 96 / 130 if len(tensor) == 130 else part
        share += tensor.nbytes * (64 / 96 if ".mlp." in name else part)
    return share


def run_engine(
    model: Path, parallel: dict[str, Any], saved: Path, metas: list[WeightUpdateMeta]
) -> list[dict[str, float]]:
    """An engine's figures of a sync after each of its steps. It saves what it has in the end."""
    engine = make_engine(str(model), parallel)
    try:
        found = []
        for meta in metas:
            engine.train_batch(batch(), loss_fn, weight_fn, outputs=("logprobs", "entropy"))
            found.append(engine.upload_weights(meta))
        engine.save(SaveLoadMeta(path=str(saved)))
        return found
    finally:
        engine.destroy()


def check_engine(
    world: World, server: RealServer, model: Path, saved: Path, parallel: dict[str, Any]
) -> dict[str, float]:
    """Trains and sends twice; returns the last figures."""
    metas = [meta_for([server]) for _ in range(2)]
    server.load(model)
    before = server.checksums()
    for found in world.run(run_engine, model, parallel, saved, metas):
        assert all(f["weight_sync/sharded"] for f in found), found
        figures: dict[str, float] = found[-1]
    assert server.checksums() != before
    check_held([server], saved, metas[-1].version)
    tokens, logprobs = zip(*server.said(), strict=True)
    theirs = hf_logprobs(saved, SAID, list(tokens))
    torch.testing.assert_close(torch.tensor(logprobs), theirs, atol=2e-5, rtol=0)
    return figures


def test_an_engine_sends_a_rank_of_two_its_share(pair: Pair, world: World, tmp_path: Path) -> None:
    """Of data-parallel ranks, which take turns to send, after steps of the optimizer they share."""
    figures = check_engine(world, pair.two, pair.m0, tmp_path / "saved", {})
    assert figures["weight_sync/slice_bytes"] == share_of_rank_0(pair.m0)
    assert figures["weight_sync/senders"] == 2


def test_auto_takes_slices_and_off_does_not(pair: Pair, world: World) -> None:
    """By default, as in a run; then whole tensors through another group; then slices again."""
    pair.load(pair.m0)
    uploads = [
        Upload(
            pair.m1,
            None,
            WeightUpdateMeta(
                type="distributed",
                version=next(_versions),
                addresses=pair.addresses,
                timeout=120.0,
                flush_cache=False,
                verify="full",
                **given,
            ),
        )
        for given in ({}, dict(sharded="off"), {})
    ]
    for figures in world.run(run_uploads, dict(tp=2), uploads):
        assert [f["weight_sync/sharded"] for f in figures] == [1, 0, 1], figures
        assert [f["weight_sync/verified"] for f in figures] == [1, 1, 1], "of all servers"
    held = [s.checksums() for s in pair.both]
    pair.load(pair.m1)
    assert [s.checksums() for s in pair.both] == held


def test_changes_alone(pair: Pair, world: World, tmp_path: Path) -> None:
    """Everything; one number in a hundred; everything, as a server has loaded other weights from
    disk; two in a hundred. What they then hold is what a load from disk makes of it."""
    few = [flipped(pair.m0, tmp_path / str(seed), 0.01, seed) for seed in (0, 1)]
    saved = tmp_path / "saved"
    load = (pair.two.address, "/update_weights_from_disk", {"model_path": str(pair.m1)})
    steps = ((pair.m0, None, None), (few[0], None, None), (few[0], None, load))
    uploads = [
        Upload(source, save_to, replace(meta_for(pair.both), delta=True), before)
        for source, save_to, before in (*steps, (few[1], saved, None))
    ]
    for figures in world.run(run_uploads, dict(tp=2), uploads):
        assert all(isinstance(f, dict) for f in figures), figures
        sent = [f["weight_sync/bytes"] for f in figures]
        changed = [f.get("weight_sync/changed", 0.0) for f in figures]
        assert sent[0] == sent[2] and max(sent[1], sent[3]) < 0.1 * sent[0]
        assert changed == pytest.approx([0, 0.01, 0, 0.02], rel=0.2)
        assert all(f["weight_sync/verified"] for f in figures)
    check_held(pair.both, saved, uploads[-1].meta.version)


# SGLang's FP8 on a CPU needs AMX: it packs for it what it has loaded, and computes with that. In
# their place: nothing is packed, linear maps are plain torch, experts let everything pass.
WITHOUT_AMX = """
import importlib.util, sys

def linear(self, layer, x, bias=None):
    import torch
    rows, columns = layer.weight.shape
    scales = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    weight = layer.weight.float() * scales[:rows, :columns]
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

def experts(self, layer, dispatch_output):
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    return StandardCombineInput(hidden_states=dispatch_output.hidden_states)

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "sglang.srt.layers.quantization.fp8":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            for method in (module.Fp8LinearMethod, module.Fp8MoEMethod):
                method.process_weights_after_loading = lambda self, layer: None
            module.Fp8LinearMethod.apply, module.Fp8MoEMethod.apply = linear, experts
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def in_fp8(source: Path, target: Path) -> Path:
    """The checkpoint that quantising a model gives."""
    shutil.copytree(source, target)
    (file,) = target.glob("*.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for name, t in load_file(file).items():
        tensors[name] = t
        if is_linear(name):
            tensors[name], tensors[name + block_fp8.SUFFIX] = block_fp8.quantize(t)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block_fp8.BLOCK, block_fp8.BLOCK],
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.full
@pytest.mark.parametrize("kind", ("qwen3", "qwen3_moe"))
def test_fp8(world: World, tmp_path: Path, kind: str) -> None:
    """What a server of tp 2 holds and says is what it does after it has loaded the quantised
    checkpoint. It is stock but for what WITHOUT_AMX does."""
    sizes: dict[str, Any] = dict(
        hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, vocab_size=1000,
    )  # fmt: skip
    if kind == "qwen3_moe":
        sizes |= dict(mlp_only_layers=[], norm_topk_prob=True, moe_intermediate_size=256)
    models = [save_model(tmp_path / str(seed), kind, seed, **sizes) for seed in (0, 1)]
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT_AMX)
    quantised = [in_fp8(m, tmp_path / f"q{i}") for i, m in enumerate(models)]
    path = f"{tmp_path / 'site'}:{RECEIVER}"
    server = launch(
        quantised[0], tmp_path / "log", tp=2, dtype="bfloat16",
        options={"skip_server_warmup": True}, env={"PYTHONPATH": path},
    )  # fmt: skip
    meta = replace(meta_for([server]), quantization="fp8_block", verify="off")
    with serving(server):
        server.load(quantised[1])
        expected = server.checksums(), server.said()
        server.load(quantised[0])
        assert server.checksums() != expected[0]
        for (figures,) in world.run(run_uploads, dict(tp=2), [Upload(models[1], None, meta)]):
            assert isinstance(figures, dict) and figures["weight_sync/sharded"], figures
        assert (server.checksums(), server.said()) == expected
        assert server.version == str(meta.version)


def run_with_a_stranger(upload: Upload, server: str, tp: int, tensor: str) -> Any:
    """Somebody else writes a tensor's last row once the weights are there: the upload's error."""
    value = load_file(next(upload.source.glob("*.safetensors")))[tensor]
    value[-1] += 1
    memory = handles.allocate(value.nbytes, torch.device("cpu")).view(value.dtype)
    memory = memory.view(value.shape).copy_(value)
    compare = Fingerprints.compare

    def compare_later(mine: Fingerprints) -> Any:
        if mine.source.rank == 0:
            texts = [handles.pack(tensor, memory) for _ in range(tp)]
            body = {
                "serialized_named_tensors": texts,
                "flush_cache": False,
            }
            call_json("POST", server, "/update_weights_from_tensor", body, timeout=60)
        return compare(mine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fingerprints, "compare", compare_later)
        return run_uploads(dict(tp=2), [upload])[0]


@pytest.mark.parametrize("sharded", ("on", "off"))
def test_what_a_stranger_wrote_is_found(pair: Pair, world: World, sharded: str) -> None:
    """In a parameter that is made of three HF tensors, of which rank 1 has the last row."""
    meta = WeightUpdateMeta(
        type="distributed",
        version=next(_versions),
        addresses=pair.addresses,
        timeout=120.0,
        sharded=sharded,
        verify="full",
    )
    name = "model.layers.1.self_attn.k_proj.weight"
    upload = Upload(pair.m1, None, meta)
    for error in world.run(run_with_a_stranger, upload, pair.two.address, 2, name):
        assert isinstance(error, str) and f"{pair.two.address}, rank 1: {name} [" in error, error
        assert "in model.layers.1.self_attn.qkv_proj.weight" in error
        assert error.count(", rank ") == 1 and pair.one.address not in error, error


FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, dict(tp=2)),
    "qwen2": (dict(tie=True), dict(pp=2)),
    "glm4": ({}, dict(tp=2)),
    "mixtral": ({}, dict(tp=1, etp=2)),
    "qwen3_moe": (dict(mlp_only_layers=[], norm_topk_prob=True), dict(ep=2)),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", FAMILIES)
def test_families(world: World, tmp_path: Path, kind: str) -> None:
    over, parallel = FAMILIES[kind]
    models = [
        save_model(tmp_path / str(seed), kind, seed, vocab_size=1000, **over) for seed in (0, 1)
    ]
    server = launch(models[0], tmp_path / "log", tp=2)
    with serving(server):
        check(world, [server], (models[0], models[1]), tmp_path / "saved", parallel)


# sizes without padding: a rank of two keeps half of each tensor that it does not keep whole
EVEN: dict[str, Any] = dict(vocab_size=256, intermediate_size=128)
MOE: dict[str, Any] = dict(moe_intermediate_size=64, mlp_only_layers=[], norm_topk_prob=True)
ENGINES: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[tuple[int, dict[str, Any]]]]] = {
    "qwen3": ("qwen3", {}, {}, [(2, {}), (4, dict(tp=2, pp=2))]),
    "qwen3_moe": ("qwen3_moe", MOE, {}, [(2, dict(ep=2)), (4, dict(**SP, ep=2))]),
    "mixtral": ("mixtral", {}, {}, [(2, dict(etp=2)), (4, dict(**SP, etp=2, pp=2))]),
    "experts dealt out": (
        "qwen3_moe", MOE, {"ep_size": 2}, [(2, dict(ep=2)), (4, dict(**SP, pp=2))],
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", ENGINES)
def test_engines_of_every_layout(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """To a server of two ranks: half of the model to each, and norms and routers to both. Where
    experts are dealt out, half is whole experts."""
    kind, over, options, layouts = ENGINES[case]
    if options:
        path = [str(PLUGINS), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    model = save_model(tmp_path / "model", kind, 0, **(EVEN | over))
    tensors = load_file(next(model.glob("*.safetensors")))
    on_both = sum(t.nbytes for n, t in tensors.items() if t.dim() == 1 or n.endswith("gate.weight"))
    share = (sum(t.nbytes for t in tensors.values()) + on_both) / 2
    server = launch(model, tmp_path / "log", tp=2, options=options)
    with serving(server), World(4, timeout=240) as four:
        for number, (ranks, parallel) in enumerate(layouts):
            saved = tmp_path / f"saved{number}"
            figures = check_engine(four if ranks == 4 else world, server, model, saved, parallel)
            assert figures["weight_sync/slice_bytes"] == share
            assert figures["weight_sync/bytes"] == 2 * share
            assert figures["weight_sync/senders"] == ranks
