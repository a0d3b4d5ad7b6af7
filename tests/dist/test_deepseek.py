"""DeepSeek-V2 and V3: group-limited routing is recorded and replayed; the router's bias is loaded,
saved and kept in fp32; layers that predict further tokens are left out. (invariance.py's table
compares the models with Hugging Face's, except V2-Lite.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.api.records import SaveLoadMeta
from tests.dist import engine_jobs
from tests.dist.engine_jobs import PLAIN, SP, Parallel, make_engine, run_save, save_model, state
from tests.dist.invariance import check, train
from tests.dist.losses import LOSSES
from tests.dist.moe_routing import REPLAY, hf_routers, random_routing
from tests.dist.reference import hf_steps
from tests.tiny import random_batch, tiny_hf

PLAIN_ROPE = dict(rope_type="default", rope_theta=10000.0)
BIAS = "mlp.gate.e_score_correction_bias"


def test_queries_without_a_latent_equal_hugging_face(worlds: Any, models: Path) -> None:
    """V2-Lite has its own modules, greedy routing without groups, and plain rotary embedding."""
    kind, b = "deepseek_v2_lite", engine_jobs.batch()
    want = hf_steps(tiny_hf(kind), b, LOSSES["policy"])
    check(worlds(2).run(train, save_model(models, kind, False), dict(ep=2), "policy", b), want)


def test_plain_rotary_embedding_equals_hugging_face(worlds: Any, tmp_path: Path) -> None:
    """V3 turns neighbours as V2 does, where its rope is not scaled, too."""
    hf, b = tiny_hf("deepseek_v3", rope_parameters=PLAIN_ROPE), engine_jobs.batch()
    hf.save_pretrained(tmp_path)
    want = hf_steps(hf, b, LOSSES["policy"])
    check(worlds(2).run(train, str(tmp_path), dict(SP), "policy", b), want)


# ---- recorded and replayed routing


def force(hf: Any, routing: torch.Tensor) -> Any:
    """Makes every router of `hf` send the batch's tokens where routing [B,S,L,k] says."""
    sigmoid = hf.config.model_type == "deepseek_v3"

    def forced(router: Any, chosen: torch.Tensor) -> Any:
        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = torch.nn.functional.linear(hidden.flatten(0, -2), router.weight)
            scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
            weights = scores.gather(1, chosen)
            if sigmoid:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights * hf.config.routed_scaling_factor, chosen

        return forward

    for i, router in hf_routers(hf).items():
        router.forward = forced(router, routing[:, :, i].flatten(0, 1).long())
    return hf


def run_record(path: str, parallel: Parallel) -> list[torch.Tensor]:
    engine = make_engine(path, parallel, trained=False)
    found = engine.forward(engine_jobs.batch(), outputs=("logprobs", "routed_experts"))
    engine.destroy()
    return [found["logprobs"], found["routed_experts"]]


@pytest.mark.parametrize(
    "n, kind, parallel",
    [
        (2, "deepseek_v3", dict(**SP, ep=2)),
        pytest.param(2, "deepseek_v2", dict(cp=2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_group_limited_routing_is_recorded_and_replayed(
    n: int, kind: str, parallel: Parallel, worlds: Any, models: Path
) -> None:
    hf, b, path = tiny_hf(kind), engine_jobs.batch(), save_model(models, kind, False)
    chosen: dict[int, torch.Tensor] = {}
    for i, router in hf_routers(hf).items():
        router.register_forward_hook(lambda _m, _a, out, i=i: chosen.update({i: out[2]}))
    with torch.no_grad():
        hf(b["input_ids"], attention_mask=b["attention_mask"].long())
    mask = b["attention_mask"]
    _, routing = worlds(n).run(run_record, path, parallel)[0]
    assert sorted(chosen) == [1, 2, 3]
    for i, x in chosen.items():
        want = x.view(*mask.shape, 3).sort().values
        assert torch.equal(routing[:, :, i].long().sort().values[mask], want[mask])

    other = random_routing(experts=hf.config.n_routed_experts, k=3)
    given = {**b, "routed_experts": other}
    want_steps = hf_steps(force(tiny_hf(kind), other), b, LOSSES["policy"])
    got = worlds(n).run(train, path, parallel, "policy", given, **PLAIN | REPLAY)
    check(got, want_steps)


# ---- the router's bias


def step(engine: Any) -> None:
    engine.train_batch(
        engine_jobs.batch(),
        engine_jobs.loss_fn,
        engine_jobs.weight_fn,
        outputs=("logprobs", "entropy"),
    )


def run_update(path: str, parallel: Parallel, rate: float) -> list[Any]:
    options = dict(moe_router_bias_update_rate=rate)
    engine = make_engine(path, parallel, options=options)
    found = engine.forward(engine_jobs.batch(), outputs=("logprobs", "routed_experts"))
    step(engine)
    after = state(engine)
    engine.destroy()
    return [found["routed_experts"], {k: v for k, v in after.items() if k.endswith(BIAS)}]


def test_the_bias_moves_where_it_is_asked_to(worlds: Any, models: Path) -> None:
    """The bias falls where an expert has more than its share (DeepSeek-V3, section 2.1.2)."""
    path, mask = save_model(models, "deepseek_v3", False), engine_jobs.batch()["attention_mask"]
    before = dict(tiny_hf("deepseek_v3").named_buffers())
    routing, after = worlds(2).run(run_update, path, dict(), 0.01)[0]
    for key, bias in after.items():
        layer = int(key.split(".")[2])
        load = torch.bincount(routing[:, :, layer][mask].long().flatten(), minlength=8).float()
        want = before[key] + 0.01 * torch.sign(load.mean() - load)
        torch.testing.assert_close(bias, want, rtol=0, atol=1e-7)


def run_counts(path: str, parallel: Parallel, b: Any, over: dict[str, Any]) -> Any:
    options = dict(moe_router_bias_update_rate=0.01)
    engine = make_engine(path, parallel, options=options, router_replay="trainer", **over)
    before = state(engine)
    engine.train_batch(
        b, engine_jobs.loss_fn, engine_jobs.weight_fn, outputs=("logprobs", "entropy")
    )
    after = state(engine)
    engine.destroy()
    return {k: after[k] - before[k] for k in after if k.endswith(BIAS)}


@pytest.mark.parametrize(
    ("n", "parallel", "over"),
    [
        (2, dict(cp=2), {}),
        (2, dict(cp=2), dict(recompute_granularity="full")),
        (2, dict(pp=2, cp=1), dict(dtype="bfloat16")),
        (2, dict(cp=2), dict(dtype="bfloat16", max_tokens=16)),
        pytest.param(4, dict(**SP, pp=2), dict(dtype="bfloat16"), marks=pytest.mark.full),
        pytest.param(4, dict(**SP, cp=2), {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_bias_follows_exact_counts_of_real_tokens(
    n: int, parallel: Parallel, over: dict[str, Any], worlds: Any, models: Path
) -> None:
    """Short rows are filled up to multiples of 2 cp; counts differ by less than bfloat16 has."""
    b = random_batch(n=160, lo=5, hi=16, seed=5)
    b["advantages"] = torch.linspace(-1.0, 1.5, len(b["input_ids"]))
    g = torch.Generator().manual_seed(7)
    routes = torch.rand(*b["input_ids"].shape, 4, 8, generator=g).argsort(-1)[..., :3].byte()
    given = {**b, "routed_experts": routes}
    path = save_model(models, "deepseek_v3", False)
    moved = worlds(n).run(run_counts, path, parallel, given, over)[0]
    assert len(moved) == 3
    for key, delta in moved.items():
        chosen = routes[:, :, int(key.split(".")[2])][b["attention_mask"]].long().flatten()
        load = torch.bincount(chosen, minlength=8).double()
        assert load.min() > 256
        want = 0.01 * torch.sign(load.mean() - load)
        torch.testing.assert_close(delta.double(), want, rtol=0, atol=1e-6)


def run_bf16(path: str, parallel: Parallel, out: str) -> dict[str, torch.Tensor]:
    """Saves in Hugging Face's and in megatron-core's format; a fresh engine loads the latter."""
    engine = make_engine(path, parallel, dtype="bfloat16")
    step(engine)
    engine.save(SaveLoadMeta(path=out, weight_format="hf"))
    engine.save(SaveLoadMeta(path=out + "-dist", weight_format="dist"))
    engine.destroy()
    engine = make_engine(path, parallel, dtype="bfloat16", init_from_scratch=True)
    zero = state(engine)
    engine.load(SaveLoadMeta(path=out + "-dist", weight_format="dist"))
    loaded = state(engine)
    assert all(not v.any() for k, v in zero.items() if k.endswith(BIAS))
    engine.destroy()
    return loaded


def test_the_bias_is_fp32_in_a_bfloat16_model(worlds: Any, models: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "out", save_model(models, "deepseek_v3", False)
    loaded = worlds(2).run(run_bf16, path, dict(**SP, ep=2), str(out))[0]
    saved, before = (
        load_file(out / "model.safetensors"),
        dict(tiny_hf("deepseek_v3").named_buffers()),
    )
    biases = [k for k in saved if k.endswith(BIAS)]
    assert len(biases) == 3
    for key, value in saved.items():
        assert value.dtype == (torch.float32 if key in biases else torch.bfloat16)
        assert torch.equal(value, loaded[key])
    assert all(torch.equal(saved[key], before[key]) for key in biases)


# ---- files


def test_layers_that_predict_further_tokens_are_left_out(
    worlds: Any, models: Path, tmp_path: Path
) -> None:
    source, more = Path(save_model(models, "deepseek_v3", False)), tmp_path / "more"
    more.mkdir()
    tensors = load_file(source / "model.safetensors")
    further = {
        n.replace("layers.3.", "layers.4."): t.clone() for n, t in tensors.items() if "s.3." in n
    }
    further["model.layers.4.eh_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors | further, more / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((source / "config.json").read_text())
    (more / "config.json").write_text(json.dumps(raw))
    worlds(2).run(run_save, str(more), dict(pp=2), str(tmp_path / "out"))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()

    raw.pop("num_mtp_layers", None)
    raw["num_nextn_predict_layers"] = 0
    (more / "config.json").write_text(json.dumps(raw))
    with pytest.raises(Exception, match=r"model\.layers\.4\."):
        worlds(2).run(run_save, str(more), dict(pp=2), str(tmp_path / "out2"))
