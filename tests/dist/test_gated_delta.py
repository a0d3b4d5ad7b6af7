"""Gated delta networks between ranks: what packed sequences know of each other, and the gradient
that megatron-core leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.algos.losses import sequence_weight
from tests.dist import invariance as inv
from tests.dist.engine_jobs import Parallel, Tensors, make_engine, state


def one_sequence(outputs: Tensors, b: Tensors) -> tuple[torch.Tensor, dict[str, Any]]:
    return (outputs["logprobs"] * b["loss_mask"] * b["advantages"][:, None]).sum(), {}


def run(path: str, parallel: Parallel, batches: list[Tensors]) -> list[tuple[Any, Tensors]]:
    """Returns log-probabilities and, on rank 0, gradients for each of the batches."""
    found = []
    for b in batches:
        engine = make_engine(path, parallel, max_tokens=10**6, optimizer={"distributed": False})
        logp = engine.forward(b, temperature=1.0)
        engine.backward_batch(b, one_sequence, sequence_weight, outputs=("logprobs",))
        found.append((logp, state(engine, grads=True)))
        engine.destroy()
    return found


@pytest.mark.parametrize("parallel", [{}, dict(cp=2)], ids=str)
def test_a_sequence_does_not_see_those_it_is_packed_with(worlds, tmp_path, parallel):
    """To the bit: the others have other tokens, as many of them, and no part in the loss."""
    case = inv.Case(family="qwen3_5_text", loss="policy")
    b, _ = inv.reference(case.family, case.tie, case.loss)
    mine = torch.arange(len(b["input_ids"])) == 2
    b = {**b, "advantages": mine.float()}
    tokens = torch.where(mine[:, None], b["input_ids"], 3 + b["input_ids"] % 100)
    path, world = inv.save(tmp_path, case), worlds(2 if parallel else 1)
    (logp, grads), (again, same) = world.run(run, path, parallel, [b, {**b, "input_ids": tokens}])[
        0
    ]
    assert torch.equal(logp[mine], again[mine]) and not torch.equal(logp[~mine], again[~mine])
    layers = [n for n in grads if "linear_attn" in n]
    assert len(layers) == 18 and all(grads[n].any() for n in layers)
    assert all(torch.equal(grads[n], same[n]) for n in layers)


def test_every_rank_adds_its_heads_to_the_norms_gradient(worlds, tmp_path):
    """Without sequence parallelism megatron-core 0.19.2 trains this norm by each rank's own heads
    (0.87 of the gradient's norm away), and 0.16.1 gives ranks that share a key/value head the gates
    of all its heads, which does not run."""
    case = inv.Case(family="qwen3_5_text", layout="tp2", loss="policy", zero=False)
    b, want = inv.reference(case.family, case.tie, case.loss)
    path = inv.save(tmp_path, case)
    ranks = worlds(2).run(inv.train, path, case.parallel, case.loss, b, **case.settings())
    inv.check(ranks, want)
    norm = "model.layers.0.linear_attn.norm.weight"
    a, z = ranks[0]["grads"][norm], want["grads"][norm]
    assert float((a - z).norm() / z.norm()) < 1e-5
