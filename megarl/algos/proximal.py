"""Says where the proximal policy's logprobs come from: a pass before the update, or the update.

Where a step makes one update, the weights of its own pass are the weights at the start of the step.
So a pass that computes prox_logp beforehand computes the same numbers twice, unless something reads
them, or what comes with them, before the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megarl.algos.rows import Data
from megarl.algos.specs import AdvantageSpec, LossSpec
from megarl.api.batch import Padded
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
    if PROX in advantages.reads:
        return f"actor.advantages={config.advantages.type} reads prox_logp"
    if config.moe.router_replay == "trainer":
        return "actor.moe.router_replay=trainer: the pass records the routes"
    named = f"actor.loss={config.loss.type}"
    if not loss.own_prox:
        return f"{named} does not say that its own pass may give it prox_logp (LossSpec.own_prox)"
    if loss.pick is not None:
        return f"{named} picks tokens of the whole batch by prox_logp"
    if missing := [name for name in ("logprobs", *also) if name not in loss.outputs]:
        return f"{named} has no {', '.join(missing)} among its outputs"
    return ""


def need_routes(config: PPOActorConfig, batch: Data) -> None:
    """Raises ValueError where the batch lacks the routes of the rollout that are to be replayed."""
    if config.moe.router_replay == "rollout" and "routed_experts" not in batch:
        raise ValueError(
            "moe.router_replay=rollout: the batch has no 'routed_experts'; have the client ask "
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
