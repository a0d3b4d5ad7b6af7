"""MegatronEngine on one GPU over NCCL: memory and checkpoints (`make test-gpu`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist.engine_jobs import batch, make_engine
from tests.dist.test_checkpoint import (
    BF16,
    PLAIN,
    VERSION,
    ZERO,
    differing,
    dist_meta,
    engine_for,
    local_tensors,
    resume,
    train,
)
from tests.tiny import save_tiny


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


@pytest.mark.parametrize("over", [ZERO, PLAIN, BF16], ids=str)
def test_a_checkpoint_is_written_behind_the_training(over, tmp_path: Path):
    """It holds what was there when it began, from pinned memory."""
    engine = engine_for(str(save_tiny(tmp_path / "m", "qwen3")), {}, over)
    train(engine, 1)
    saved = local_tensors(engine)
    pending = engine.begin_save(dist_meta(tmp_path / "ck"))
    train(engine, 2)
    pending.finish()
    assert differing(saved, local_tensors(engine))
    engine.load(dist_meta(tmp_path / "ck"))
    assert differing(saved, local_tensors(engine)) == []
    engine.destroy()
