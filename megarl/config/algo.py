"""Defines the algorithm settings of the actor and the critic."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.base import SeamConfig, arg, seam
from megarl.config.bounds import NOT_NEGATIVE, POSITIVE, Bounds
from megarl.config.engine import TrainEngineConfig


@dataclass(kw_only=True)
class PPOActorConfig(TrainEngineConfig):
    """Configures the policy that trains: its engine, loss, advantages and rewards."""

    loss: SeamConfig = seam(
        "grpo", help="what an update minimises: a function of this section that makes a LossSpec"
    )
    advantages: SeamConfig = seam(
        "group",
        help="how rewards become advantages where there is no critic: a function of this section "
        "that makes an AdvantageSpec; group: the samples of a prompt compared (adv_norm)",
    )
    ppo_n_minibatches: int = arg(1, bounds=POSITIVE, help="optimizer steps per training batch")
    eps_clip: float = arg(0.2, bounds=Bounds(gt=0, lt=1), help="lower clip: ratio >= 1 - eps_clip")
    eps_clip_higher: float | None = arg(
        None,
        bounds=POSITIVE,
        help="upper clip: ratio <= 1 + this; null is eps_clip (DAPO's clip-higher)",
    )
    c_clip: float | None = arg(
        None, bounds=Bounds(gt=1), help="dual clip for negative advantages, > 1; null is off"
    )
    adv_norm: str = arg(
        "group",
        help="group: GRPO, group mean and std; group_mean: Dr. GRPO, group mean only; batch: mean "
        "and std over the batch's trained tokens; none: as they are",
        choices=("group", "group_mean", "batch", "none"),
    )
    loss_agg: str = arg(
        "token-mean",
        help="mean over trained tokens, or over sequences, or over rollouts (which have several "
        "sequences where they fork), of their token means",
        choices=("token-mean", "sequence-mean", "rollout-mean"),
    )
    kl_coef: float = arg(
        0.0, bounds=NOT_NEGATIVE, help="weight of the KL to the reference added to the loss"
    )
    kl_estimator: str = arg("k3", help="KL estimator", choices=("k1", "k2", "k3"))
    recompute_logprob: bool = arg(
        True, help="recompute logprobs with the trainer's weights before the update (prox_logp)"
    )
    use_decoupled_loss: bool = arg(
        False, help="clip against prox_logp and weight by exp(prox - behaviour) (AReaL)"
    )
    behav_imp_weight_cap: float | None = arg(
        None,
        bounds=POSITIVE,
        help="drop tokens whose behaviour importance weight exceeds this; null is off",
    )
    reward_scaling: float = arg(
        1.0, bounds=Bounds(gt=0, le=1e6), help="rewards are (r + bias) * scaling, then clipped"
    )
    reward_bias: float = arg(0.0, bounds=Bounds(ge=-1e6, le=1e6), help="added to every reward")
    reward_clip: float = arg(20.0, bounds=POSITIVE, help="bound of |reward|")
    dynamic_sampling: bool = arg(
        False, help="reject groups whose rewards are all equal (DAPO), prompts are replaced"
    )
    logp_gap_warn: float = arg(
        0.1,
        bounds=POSITIVE,
        help="warn when the largest |trainer - server| logprob gap exceeds this",
    )

    @property
    def old_logp(self) -> str:
        """Returns the name of the batch field [B,S] that holds the old logprobs of the ratio."""
        return "prox_logp" if self.recompute_logprob else "logprobs"


@dataclass(kw_only=True)
class ValueModelConfig(TrainEngineConfig):
    """Configures a model with one value per token: a critic or a reward model."""

    head: str = arg("value", help="one value per token", choices=("value",))


@dataclass(kw_only=True)
class PPOCriticConfig(ValueModelConfig):
    """Configures the value function that trains beside the policy in PPO."""

    ppo_n_minibatches: int = arg(1, bounds=POSITIVE, help="optimizer steps per training batch")
    value_clip: float | None = arg(
        0.2,
        bounds=POSITIVE,
        help="values count as moved by at most this in a step (PPO2); null is off",
    )
    loss_agg: str = arg(
        "token-mean",
        help="mean over trained tokens, or over sequences of their token means",
        choices=("token-mean", "sequence-mean"),
    )
