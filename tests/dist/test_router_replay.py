"""A trainer that replays the routes of a server whose routers choose otherwise computes the
server's logprobs; without them it does not. Where routes are unknown its own routers choose.

The server is Hugging Face's model with noise in its routers' choices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megarl.algos.kl import kl_estimate
from megarl.api.batch import Tokens
from tests.dist import engine_jobs
from tests.dist.engine_jobs import RECOMPUTE, SP, TEMPERATURE, Parallel, Tensors, make_engine
from tests.dist.invariance import OUTPUTS
from tests.dist.moe_routing import perturb
from tests.dist.reference import hf_outputs
from tests.tiny import save_tiny, tiny_hf


def run_replay(path: str, parallel: Parallel, b: Tensors, over: dict[str, Any]) -> dict[str, Any]:
    """What a free pass and one that replays b's routes say, and the gradients under b's routes and
    under those that the pass repeated."""
    engine = make_engine(path, parallel, router_replay="rollout", **over)
    free = {k: v for k, v in b.items() if k != "routed_experts"}
    without = engine.forward(free, outputs=("logprobs",), temperature=TEMPERATURE)
    names = ("logprobs", "routed_experts")
    found = engine.forward(b, outputs=names, temperature=TEMPERATURE)
    grads, stats = [], []
    padded, layers = Tokens.padded, set()

    def seen(self: Tokens, *args: Any, **kw: Any) -> torch.Tensor:
        out = padded(self, *args, **kw)
        layers.update([out.shape[2]] if out.ndim == 4 else [])
        return out

    for routes in (b["routed_experts"], found["routed_experts"]):
        given = {**b, "routed_experts": routes}
        kw = dict(outputs=("logprobs", "entropy"), temperature=TEMPERATURE)
        with mock.patch.object(Tokens, "padded", seen):
            stats.append(
                engine.backward_batch(given, engine_jobs.loss_fn, engine_jobs.weight_fn, **kw)
            )
        grads.append(engine_jobs.state(engine, grads=True))
    chunk_of = engine.state.layout.chunk_of(engine.model_config.num_layers)
    own: dict[Any, list[int]] = {}
    for tape in engine.state.routing.tapes:
        own.setdefault(chunk_of[tape.layer], []).append(tape.layer)
    spans = {max(of_chunk) - min(of_chunk) + 1 for of_chunk in own.values()}
    engine.destroy()
    both = {"layers": layers, "spans": spans}
    return {"without": without, **found, "grads": grads, "stats": stats, **both}


def served(kind: str) -> tuple[Tensors, Tensors, float]:
    """A batch with the server's logprobs and routes, those of row 0 and of every last token
    unknown; the logprobs and routes of the same model without noise; the share of the choices of
    rows 1 and on that the trainer's routers would not have made."""
    b = engine_jobs.batch()
    shape, real = b["input_ids"].shape, b["attention_mask"].clone()
    hf = tiny_hf(kind)
    k, layers = hf.config.num_experts_per_tok, hf.config.num_hidden_layers

    def routes(chosen: dict[int, Any], which: int) -> torch.Tensor:
        out = torch.zeros(*shape, layers, k, dtype=torch.int8)
        for layer, both in chosen.items():
            out[:, :, layer] = both[which].view(*shape, k)
        return out

    quiet = perturb(hf, noise=0.0)
    with torch.no_grad():
        hf_logprobs = hf_outputs(hf, b)["logprobs"]
    own = {"logprobs": hf_logprobs, "routed_experts": routes(quiet, 1)}
    noisy_hf = tiny_hf(kind)
    chosen = perturb(noisy_hf)
    with torch.no_grad():
        b["logprobs"] = hf_outputs(noisy_hf, b)["logprobs"]
    b["routed_experts"] = routes(chosen, 0)
    last = torch.nn.functional.pad(real[:, 1:], (0, 1))
    known = real & last
    known[0] = False
    b["routed_experts"][~known] = -1
    flipped = torch.stack(
        [(x[:, :, None] != y[:, None]).all(2) for x, y in chosen.values()]
    )  # [layers,tokens,k]
    return b, own, float(flipped[:, known.flatten()].double().mean())


def check(case: Any, worlds: Any, models: Path) -> None:
    n, kind, parallel, over = case
    b, own, flips = served(kind)
    path = models / f"replay-{kind}"
    if not path.exists():
        save_tiny(path, kind)
    got = worlds(n).run(run_replay, str(path), parallel, b, over)[0]
    real, rest = b["attention_mask"], slice(1, None)

    def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        return float((ours - theirs).abs().max())

    def kl(ours: torch.Tensor) -> float:
        mask = real[rest, 1:]
        both = (x[rest, 1:][mask].double() for x in (b["logprobs"], ours))
        return float(kl_estimate(*both, "k3").mean())

    assert gap(got["without"], own["logprobs"]) <= OUTPUTS
    assert gap(got["without"][rest], b["logprobs"][rest]) > 0.05 and kl(got["without"]) > 1e-4
    assert gap(got["logprobs"][rest], b["logprobs"][rest]) <= OUTPUTS
    assert kl(got["logprobs"]) <= OUTPUTS**2
    # what nobody told, the trainer's routers chose
    assert gap(got["logprobs"][0], own["logprobs"][0]) <= OUTPUTS
    told = b["routed_experts"] >= 0
    repeated = got["routed_experts"].long()
    assert torch.equal(repeated[told], b["routed_experts"].long()[told])
    chosen, wanted = (x[0][real[0]].long().sort().values for x in (repeated, own["routed_experts"]))
    assert torch.equal(chosen, wanted)
    # and chooses again in the update, also where it computes activations twice
    for name, grad in got["grads"][0].items():
        torch.testing.assert_close(grad, got["grads"][1][name], rtol=0, atol=1e-7, msg=name)
    assert got["layers"] == got["spans"]  # of the routes a chunk pads its own layers' alone
    assert 0.05 < flips < 0.95
    assert got["stats"][0]["moe/replay_flips"] == pytest.approx(flips, abs=1e-9)


def name(case: tuple[int, str, Parallel, dict[str, Any]]) -> str:
    n, kind, parallel, over = case
    layout = "".join(f"{k if k[0] != 's' else 'sp'}{int(v)}" for k, v in parallel.items())
    return f"{n}-{kind}-{layout or 'dp'}{'-recompute' if over else ''}"


@pytest.mark.parametrize(
    "case",
    [
        (2, "qwen3_moe", dict(**SP, ep=2), {}),  # layer 1 is dense
        (2, "deepseek_v3", dict(cp=2), RECOMPUTE),  # layer 0 is, and there are shared experts
    ],
    ids=name,
)
def test_the_servers_routes_close_the_gap(case: Any, worlds: Any, models: Path) -> None:
    check(case, worlds, models)


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        (1, "qwen2_moe", {}, RECOMPUTE),
        (2, "mixtral", dict(ep=2), {}),
        (2, "mixtral", dict(etp=2, **SP), {}),
        (2, "deepseek_v2", dict(pp=2), {}),
        (2, "glm4_moe", dict(pp=2, vpp=2), RECOMPUTE),
        (2, "kimi_k2", dict(**SP), {}),
        (4, "qwen3_moe", dict(pp=2, vpp=2, ep=2), {}),
        (4, "qwen3_moe", dict(cp=2, **SP, ep=2), RECOMPUTE),
        (4, "deepseek_v3", dict(pp=2, **SP, etp=2), RECOMPUTE),
        (4, "mixtral", dict(pp=2, cp=2), {}),
    ],
    ids=name,
)
def test_in_every_layout(case: Any, worlds: Any, models: Path) -> None:
    check(case, worlds, models)
