"""An engine that computes shared prefixes once is Hugging Face's model trained by torch's AdamW on
every token of every sequence, within the invariance suite's tolerances (see invariance.py)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.parallel.trie import build_trie
from tests.dist.engine_jobs import Tensors, loss_fn, make_engine, weight_fn
from tests.dist.invariance import FAMILIES, LAYOUTS, check, train
from tests.dist.losses import LOSSES
from tests.dist.reference import hf_model, hf_outputs, hf_steps
from tests.tiny import VOCAB, save_hf

# (family, layout, loss, budget of a micro-batch in tokens, settings); the trie has 50 of 93 tokens
CASES: dict[str, tuple[str, str, str, int, dict[str, Any]]] = {
    "one": ("qwen3", "dp1", "policy", 10**6, {}),
    "cut": ("llama", "dp1", "gspo", 20, dict(recompute_granularity="full")),
    "value": ("qwen3", "tp2sp", "critic", 30, {}),
    "tp2": ("llama", "tp2", "policy", 30, dict(recompute_granularity="selective")),
    "tp2sp": ("qwen3", "tp2sp", "policy", 10**6, {}),
    "pp2": ("qwen3", "pp2", "policy", 20, {}),
    "pp2vpp2": ("glm4", "pp2vpp2", "reward", 30, {}),
    "dp2": ("llama", "dp2", "dpo", 10**6, {}),
    "dp2cut": ("qwen3", "dp2", "policy", 20, {}),
}


def ragged(rows: list[list[int]]) -> Tensors:
    width = max(map(len, rows))
    ids = torch.tensor([[*r, *[0] * (width - len(r))] for r in rows])
    mask = torch.arange(width) < torch.tensor([len(r) for r in rows])[:, None]
    return {"input_ids": ids, "attention_mask": mask}


def sequences() -> list[list[int]]:
    """Returns pairs of sequences that share a prompt, or the turns before the last; one goes on
    where another ends, and one comes twice."""
    g = torch.Generator().manual_seed(3)

    def new(n: int) -> list[int]:
        return torch.randint(3, VOCAB, (n,), generator=g).tolist()

    first, second = new(8), new(5)
    turn = second + new(4)
    last = turn + new(3)
    return [
        first + new(4), last + new(2), first + new(6), first + new(5), turn + new(4),
        last, second + new(3), first + new(2), last,
    ][:8]  # fmt: skip


def batch(model: Any) -> Tensors:
    b = ragged(sequences())
    g = torch.Generator().manual_seed(5)
    shape = b["input_ids"].shape
    t = torch.arange(shape[1])
    b["loss_mask"] = b["attention_mask"] & (t >= 3)
    b["advantages"] = torch.linspace(-1.0, 1.5, len(shape) * 4)[: shape[0]]
    b["group_ids"] = torch.tensor([4, 0, 9, 9, 0, 7, 7, 4])
    b["chosen"] = torch.tensor([True, True, True, False, False, False, True, False])
    b["values"], b["returns"] = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    if not hasattr(model, "score"):
        with torch.no_grad():
            logp = hf_outputs(model, b)["logprobs"]
        b["old_logp"] = b["ref_logp"] = logp + 0.1 * torch.randn(shape, generator=g)
    return b


@cache
def reference(family: str, loss: str) -> tuple[Any, Tensors, dict[str, Any]]:
    model = hf_model(family, tie=False, head=LOSSES[loss].head, **FAMILIES[family])
    return model, b, hf_steps(model, b := batch(model), LOSSES[loss])


@pytest.mark.parametrize("name", CASES)
def test_training_on_a_trie_equals_training_on_its_sequences(name, worlds, tmp_path):
    family, layout, loss, budget, settings = CASES[name]
    model = hf_model(family, tie=False, head=LOSSES[loss].head, **FAMILIES[family])
    b = batch(model)
    save_hf(model, tmp_path, family)
    want = hf_steps(model, b, LOSSES[loss])
    processes, parallel = LAYOUTS[layout]
    got = worlds(processes).run(
        train, str(tmp_path), parallel, loss, b, max_tokens=budget, head=LOSSES[loss].head,
        share_prefixes=True, **settings,
    )  # fmt: skip
    check(got, want)
