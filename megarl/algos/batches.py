"""A step's batch: its cut into mini-batches, the fields that a step needs, and where the proximal
policy's logprobs come from: a pass before the update, the update, or the versions of the tokens.

Where a step makes one update, the weights of its own pass are the weights at the start of the step.
So a pass that computes prox_logp beforehand computes the same numbers twice, unless something reads
them, or what comes with them, before the update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.algos.checks import some
from megarl.algos.rows import Data, as_batch, map_tokens, put, rollouts_of, select_rows
from megarl.algos.specs import AdvantageSpec, LossSpec
from megarl.api.batch import Padded
from megarl.api.engine import LossFn
from megarl.config.algo import PPOActorConfig


def minibatches(
    data: Data, names: Sequence[str], parts: Sequence[list[int]], trained: Tensor
) -> Iterator[tuple[list[int], Data]]:
    """Yields (rows, their fields `names`) of those `parts` that have something to train on:
    elsewhere the gradient is zero, and so is its denominator. `trained` [B]: trained tokens of
    every row. Raises ValueError if there are none."""
    if not trained.any():
        named = some((trained == 0).nonzero().flatten().tolist())
        raise ValueError(f"ppo_update: loss_mask marks no token in the whole batch (rows {named})")
    for rows in parts:
        if trained[rows].any():
            yield rows, select_rows(data, rows, names)


def batch_shares(parts: Sequence[list[int]], trained: Tensor) -> Tensor:
    """Returns [B] float64: of the rows of each mini-batch that have something to train on equal
    shares that add up to 1, of the others 0."""
    shares = torch.zeros(len(trained), dtype=torch.float64)
    for rows in parts:
        telling = (trained[rows] > 0).double()
        shares[rows] = telling / telling.sum().clamp(min=1)
    return shares


def skipped_metrics(trained: Tensor, skipped: Tensor) -> dict[str, float]:
    """Counts what was not trained on: `skipped` [B] bool rows, and their `trained` tokens [B]."""
    return {
        "skipped_sequences": float(skipped.sum()),
        "skipped_tokens": float(trained[skipped].sum()),
    }


def counts_of_one(stats: dict[str, float], trained: Tensor) -> dict[str, float]:
    """Returns skipped_updates and skipped_metrics of the one update of a step, made on rows of so
    many `trained` tokens [B]; stats: its metrics."""
    skipped = not stats["update_successful"]
    counts = {"skipped_updates": float(skipped)}
    return counts | skipped_metrics(trained, torch.full((len(trained),), skipped))


def mean_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Returns the means over the optimizer steps that were made, and the numbers of steps made and
    skipped. Of lr it is the last value. A step counts for a mean by its weight where the step has
    one (`Metrics`), else like every other; NaN is what has no weight in any step."""
    done = [u for u in updates if u["update_successful"]]
    counts = {
        "n_updates": float(len(done)),
        "skipped_updates": float(len(updates) - len(done)),
        "update_successful": len(done) / len(updates),
    }
    if not done:
        return counts
    stats = {}
    for name in dict.fromkeys(name for update in done for name in update):
        having = [u for u in done if name in u]  # a loss may give it for some mini-batches alone
        pairs = [(u[name], getattr(u, "weights", {}).get(name, 1.0)) for u in having]
        total = sum(weight for _, weight in pairs)
        mean = sum(value * weight for value, weight in pairs if weight) / (total or math.nan)
        stats[name] = pairs[-1][0] if name == "lr" else mean
    return stats | counts


PROX = "prox_logp"
# the same numbers, of a pass that is made for the self checks of the first update alone
CHECK = "check_logp"


def reason_for_pass(
    config: PPOActorConfig,
    loss: LossSpec,
    advantages: AdvantageSpec,
    *,
    kl_ctl: float = 0.0,
    also: Sequence[str] = (),
) -> str:
    """Returns why prox_logp needs a pass of its own before the update, "" where it needs none.

    kl_ctl: weight of the KL in the reward. also: outputs that are wanted beside the logprobs.
    """
    if config.recompute_logprob == "true":
        return "actor.recompute_logprob=true"
    if config.ppo_n_minibatches > 1:
        n = config.ppo_n_minibatches
        return f"actor.ppo_n_minibatches={n}: later updates start from the policy before the first"
    if kl_ctl:
        return f"kl_ctl={kl_ctl:g}: the KL in the reward reads prox_logp"
    if config.kl_controller is not None:
        return "actor.kl_controller reads prox_logp"
    if PROX in advantages.reads:
        return f"actor.advantages={config.advantages.type} reads prox_logp"
    if config.router_replay == "trainer":
        return "actor.router_replay=trainer: the pass records the routes"
    named = f"actor.loss={config.loss.type}"
    if not loss.own_prox:
        return f"{named} does not say that its own pass may give it prox_logp (LossSpec.own_prox)"
    if missing := [name for name in ("logprobs", *also) if name not in loss.outputs]:
        return f"{named} has no {', '.join(missing)} among its outputs"
    return ""


def interpolated(logp: Tensor, behaviour: Tensor, share: Tensor) -> Tensor:
    """Returns logprobs of the proximal policy taken to lie between the policy that wrote a token
    and the one that trains, behaviour + share (logp - behaviour), without gradient, any shape
    (A-3PO, arXiv 2512.06547): a pass of its own is left out.

    >>> logp, behaviour = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-2.0, -2.0, -2.0])
    >>> interpolated(logp, behaviour, staleness_share(torch.tensor([5, 4, 2]), 5)).tolist()
    [-2.0, -1.5, -1.25]
    """
    return behaviour + share * (logp.detach() - behaviour)


def staleness_share(versions: Tensor, version: int) -> Tensor:
    """Returns s / (s + 1) of each token of staleness s, 0 where none was written (version -1), any
    shape, float32: the policy that trains is on its way from `version` to the next one, s + 1
    versions from the token, and the proximal policy is the one at `version`."""
    staleness = torch.where(versions >= 0, version - versions, 0).clamp(min=0).float()
    return staleness / (staleness + 1.0)


def need_routes(config: PPOActorConfig, batch: Data) -> None:
    """Raises ValueError where the batch lacks the routes of the rollout that are to be replayed."""
    if config.router_replay == "rollout" and "routed_experts" not in batch:
        raise ValueError(
            "router_replay=rollout: the batch has no 'routed_experts'; have the client ask "
            "for them (client.record_routes), and the workflow return what to_batch makes"
        )


def takes_own_prox(config: PPOActorConfig, batch: Data, reason: str) -> bool:
    """Returns whether an update is to take prox_logp from its own pass: with `auto`, where the
    batch lacks it. Raises ValueError where there is a `reason` against that."""
    if config.recompute_logprob != "auto" or PROX in batch:
        return False
    if reason:
        raise ValueError(
            f"ppo_update: the batch has no {PROX!r}: call actor.compute_prox_logp(batch) first "
            f"({reason})"
        )
    return True


def with_own_prox(loss_fn: LossFn) -> LossFn:
    """Returns `loss_fn` given the pass's own logprobs [b,S], without gradient, as prox_logp."""

    def own(outputs: Padded, batch: Padded) -> tuple[Tensor, dict[str, tuple[Any, Any]]]:
        return loss_fn(outputs, {**batch, PROX: outputs["logprobs"].detach()})

    return own


# what an update adds for a loss that needs it: rollout_tokens [B], the trained tokens of each row's
# rollout; batch_share [B], the row's share of its mini-batch; kl_scale [B], the factor of
# kl_controller; prox_share [B,S], see interpolated
MADE = ("rollout_tokens", "batch_share", "kl_scale", "prox_share")

# what a teacher adds to a batch
TAUGHT = ("given_ids", "teacher_logprobs", "teacher_tail", "teacher_logp")

_HINTS = {
    "prox_logp": "actor.compute_prox_logp(batch) (recompute_logprob is on)",
    "routed_experts": "actor.compute_prox_logp(batch) (router_replay is on)",
    "ref_logp": "batch['ref_logp'] = ref.compute_logp(batch) (kl_coef is not 0)",
    "advantages": "actor.compute_advantages(batch)",
    "values": "critic.compute_values(batch)",
    **dict.fromkeys(TAUGHT, "teacher.teach(batch)"),
}


def need(batch: Data, keys: Sequence[str], *, what: str = "ppo_update") -> None:
    """Raises ValueError, naming what makes it, for one of `keys` that the batch lacks."""
    for key in keys:
        if key not in batch and key != "attention_mask":  # a Batch has lengths instead
            hint = f": call {_HINTS[key]} first" if key in _HINTS else ""
            raise ValueError(f"{what}: the batch has no {key!r}{hint}")


def shaped(made: Tensor, shape: tuple[int, ...], who: str, why: str) -> None:
    """Raises ValueError for a tensor of another shape than `who` has to give."""
    if made.shape != shape:
        raise ValueError(
            f"{who} gave a tensor of shape {tuple(made.shape)}; it must be {list(shape)}, {why}"
        )


def add_made(
    batch: Data,
    keys: Sequence[str],
    parts: Sequence[list[int]],
    trained: Tensor,
    *,
    kl_scale: float,
    version: int,
) -> None:
    """Adds those of MADE that are among `keys`.

    parts: rows of each mini-batch. trained [B]: trained tokens of every row. version: of the
    weights before the update. Collective."""
    whole = as_batch(batch)
    if "rollout_tokens" in keys:
        rollouts = rollouts_of(whole)
        batch["rollout_tokens"] = rollouts.spread(rollouts.sums(trained)).long()
    if "kl_scale" in keys:
        batch["kl_scale"] = torch.full((len(whole),), kl_scale)
    if "batch_share" in keys:
        batch["batch_share"] = batch_shares(parts, trained)
    if "prox_share" in keys:
        need(batch, ["versions"])
        shares = map_tokens(whole, lambda t: staleness_share(t["versions"], version), ["versions"])
        put(batch, "prox_share", shares)
