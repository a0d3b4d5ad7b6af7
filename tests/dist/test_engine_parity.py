"""The engine equals Hugging Face: outputs, loss, gradients, one optimizer step, in every layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.dist.engine_jobs import hf_reference, run_all, save_model
from tests.dist.world import World
from tests.tiny import tiny_hf

SP = dict(tp=2, sequence_parallel=True)
ZERO = dict(distributed=True)
# (processes, family, tied, parallel, optimizer, other engine settings); every family meets tensor,
# sequence, pipeline and data parallelism, tied and untied, and both optimizers meet every axis
CASES = [
    (1, "llama", False, dict(), {}, {}),
    (1, "qwen2", True, dict(), ZERO, {}),
    (1, "qwen3", False, dict(), {}, dict(gradient_checkpointing=True)),
    (2, "llama", True, dict(tp=2), {}, {}),
    (2, "qwen2", False, dict(tp=2), ZERO, {}),
    (2, "qwen3", True, dict(tp=2), {}, {}),
    (2, "llama", False, SP, {}, {}),
    (2, "qwen2", True, SP, {}, dict(gradient_checkpointing=True)),
    (2, "qwen3", False, SP, ZERO, {}),
    (2, "llama", False, dict(pp=2), ZERO, {}),
    (2, "qwen2", True, dict(pp=2), {}, {}),
    (2, "qwen3", True, dict(pp=2), ZERO, {}),
    (2, "llama", True, dict(pp=2, vpp=2), {}, {}),
    (2, "qwen3", False, dict(pp=2, vpp=2), {}, {}),
    (2, "llama", True, dict(), ZERO, {}),  # dp2
    (2, "qwen2", False, dict(), {}, {}),
    (2, "qwen3", True, dict(), {}, dict(max_tokens=1)),
    (4, "llama", False, dict(tp=2, pp=2), {}, {}),
    (4, "qwen2", True, dict(pp=2, **SP), {}, {}),
    (4, "qwen3", True, dict(pp=2, vpp=2, **SP), {}, {}),
    (4, "qwen3", False, dict(tp=2), ZERO, {}),  # dp2
    (4, "llama", True, dict(pp=2, vpp=2), ZERO, {}),  # dp2
    (4, "qwen2", False, dict(tp=4), {}, {}),  # two ranks share a KV head
]


@pytest.fixture(scope="module")
def worlds():
    open_: dict[int, World] = {}
    yield lambda n: open_.setdefault(n, World(n))
    for world in open_.values():
        world.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@cache
def reference(kind: str, tie: bool) -> dict[str, Any]:
    return hf_reference(tiny_hf(kind, tie=tie))


def name(case: tuple[Any, ...]) -> str:
    n, kind, tie, parallel, opt, other = case
    layout = "".join(
        f"{k if k != 'sequence_parallel' else 'sp'}{int(v)}" for k, v in parallel.items()
    )
    extras = "-".join(["zero"] * bool(opt) + list(other))
    return f"{n}-{kind}-{'tied' if tie else 'untied'}-{layout or 'dp'}-{extras}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_engine_equals_hugging_face(case, worlds, models):
    n, kind, tie, parallel, opt, other = case
    ranks = worlds(n).run(
        run_all, save_model(models, kind, tie), parallel,
        optimizer={"distributed": False, **opt}, **other,
    )  # fmt: skip
    got, want = ranks[0], reference(kind, tie)

    for key, value in want["outputs"].items():
        torch.testing.assert_close(got["outputs"][key], value, rtol=0, atol=1e-4, msg=key)
    for key in ("loss", "entropy"):
        assert got["stats"][key] == pytest.approx(want[key], abs=1e-4), key
        assert got["eval"][key] == pytest.approx(want[key], abs=1e-4), key
    assert got["stats"]["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    assert got["stats"]["update_successful"] == 1.0
    if not opt:
        assert got["grads"].keys() == want["grads"].keys()
        for key, value in want["grads"].items():
            assert (got["grads"][key] - value).norm() <= 1e-4 * value.norm(), key
    assert got["weights"].keys() == want["weights"].keys()
    for key, value in want["weights"].items():
        torch.testing.assert_close(got["weights"][key], value, rtol=0, atol=2e-6, msg=key)

    for other_rank in ranks[1:]:  # results reach every rank
        assert other_rank["stats"] == got["stats"] and other_rank["eval"] == got["eval"]
        for key, value in got["outputs"].items():
            assert torch.equal(other_rank["outputs"][key], value), key


@pytest.mark.parametrize("parallel", [dict(), SP, dict(pp=2)], ids=["dp2", "sp2", "pp2"])
def test_the_step_does_not_depend_on_micro_batching(parallel, worlds, models):
    path = save_model(models, "qwen3", True)
    one, *others = (
        worlds(2).run(run_all, path, parallel, max_tokens=budget)[0] for budget in (10**6, 33, 1)
    )
    for other in others:
        assert other["stats"]["loss"] == pytest.approx(one["stats"]["loss"], rel=1e-6)
        for key, value in one["weights"].items():
            torch.testing.assert_close(other["weights"][key], value, rtol=0, atol=1e-6, msg=key)
