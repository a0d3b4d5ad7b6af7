"""Says where the proximal policy's logprobs come from: a pass before the update, the update, or the
versions of the tokens.

Where a step makes one update, the weights of its own pass are the weights at the start of the step.
So a pass that computes prox_logp beforehand computes the same numbers twice, unless something reads
them, or what comes with them, before the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.algos.rows import Data, map_tokens
from megarl.algos.specs import AdvantageSpec, LossSpec
from megarl.api.batch import Batch, Padded, Tokens
from megarl.api.engine import LossFn, Metrics
from megarl.config.algo import PPOActorConfig

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


def shares_of_policy(batch: Batch, version: int) -> Tokens:
    """Returns `staleness_share` of the batch's tokens, [T] of the held rows."""
    return map_tokens(batch, lambda part: staleness_share(part["versions"], version), ["versions"])


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


def put_kept(batch: Data, update: dict[str, float]) -> None:
    """Adds to the batch what its only update kept, the logprobs as prox_logp. An update that was
    refused before its pass kept nothing."""
    kept = update.kept if isinstance(update, Metrics) else {}
    for name, values in kept.items():
        batch[PROX if name == "logprobs" else name] = values
