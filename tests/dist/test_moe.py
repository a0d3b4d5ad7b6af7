"""Mixture-of-experts models: routing is recorded and replayed, auxiliary losses are the papers',
experts keep their names. (invariance.py's table compares the models with Hugging Face's.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.api.tokens import select
from tests.dist import engine_jobs
from tests.dist.engine_jobs import (
    PLAIN,
    RECOMPUTE,
    SP,
    ZERO,
    Parallel,
    make_engine,
    run_save,
    save_model,
    state,
)
from tests.dist.invariance import check, train
from tests.dist.losses import LOSSES
from tests.dist.moe_routing import REPLAY, hf_routers, random_routing
from tests.dist.reference import hf_outputs, hf_steps
from tests.files import same
from tests.tiny import hf_named, tiny_hf


def name(case: tuple[int, str, Parallel, dict[str, Any]]) -> str:
    n, kind, parallel, over = case
    layout = "".join(f"{k if k[0] != 's' else 'sp'}{int(v)}" for k, v in parallel.items())
    return f"{n}-{kind}-{layout or 'dp'}-{'zero' if not over['optimizer'] else 'plain'}"


# ---- recorded and replayed routing


def force(hf: Any, routing: torch.Tensor) -> Any:
    """Makes every router of `hf` send the batch's tokens where routing [B,S,L,k] says."""

    def forced(router: Any, chosen: torch.Tensor, normed: bool) -> Any:
        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = torch.nn.functional.linear(hidden.flatten(0, -2), router.weight)
            weights = logits.softmax(-1).gather(1, chosen)
            if normed:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, chosen

        return forward

    normed = getattr(hf.config, "norm_topk_prob", True)
    for i, router in hf_routers(hf).items():
        router.forward = forced(router, routing[:, :, i].flatten(0, 1).long(), normed)
    return hf


def check_replay(case: Any, worlds: Any, models: Path) -> None:
    n, kind, parallel, over = case
    hf, routing = tiny_hf(kind), random_routing()
    b = {**engine_jobs.batch(), "routed_experts": routing}
    free = hf_outputs(hf, b)
    want = hf_steps(force(hf, routing), b, LOSSES["policy"])
    assert (want["outputs"]["logprobs"] - free["logprobs"]).abs().max() > 0.1
    path = save_model(models, kind, False)
    check(worlds(n).run(train, path, parallel, "policy", b, **over), want)


@pytest.mark.parametrize(
    "case",
    [
        (2, "qwen3_moe", dict(**SP, ep=2), PLAIN | REPLAY),
        (4, "mixtral", dict(pp=2, vpp=2, ep=2), PLAIN | RECOMPUTE | REPLAY),
    ],
    ids=name,
)
def test_updates_repeat_a_given_routing(case: Any, worlds: Any, models: Path) -> None:
    check_replay(case, worlds, models)


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        (1, "mixtral", dict(), PLAIN | REPLAY),
        (2, "mixtral", dict(pp=2), ZERO | RECOMPUTE | REPLAY),
        (2, "qwen3_moe", dict(cp=2), PLAIN | REPLAY),
        (4, "qwen3_moe", dict(cp=2, **SP, ep=2), PLAIN | REPLAY),
        (4, "qwen3_moe", dict(pp=2, **SP, etp=2), PLAIN | RECOMPUTE | REPLAY),
    ],
    ids=name,
)
def test_more_replays(case: Any, worlds: Any, models: Path) -> None:
    check_replay(case, worlds, models)


STATS = {"load_per_layer": True}


def run_record(path: str, parallel: Parallel) -> list[torch.Tensor]:
    """Returns logprobs and routing of a pass, and the logprobs of a pass that replays it."""
    engine = make_engine(path, parallel, router_replay="trainer", options=STATS)
    b = engine_jobs.batch()
    found = engine.forward(b, outputs=("logprobs", "routed_experts"))
    again = engine.forward({**b, "routed_experts": found["routed_experts"]})
    with pytest.raises(ValueError, match=r"the batch has no 'routed_experts' to replay"):
        engine.train_batch(b, engine_jobs.loss_fn, engine_jobs.weight_fn)
    engine.destroy()
    return [found["logprobs"], found["routed_experts"], again]


@pytest.mark.parametrize(
    "n, parallel",
    [
        (2, dict(**SP, ep=2)),
        pytest.param(2, dict(cp=2), marks=pytest.mark.full),
        pytest.param(2, dict(pp=2, vpp=2), marks=pytest.mark.full),
        pytest.param(4, dict(pp=2, **SP), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_logp_pass_records_the_routing(
    n: int, parallel: Parallel, worlds: Any, models: Path
) -> None:
    hf, b = tiny_hf("qwen3_moe"), engine_jobs.batch()
    chosen = {}
    for i, router in hf_routers(hf).items():
        router.register_forward_hook(lambda _m, _a, out, i=i: chosen.update({i: out[2]}))
    with torch.no_grad():
        hf(b["input_ids"], attention_mask=b["attention_mask"].long())
    want = torch.zeros(*b["input_ids"].shape, 4, 2, dtype=torch.long)
    for i, x in chosen.items():
        want[:, :, i] = x.view(*b["input_ids"].shape, 2)
    want[~b["attention_mask"]] = 0
    for logp, routing, again in worlds(n).run(
        run_record, save_model(models, "qwen3_moe", False), parallel
    ):
        assert routing.dtype == torch.uint8 and torch.equal(routing.long(), want)
        torch.testing.assert_close(logp, again, rtol=0, atol=1e-6)


# ---- metrics and auxiliary losses

AUX, Z = 0.3, 0.02


def run_aux(path: str, parallel: Parallel, b: Any, routing: torch.Tensor) -> dict[str, Any]:
    options = dict(moe_aux_loss_coeff=AUX, moe_z_loss_coeff=Z, **STATS)
    engine = make_engine(path, parallel, options=options, max_tokens=10**6, **PLAIN)
    kw = dict(outputs=("logprobs", "entropy"), temperature=0.8)
    stats = engine.backward_batch(b, engine_jobs.loss_fn, engine_jobs.weight_fn, **kw)
    grads = state(engine, grads=True)
    engine.destroy()

    engine = make_engine(path, parallel, router_replay="trainer")
    crowded = {**b, "routed_experts": routing}
    crowd = engine.eval_batch(crowded, engine_jobs.loss_fn, engine_jobs.weight_fn, **kw)
    engine.destroy()
    return {"stats": stats, "grads": grads, "crowd": crowd}


@pytest.mark.parametrize(
    "n, parallel, kind",
    [
        (2, dict(**SP, ep=2), "mixtral"),
        pytest.param(1, dict(), "mixtral", marks=pytest.mark.full),
        pytest.param(2, dict(**SP, ep=2), "qwen3_5_moe_text", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_auxiliary_losses_and_loads(
    n: int, parallel: Parallel, kind: str, worlds: Any, models: Path
) -> None:
    """Load balancing: E/(k T^2) * sum_e (tokens of e) * (sum_t p_te), Fedus et al. 2021, eq. 4-6,
    for k experts; z: the mean of logsumexp^2, Zoph et al. 2022, eq. 5. One micro-batch."""
    hf, b = tiny_hf(kind), select(engine_jobs.batch(), [0, 1, 2, 3, 4, 5])
    assert b["attention_mask"].sum() % 2 == 0  # no padding
    logits: list[torch.Tensor] = []
    for router in hf_routers(hf).values():
        router.register_forward_hook(lambda _m, _a, out: logits.append(out[0]))
    loss, _ = engine_jobs.loss_fn(hf_outputs(hf, b), b)
    total, aux, z = loss / engine_jobs.weight_fn(b), [], []
    loads = []
    for x in (x[b["attention_mask"].flatten()] for x in logits):
        tokens = torch.zeros_like(x).scatter(1, x.topk(2).indices, 1.0).sum(0)
        loads.append(float(tokens.max() / tokens.mean()))
        aux.append(4 / (2 * len(x) ** 2) * (tokens * x.softmax(-1).sum(0)).sum())
        z.append(x.logsumexp(-1).square().mean())
    (total + AUX * sum(aux) + Z * sum(z)).backward()
    want = hf_named(hf, {n: p.grad for n, p in hf.named_parameters() if p.grad is not None})

    crowd = torch.tensor([1, 3]).expand(*b["input_ids"].shape, 4, 2)
    got = worlds(n).run(run_aux, save_model(models, kind, False), parallel, b, crowd)[0]
    for key, value in want.items():
        assert (got["grads"][key] - value).norm() <= 1e-4 * value.norm(), key
    stats = got["stats"]
    assert stats["moe/aux_loss"] == pytest.approx(float(sum(aux)) / 4, rel=1e-4)
    assert stats["moe/z_loss"] == pytest.approx(float(sum(z)) / 4, rel=1e-4)
    assert stats["moe/load_max_over_mean"] == pytest.approx(sum(loads) / 4)
    assert stats["moe/load_max_over_mean/layer_2"] == pytest.approx(loads[2])
    assert stats["moe/idle_experts"] == 0
    # all tokens go to two experts of four
    assert got["crowd"]["moe/load_max_over_mean"] == 2 and got["crowd"]["moe/idle_experts"] == 0.5
    assert "moe/aux_loss" not in got["crowd"]


def run_balanced(path: str, parallel: Parallel, b: Any) -> dict[str, Any]:
    options = dict(moe_aux_loss_coeff=AUX)
    engine = make_engine(path, parallel, options=options, max_tokens=10**6, **PLAIN)
    kw = dict(outputs=("logprobs", "entropy"), temperature=0.8)
    stats = engine.backward_batch(b, engine_jobs.loss_fn, engine_jobs.weight_fn, **kw)
    grads = state(engine, grads=True)
    engine.destroy()
    return {"loss": stats["moe/aux_loss"], "grads": grads}


@pytest.mark.parametrize(
    "n, parallel",
    [(2, dict(cp=2)), pytest.param(4, dict(**SP, cp=2), marks=pytest.mark.full)],
    ids=str,
)
def test_auxiliary_losses_count_real_tokens(
    n: int, parallel: Parallel, worlds: Any, models: Path
) -> None:
    """The formula of the test above over real tokens; the rows are filled up to multiples of 4."""
    hf, b = tiny_hf("mixtral"), engine_jobs.batch()
    assert any(length % 4 for length in b["attention_mask"].sum(1).tolist())
    logits: list[torch.Tensor] = []
    for router in hf_routers(hf).values():
        router.register_forward_hook(lambda _m, _a, out: logits.append(out[0]))
    total = engine_jobs.loss_fn(hf_outputs(hf, b), b)[0] / engine_jobs.weight_fn(b)
    aux = []
    for x in (x[b["attention_mask"].flatten()] for x in logits):
        tokens = torch.zeros_like(x).scatter(1, x.topk(2).indices, 1.0).sum(0)
        aux.append(4 / (2 * len(x) ** 2) * (tokens * x.softmax(-1).sum(0)).sum())
    (total + AUX * sum(aux)).backward()
    want = hf_named(hf, {k: p.grad for k, p in hf.named_parameters() if p.grad is not None})
    got = worlds(n).run(run_balanced, save_model(models, "mixtral", False), parallel, b)[0]
    assert got["loss"] == pytest.approx(float(sum(aux)) / 4, rel=1e-4)
    for key, value in want.items():
        assert (got["grads"][key] - value).norm() <= 1e-4 * value.norm(), key


# ---- weights


@pytest.mark.parametrize(
    "kind, parallel",
    [
        ("qwen3_moe", dict(pp=2, ep=2)),
        ("mixtral", dict(**SP, ep=2, etp=2)),
        ("deepseek_v3", dict(**SP, pp=2, ep=2)),
        ("deepseek_v2_lite", dict(pp=2, ep=2)),
    ],
    ids=("qwen3_moe", "mixtral", "deepseek_v3", "deepseek_v2_lite"),
)
def test_round_trip_is_bit_exact(
    kind: str, parallel: Parallel, worlds: Any, models: Path, tmp_path: Path
) -> None:
    """Weights are saved per expert, under the names that transformers writes."""
    source = save_model(models, kind, False)
    worlds(4).run(run_save, source, parallel, str(tmp_path / "out"))
    same(Path(source), tmp_path / "out")
