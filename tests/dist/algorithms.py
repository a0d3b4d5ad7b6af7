"""Every surrogate by every mean, and every preset, on an engine: what test_roles.py compares across
layouts, and between batches with and without samples that failed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megarl.algos import LOSS_WEIGHTS, Actor, PolicyLoss
from megarl.algos.specs import loss_of
from megarl.api.batch import Batch
from megarl.config.algo import PPOActorConfig
from tests.dist.engine_jobs import Tensors, make_engine, state
from tests.dist.invariance import gather_gradients
from tests.unit.presets import NAMES, preset

# a step of this size changes no weight: all gradients are of one point
STILL: dict[str, Any] = dict(optimizer=dict(lr=1e-30, weight_decay=0.0))


def losses() -> Iterator[tuple[str, PolicyLoss]]:
    """Yields every surrogate by every mean, and the clip by the ratios of sequences."""
    for name in ("clip", "cispo", "sapo", "gmpo", "topr", "unclipped", "log_likelihood"):
        config = PPOActorConfig(eps_clip=0.05, eps_clip_higher=0.08)
        config.surrogate.type = name
        loss = replace(loss_of(config).fn, old_logp="prox_logp", kl_coef=0.1, entropy_coef=0.01)
        for agg in LOSS_WEIGHTS:
            yield f"{name} {agg}", replace(loss, loss_agg=agg)
        for ratio in ("sequence", "sequence-token") if name == "clip" else ():
            yield f"{name} {ratio}", replace(loss, ratio=ratio, loss_agg="sequence-mean")


def near_logps(path: str, b: Tensors) -> Tensors:
    """Returns the batch with policies near the model's, and what the means divide by."""
    engine = make_engine(path, {}, trained=False)
    logp = engine.forward({k: b[k] for k in ("input_ids", "attention_mask")}, temperature=1.0)
    engine.destroy()
    g, mask = torch.Generator().manual_seed(11), b["loss_mask"]
    for name in ("logprobs", "prox_logp", "ref_logp"):
        b[name] = (logp + 0.1 * torch.randn(logp.shape, generator=g)) * mask
    n = len(mask)
    b["advantages"] = torch.linspace(-1.0, 1.5, n)[:, None] * mask
    b["rollout_tokens"] = mask.sum(1)
    b["batch_share"] = torch.full((n,), 1.0 / n, dtype=torch.float64)
    return b


def gradients(path: str, parallel: dict[str, Any], b: Tensors, tokens: int) -> dict[str, Any]:
    """Returns on rank 0 every loss's value and the gradient of all weights, in micro-batches of at
    most `tokens` tokens."""
    engine = make_engine(path, parallel, max_tokens=tokens, **STILL)
    found = {}
    for name, loss in losses():
        weight = LOSS_WEIGHTS[loss.loss_agg]
        stats = engine.train_batch(b, loss, weight, outputs=("logprobs", "entropy"))
        gather_gradients(engine)
        found[name] = {"loss": stats["loss"], "grads": state(engine, grads=True)}
    engine.destroy()
    return found if dist.get_rank() == 0 else {}


def presets_in_turn(path: str, parts: list[Tensors]) -> dict[str, Any]:
    """Makes one update by every preset, one after the other, on the episodes `parts`, which may
    have failed samples; returns the metrics of all, and the weights at the end."""
    from megarl.rollout.episode import without_failed

    engine, stats = make_engine(path, {}), {}
    for name in NAMES:
        config = replace(preset(name), ppo_n_minibatches=1, logp_gap_warn=100.0)
        actor = Actor(config, engine, temperature=1.0)
        kept = [without_failed(dict(part))[0] for part in parts]
        batch = Batch.from_local(kept if dist.get_rank() == 0 else None)
        actor.compute_prox_logp(batch)
        actor.compute_advantages(batch)
        stats[name] = actor.ppo_update(batch)
    made = {"stats": stats, "weights": state(engine)}
    engine.destroy()
    return made
