"""bfloat16: the engine is as close to fp32 as Hugging Face's own bfloat16 is.

Weights are bfloat16 numbers on all sides, so that only arithmetic differs. An error is the norm of
the difference / the norm of the fp32 value, over all log-probabilities or all gradients of the
model. Roundings are chance, so the bound holds for the mean over SEEDS.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.engine_jobs import Tensors, batch, make_engine, state
from tests.dist.losses import LOSSES
from tests.dist.reference import hf_steps
from tests.tiny import tiny_hf

SEEDS = (0, 1, 2)
FACTOR = 1.5
SHAPE = dict(hidden_size=128, intermediate_size=256, layers=4)
LOSS = LOSSES["policy"]
# (family, parallel) of two processes
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("qwen3", dict(tp=2, sequence_parallel=True)),
    ("llama", dict(cp=2)),
    ("qwen3_5_text", dict(tp=2, sequence_parallel=True)),
]


def flat(tensors: Tensors) -> torch.Tensor:
    return torch.cat([t.float().flatten() for _, t in sorted(tensors.items())])


def hf(kind: str, seed: int, dtype: torch.dtype) -> Any:
    return tiny_hf(kind, seed=seed, dtype=torch.bfloat16, **SHAPE).to(dtype)


def hf_figures(kind: str, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns Hugging Face's (log-probabilities, gradients)."""
    steps = hf_steps(hf(kind, seed, dtype), batch(), LOSS)
    return steps["outputs"]["logprobs"], flat(steps["grads"])


def engine_figures(
    root: str, parallel: dict[str, Any], **over: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the engine's, for each of the models in `root`; gradients are on rank 0 only."""
    figures = []
    for path in sorted(Path(root).iterdir()):
        engine = make_engine(
            str(path), parallel, dtype="bfloat16", optimizer={"distributed": False}, **over
        )
        logp = engine.forward(batch(), temperature=LOSS.temperature)
        engine.train_batch(batch(), LOSS.fn, LOSS.weight, **LOSS.kw)
        grads = state(engine, grads=True)
        engine.destroy()
        figures.append((logp, flat(grads) if grads else torch.empty(0)))
    return figures


def save_models(root: Path, kind: str) -> str:
    for seed in SEEDS:
        hf(kind, seed, torch.bfloat16).save_pretrained(root / str(seed))
    return str(root)


def check(kind: str, got: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    exact = [hf_figures(kind, seed, torch.float32) for seed in SEEDS]
    rounded = [hf_figures(kind, seed, torch.bfloat16) for seed in SEEDS]
    for k, what in enumerate(("logprobs", "gradients")):
        ours, theirs = (
            sum(float((s[k] - e[k]).norm() / e[k].norm()) for s, e in zip(side, exact))
            for side in (got, rounded)
        )
        assert 0 < ours <= FACTOR * theirs, (what, ours / theirs)


@pytest.mark.parametrize(("kind", "parallel"), CASES, ids=str)
def test_bf16_is_as_close_to_fp32_as_hugging_face(kind, parallel, world2, tmp_path):
    check(kind, world2.run(engine_figures, save_models(tmp_path, kind), parallel)[0])
