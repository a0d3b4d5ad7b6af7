"""`megarl gap` over several processes: what the parts of every layer put out is the same in every
layout, and is transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.cli.gap import Sample
from megarl.cli.gap.compare import CHOICE, Parts, by_transformers, load_model, trained
from megarl.models.hf_config import read_hf_config
from tests.dist.engine_jobs import SP, make_engine, save_model
from tests.tiny import VOCAB

LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "qwen2": [dict(tp=2), SP, dict(pp=2, vpp=2), dict(cp=2)],
    "qwen3_moe": [dict(pp=2), dict(ep=2)],
    "qwen3_5_text": [dict(tp=2)],
    "minimax_m2": [dict(ep=2)],
}


def samples() -> list[Sample]:
    g = torch.Generator().manual_seed(1)
    return [Sample(torch.randint(3, VOCAB, (n,), generator=g).tolist(), n // 2) for n in (9, 21, 4)]


def run_layouts(path: str, layouts: list[dict[str, Any]]) -> list[Parts]:
    found = []
    for parallel in layouts:
        engine = make_engine(path, parallel, trained=False, max_tokens=16)  # several micro-batches
        found.append(trained(engine, samples()))
        engine.destroy()
    return found


@pytest.mark.parametrize("kind", LAYOUTS)
def test_parts_are_transformers_in_every_layout(world2, models, kind):
    path = save_model(models, kind, tie=False)
    model = load_model(path, torch.float32)
    experts = read_hf_config(path).moe
    for ranks in zip(*world2.run(run_layouts, path, LAYOUTS[kind]), strict=True):
        for run in ranks:  # every rank knows all of it
            want = by_transformers(model, samples(), run, experts)
            assert run.keys() == want.keys()
            for part, values in want.items():
                error = (run[part] - values).norm() / values.norm()
                assert error < (1e-9 if part.name == CHOICE else 1e-5), (part, float(error))
