"""MegatronEngine on one GPU over NCCL: `make test-gpu`. The CPU suite's reference, its bounds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.dist.engine_jobs import TEMPERATURE, batch, hf_reference, make_engine, run_all
from tests.dist.test_checkpoint import BF16, PLAIN, VERSION, ZERO, resume
from tests.tiny import KINDS, MOE_KINDS, save_tiny, tiny_hf

ATTENTION = ["sdpa"] + (["te"] if importlib.util.find_spec("transformer_engine") else [])
LOGPROB_BOUND = 5e-4  # fp32 with TF32 off; kernels sum in another order than the CPU's
NORM_RATIO = 5e-4


@pytest.fixture(autouse=True, scope="module")
def a_gpu():
    assert torch.cuda.is_available(), "tests/gpu needs a GPU; `make test` is the CPU suite"
    torch.backends.cuda.matmul.allow_tf32 = False


def norm_ratio(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.cpu() - want).norm() / (want.norm() + 1e-12))


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("kind", KINDS + MOE_KINDS)
def test_fp32_equals_hugging_face(kind, attention, tmp_path: Path):
    path = str(save_tiny(tmp_path / kind, kind))
    want = hf_reference(tiny_hf(kind))
    got = run_all(path, {}, dtype="float32", attention=attention, optimizer={"distributed": False})
    for name in ("logprobs", "entropy"):
        error = (got["outputs"][name] - want["outputs"][name]).abs().max()
        assert error < LOGPROB_BOUND, name
    assert abs(got["stats"]["loss"] - want["loss"]) < 1e-3 * abs(want["loss"]) + 1e-5
    for name, gradient in want["grads"].items():
        assert norm_ratio(got["grads"][name], gradient) < NORM_RATIO, name


@pytest.mark.parametrize("attention", ATTENTION)
def test_bf16_is_as_close_to_fp32_as_hugging_face_is(attention, tmp_path: Path):
    path = str(save_tiny(tmp_path / "m", "qwen3"))
    exact = hf_reference(tiny_hf("qwen3"))["outputs"]["logprobs"]
    rounded = hf_reference(tiny_hf("qwen3", dtype=torch.bfloat16))["outputs"]["logprobs"]
    engine = make_engine(path, {}, trained=False, dtype="bfloat16", attention=attention)
    got = engine.forward(batch(), temperature=TEMPERATURE)
    engine.destroy()
    assert (got - exact).abs().mean() <= 1.5 * (rounded - exact).abs().mean()


def test_offload_returns_memory_and_brings_it_back(tmp_path: Path):
    path = str(save_tiny(tmp_path / "m", "qwen3", hidden_size=512, intermediate_size=2048))
    engine = make_engine(path, {}, dtype="bfloat16")
    before = engine.forward(batch())
    held = torch.cuda.memory_allocated()
    engine.offload()
    parked = torch.cuda.memory_allocated()
    engine.onload()
    assert parked < 0.5 * held
    assert torch.equal(engine.forward(batch()), before)
    engine.destroy()


@pytest.mark.parametrize("over", [ZERO, PLAIN, BF16, BF16 | PLAIN], ids=str)
def test_training_resumes_from_a_checkpoint(over, tmp_path: Path):
    """State and random states bitwise; steps to what atomics in GPU kernels leave open."""
    r = resume(str(save_tiny(tmp_path / "m", "qwen3")), str(tmp_path / "ck"), {}, over)
    assert r["at_load"] == [] and r["draws"][0] == r["draws"][1] and r["version"] == VERSION
    for want, got in zip(*r["figures"], strict=True):
        assert got == pytest.approx(want, rel=1e-2 if "dtype" in over else 1e-4, abs=1e-4)
