"""Defines the algorithm settings of the actor and the critic."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.base import SeamConfig, arg, seam
from megarl.config.bounds import NOT_NEGATIVE, POSITIVE, TIMEOUT, Bounds
from megarl.config.engine import TrainEngineConfig
from megarl.utils.importing import is_import_path

# values of actor.advantages that are 0 where all rewards of a prompt's samples are equal
BY_GROUP = ("rloo", "opo", "pass_at_k", "max_at_k", "gpg")


@dataclass(kw_only=True)
class CorrectionConfig:
    """Configures how tokens of another policy, or of a server's rounding of this one, are weighed:
    w = exp(prox_logp - logprobs) of a token, its product over a sequence, or its geometric mean."""

    weight: str = arg(
        "token",
        help="what multiplies a token's loss: its w, the product or the geometric mean of its "
        "sequence, or nothing",
        choices=("token", "sequence", "geometric", "none"),
    )
    weight_cap: float | None = arg(
        None, bounds=POSITIVE, help="largest weight (truncated importance sampling); null is none"
    )
    mask: str = arg(
        "none",
        help="what is dropped outside mask_low and mask_high: a token by its w; a sequence by the "
        "product of its w, or by their geometric mean",
        choices=("none", "token", "sequence", "geometric"),
    )
    mask_low: float = arg(0.0, bounds=NOT_NEGATIVE, help="smallest w that stays")
    mask_high: float | None = arg(None, bounds=POSITIVE, help="largest w that stays; null is any")
    veto: float = arg(
        0.0,
        bounds=Bounds(ge=0, lt=1),
        help="drop a sequence of which one token has w below this; 0 is off",
    )


@dataclass(kw_only=True)
class KLControllerConfig:
    """Configures how the weights of the KL to the reference follow it (Ziegler et al., arXiv
    1909.08593): after each step they are multiplied by 1 + e * (rollouts of the step / horizon), e
    = KL / target - 1, at most 0.2 in size."""

    target: float = arg(0.1, bounds=POSITIVE, help="KL to the reference that is aimed at, in nats")
    horizon: float = arg(
        10000.0, bounds=POSITIVE, help="rollouts in which a weight changes by at most a fifth"
    )
    per: str = arg(
        "token",
        help="the KL is the mean over trained tokens, or over rollouts of their sums, which grows "
        "with the answers",
        choices=("token", "rollout"),
    )


@dataclass(kw_only=True)
class PPOActorConfig(TrainEngineConfig):
    """Configures the policy that trains: its engine, loss, advantages and rewards."""

    loss: SeamConfig = seam(
        "policy",
        help="what an update minimises: a function of this section that makes a LossSpec; policy: "
        "ratio, surrogate, correction, KL and entropy, by the keys below",
    )
    ratio: str = arg(
        "token",
        help="importance ratio that the surrogate bounds: of a token; of its sequence, the "
        "geometric mean (GSPO); or that value with the token's own gradient (GSPO-token)",
        choices=("token", "sequence", "sequence-token"),
    )
    surrogate: SeamConfig = seam(
        "clip",
        help="what a token's loss is, by its ratio and its advantage: clip (PPO), cispo, sapo, "
        "gmpo, topr, clip_cov, kl_cov, unclipped, log_likelihood, or a function of this section",
    )
    advantages: SeamConfig = seam(
        "group",
        help="how rewards become advantages where there is no critic: a function of this section "
        "that makes an AdvantageSpec; group: the samples of a prompt compared (adv_norm)",
    )
    ppo_n_minibatches: int = arg(1, bounds=POSITIVE, help="optimizer steps per training batch")
    eps_clip: float = arg(
        0.2,
        bounds=Bounds(gt=0, le=1),
        help="lower clip: ratio >= 1 - eps_clip; 1 is no bound (surrogate=gmpo: log ratio >= "
        "-this)",
    )
    eps_clip_higher: float | None = arg(
        None,
        bounds=POSITIVE,
        help="upper clip: ratio <= 1 + this; null is eps_clip (DAPO's clip-higher; surrogate=gmpo: "
        "log ratio <= this)",
    )
    c_clip: float | None = arg(
        None,
        bounds=Bounds(gt=1),
        help="surrogate=clip: dual clip for negative advantages, > 1; null is off",
    )
    adv_norm: str = arg(
        "group",
        help="group: GRPO, group mean and std; group_mean: Dr. GRPO, group mean only; batch: mean "
        "and std over the batch's trained tokens; group_batch: group mean, std of all rewards of "
        "the batch; none: as they are",
        choices=("group", "group_mean", "group_batch", "batch", "none"),
    )
    adv_std: str = arg(
        "sample",
        help="kind of the std of adv_norm=group, group_batch and advantages=levels: sample divides "
        "by n - 1, population by n",
        choices=("sample", "population"),
    )
    loss_agg: str = arg(
        "token-mean",
        help="mean over trained tokens, or over sequences, or over rollouts (which have several "
        "sequences where they fork), of their token means; sequence-sum: mean over sequences of "
        "their token sums; token-sum: sum over trained tokens",
        choices=("token-mean", "sequence-mean", "rollout-mean", "sequence-sum", "token-sum"),
    )
    loss_agg_length: float = arg(
        1.0,
        bounds=POSITIVE,
        help="divides a sum over tokens (loss_agg=sequence-sum, token-sum): Dr. GRPO's constant "
        "length, as ${gconfig.max_new_tokens}",
    )
    kl_coef: float = arg(
        0.0, bounds=NOT_NEGATIVE, help="weight of the KL to the reference added to the loss"
    )
    kl_estimator: str = arg(
        "k3",
        help="KL estimator of the loss; + is its value with k2's gradient",
        choices=("k1", "k2", "k3", "k1+", "k3+", "k3-weighted"),
    )
    kl_controller: KLControllerConfig | None = arg(
        None, help="adapts kl_coef and the recipe's kl_ctl, which are then the first; null is fixed"
    )
    entropy_coef: float = arg(
        0.0, bounds=NOT_NEGATIVE, help="weight of the entropy that the loss rewards"
    )
    recompute_logprob: str = arg(
        "auto",
        help="recompute logprobs with the trainer's weights before the update (prox_logp); auto: "
        "where an update's own pass tells them too, it makes no pass of its own; interpolate: they "
        "are taken to lie between the server's and the update's own, by each token's version "
        "(A-3PO); false: the ratio starts from the server's",
        choices=("auto", "true", "false", "interpolate"),
    )
    use_decoupled_loss: bool = arg(
        False, help="clip against prox_logp and weight by exp(prox - behaviour) (AReaL)"
    )
    behav_imp_weight_cap: float | None = arg(
        None,
        bounds=POSITIVE,
        help="drop tokens whose behaviour importance weight exceeds this; null is off",
    )
    correction: CorrectionConfig | None = arg(
        None,
        help="weights and masks for the gap between who wrote a token and who trains; null is "
        "none; use_decoupled_loss=true is {weight: token}, with behav_imp_weight_cap=C {mask: "
        "token, mask_high: C}",
    )
    reward_scaling: float = arg(
        1.0, bounds=Bounds(gt=0, le=1e6), help="rewards are (r + bias) * scaling, then clipped"
    )
    reward_bias: float = arg(0.0, bounds=Bounds(ge=-1e6, le=1e6), help="added to every reward")
    reward_clip: float = arg(20.0, bounds=POSITIVE, help="bound of |reward|")
    dynamic_sampling: bool = arg(
        False, help="reject groups whose rewards are all equal (DAPO), prompts are replaced"
    )
    mask_truncated: bool = arg(
        False,
        help="answers that were cut at max_new_tokens are compared with the others, but not "
        "trained on (DAPO's overlong filtering)",
    )
    logp_gap_warn: float = arg(
        0.1,
        bounds=POSITIVE,
        help="warn when the largest |trainer - server| logprob gap exceeds this",
    )

    def __post_init__(self) -> None:
        if isinstance(self.recompute_logprob, bool):  # as it was before there was `auto`
            self.recompute_logprob = "true" if self.recompute_logprob else "false"

    @property
    def old_logp(self) -> str:
        """Returns the name of the batch field [B,S] that holds the old logprobs of the ratio."""
        return "prox_logp" if self.recomputes else "logprobs"

    @property
    def recomputes(self) -> bool:
        """Returns whether the policy's own logprobs before an update (prox_logp) are computed."""
        return self.recompute_logprob in ("auto", "true")

    @property
    def reads_adv_std(self) -> bool:
        """Returns whether the advantages may be divided by a std of the kind `adv_std`."""
        name, options = self.advantages.type, self.advantages.options
        if name == "group":
            return self.adv_norm in ("group", "group_batch")
        return is_import_path(name) or (name == "levels" and options.get("std", "batch") != "none")

    @property
    def compares_by(self) -> str:
        """Returns the key and value by which advantages are 0 where the samples of a prompt have
        equal rewards, as in a group of one; "" where there is none."""
        name, options = self.advantages.type, self.advantages.options
        if name == "group" and self.adv_norm.startswith("group"):
            return f"actor.adv_norm={self.adv_norm}"
        by_group = (name == "reinforce_pp" and options.get("baseline") == "group") or (
            name == "levels" and options.get("mean", "group") in ("group", "leave_one_out")
        )
        return f"actor.advantages={name}" if name in BY_GROUP or by_group else ""


@dataclass(kw_only=True)
class RefConfig(TrainEngineConfig):
    """Configures the reference: the model it begins as, and how it follows the policy."""

    refresh_every: int | None = arg(
        None,
        bounds=POSITIVE,
        help="steps after which the policy's weights become the reference's (with ema: are blended "
        "in); null is never (with ema: after every step)",
    )
    ema: float = arg(
        0.0,
        bounds=Bounds(ge=0, lt=1),
        help="share of its own weights that the reference keeps then: 0.99 makes it a moving "
        "average of the policy, kept in fp32; 0 takes the policy's as they are",
    )

    @property
    def renewed_every(self) -> int | None:
        """Returns after how many steps the reference's weights change; None where it is frozen."""
        return self.refresh_every or (1 if self.ema else None)


@dataclass(kw_only=True)
class ValueModelConfig(TrainEngineConfig):
    """Configures a model with one value per token: a critic or a reward model."""

    head: str = arg("value", help="one value per token", choices=("value",))


@dataclass(kw_only=True)
class RewardModelConfig(ValueModelConfig):
    """Configures a reward model that trains. A language model becomes one without a bias, as HF's
    ForSequenceClassification is."""

    value_head_bias: bool = arg(
        False,
        help="value head of a language model, which has none: with a bias (HF's "
        "ForTokenClassification), or without (ForSequenceClassification)",
    )


@dataclass(kw_only=True)
class TeacherConfig(TrainEngineConfig):
    """Configures the frozen model that a student is drawn to: an engine, or servers."""

    addresses: list[str] = arg(
        factory=list,
        help="servers that hold the teacher, as host:port; empty makes an engine of it",
    )
    request_timeout: float = arg(120.0, bounds=TIMEOUT, help="seconds a server may take a sample")
    retry_timeout: float = arg(
        300.0,
        bounds=TIMEOUT,
        help="seconds for which a sample is asked for again, as while a server starts; then it is "
        "left out",
    )

    lm_head_topk: int = arg(
        64,
        bounds=POSITIVE,
        help="likeliest tokens of each position by which the student is compared; all others count "
        "as one; the whole vocabulary makes it exact",
    )


@dataclass(kw_only=True)
class PPOCriticConfig(ValueModelConfig):
    """Configures the value function that trains beside the policy in PPO."""

    ppo_n_minibatches: int = arg(1, bounds=POSITIVE, help="optimizer steps per training batch")
    value_clip: float | None = arg(
        0.2,
        bounds=POSITIVE,
        help="values count as moved by at most this in a step (PPO2); null is off",
    )
    value_huber: float | None = arg(
        None,
        bounds=POSITIVE,
        help="errors of values beyond this cost linearly, not squared (Huber); null is off",
    )
    loss_agg: str = arg(
        "token-mean",
        help="mean over trained tokens, or over sequences of their token means",
        choices=("token-mean", "sequence-mean"),
    )
