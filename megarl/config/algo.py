"""Defines the algorithm settings of the actor and the critic."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, Le

from megarl.config.base import (
    LARGEST_FLOAT,
    NOT_NEGATIVE,
    POSITIVE,
    Bounds,
    Choices,
    Options,
    OptionsOf,
    SeamConfig,
    free,
    section,
)
from megarl.config.engine import TrainEngineConfig

# values of actor.advantages that are 0 where all rewards of a prompt's samples are equal, for gdpo
# the parts of the rewards
BY_GROUP = ("gdpo", "rloo", "opo", "pass_at_k", "max_at_k", "gpg")


@dataclass(kw_only=True)
class PPOActorConfig(TrainEngineConfig):
    """Configures the policy that trains: its engine, loss, advantages and rewards."""

    loss: SeamConfig = section(SeamConfig, type="policy")
    """the loss of an update: a function of this section that returns a LossSpec; policy: ratio,
    surrogate, correction, KL and entropy, by the keys below"""
    ratio: Annotated[str, Choices("token", "sequence", "sequence-token")] = "token"
    """importance ratio of the surrogate: token: of a token; sequence: the geometric mean over its
    sequence (GSPO); sequence-token: that mean with the token's gradient (GSPO-token)"""
    surrogate: SeamConfig = section(SeamConfig, type="clip")
    """what a token's loss is, by its ratio and its advantage: clip (PPO), cispo, sapo, gmpo,
    topr, unclipped, log_likelihood, or a function of this section"""
    advantages: SeamConfig = section(SeamConfig, type="group")
    """how rewards become advantages without a critic: a function of this section that returns an
    AdvantageSpec; group: compares the samples of a prompt (adv_norm), with a std of options.kind:
    sample (by n - 1) or population (by n)"""
    ppo_n_minibatches: Annotated[int, POSITIVE] = 1
    """optimizer steps per training batch"""
    eps_clip: Annotated[float, Bounds(gt=0, le=1)] = 0.2
    """lower clip: ratio >= 1 - eps_clip; 1 is no bound (surrogate=gmpo: log ratio >= -this)"""
    eps_clip_higher: Annotated[float, POSITIVE] | None = None
    """upper clip: ratio <= 1 + this; null is eps_clip (DAPO's clip-higher; surrogate=gmpo: log
    ratio <= this)"""
    c_clip: Annotated[float, Bounds(gt=1)] | None = None
    """surrogate=clip: dual clip for negative advantages, > 1; null is off"""
    adv_norm: Annotated[str, Choices("group", "group_mean", "group_batch", "batch", "none")] = (
        "group"
    )
    """group: GRPO, group mean and std; group_mean: Dr. GRPO, group mean only; batch: mean and
    std over the batch's trained tokens; group_batch: group mean, std of all rewards of the
    batch; none: as they are"""
    loss_agg: Annotated[
        str, Choices("token-mean", "sequence-mean", "rollout-mean", "sequence-sum", "token-sum")
    ] = "token-mean"
    """mean over trained tokens, or over sequences, or over rollouts (which have several
    sequences where they fork), of their token means; sequence-sum: mean over sequences of their
    token sums; token-sum: sum over trained tokens"""
    loss_agg_length: Annotated[float, POSITIVE] = 1.0
    """divides a sum over tokens (loss_agg=sequence-sum, token-sum): Dr. GRPO's constant length,
    as ${gconfig.max_new_tokens}"""
    kl_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """weight of the KL to the reference added to the loss"""
    kl_estimator: Annotated[str, Choices("k1", "k2", "k3", "k1+", "k3+", "k3-weighted")] = "k3"
    """KL estimator of the loss; k1+ and k3+ report k1 or k3, and differentiate k2"""
    kl_controller: Annotated[Options | None, OptionsOf("megarl.algos.kl:KLTarget")] = None
    """adapts kl_coef and the recipe's kl_ctl from their first values toward a KL, by its
    options: target (nats), horizon (rollouts), per (token or rollout); null keeps them"""
    entropy_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """weight of the entropy that the loss rewards"""
    recompute_logprob: Annotated[str, Choices("auto", "true", "false", "interpolate")] = "auto"
    """old logprobs of the ratio (prox_logp): true: a pass with the trainer's weights before the
    update; auto: skips that pass when the update computes the same numbers; interpolate: between
    the server's and the update's, by each token's version (A-3PO); false: the server's"""
    correction: Annotated[Options | None, OptionsOf("megarl.algos.policy_loss:Correction")] = None
    """weights and masks for the gap between the policy that wrote a token and the trainer, by the
    options weight, weight_cap, mask, mask_low, mask_high, veto; {} weighs tokens, null
    is none. AReaL's use_decoupled_loss=true is {weight: token}, with behav_imp_weight_cap=C {mask:
    token, mask_high: C}"""
    reward_scaling: Annotated[float, Bounds(gt=0, le=1e6)] = 1.0
    """rewards are (r + bias) * scaling, within reward_clip"""
    reward_bias: Annotated[float, Bounds(ge=-1e6, le=1e6)] = 0.0
    """added to every reward"""
    reward_clip: Annotated[float, POSITIVE] | None = None
    """limit of |(r + bias) * scaling|: rewards beyond it count as the limit; null is no limit"""
    dynamic_sampling: bool | list[str] = False
    """reject groups whose rewards are all equal (DAPO), prompts are replaced; true: parts of type
    overlong of a weighted reward do not count; a list: the parts of the reward that count"""
    mask_truncated: bool = False
    """answers that were cut at max_new_tokens are compared with the others, but not trained on
    (DAPO's overlong filtering)"""
    logp_gap_warn: Annotated[float, POSITIVE] = 0.1
    """warn when the largest |trainer - server| logprob gap exceeds this"""

    def __post_init__(self) -> None:
        self.recompute_logprob = str(self.recompute_logprob).lower()  # scripts may give a boolean

    @property
    def old_logp(self) -> str:
        """Returns the name of the batch field [B,S] that holds the old logprobs of the ratio."""
        return "prox_logp" if self.recomputes else "logprobs"

    @property
    def recomputes(self) -> bool:
        """Returns whether the policy's own logprobs before an update (prox_logp) are computed."""
        return self.recompute_logprob in ("auto", "true")

    @property
    def reward_limits(self) -> tuple[float, float]:
        """Returns the least and the largest reward that reward_clip leaves as it is."""
        most = math.inf if self.reward_clip is None else self.reward_clip / self.reward_scaling
        return -most - self.reward_bias, most - self.reward_bias

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

    refresh_every: Annotated[int, POSITIVE] | None = None
    """steps after which the policy's weights become the reference's (with ema: are blended in);
    null is never (with ema: after every step)"""
    ema: Annotated[float, Bounds(ge=0, lt=1)] = 0.0
    """the reference's own share at a refresh: 0.99 makes it a moving average of the policy, in
    fp32; 0 copies the policy"""

    @property
    def renewed_every(self) -> int | None:
        """Returns after how many steps the reference's weights change; None where it is frozen."""
        return self.refresh_every or (1 if self.ema else None)


@dataclass(kw_only=True)
class ValueModelConfig(TrainEngineConfig):
    """Configures a model with one value per token: a critic or a reward model."""

    head: Annotated[str, Choices("value")] = "value"


@dataclass(kw_only=True)
class RewardModelConfig(ValueModelConfig):
    """Configures a reward model that trains."""

    @property
    def value_head_bias(self) -> bool:
        """Returns false: a language model becomes one without a bias, as HF's
        ForSequenceClassification is."""
        return False


@dataclass(kw_only=True)
class TeacherConfig(TrainEngineConfig):
    """Configures the frozen model that a student is drawn to: an engine, or servers."""

    addresses: list[str] = field(default_factory=list)
    """host:port of servers that hold the teacher, with the timeouts of rollout; empty makes the
    teacher an engine"""
    lm_head_topk: Annotated[int, POSITIVE] = 64
    context: str = ""
    """what the teacher reads in place of the last user message: a Jinja template (question, the
    row's columns, feedback, sibling), or the import path of a function; empty is the student's
    own prompt (docs/algorithms.md)"""


@dataclass(kw_only=True)
class PPOCriticConfig(ValueModelConfig):
    """Configures the value function that trains beside the policy in PPO."""

    ppo_n_minibatches: Annotated[int, POSITIVE] = 1
    """optimizer steps per training batch"""
    value_clip: Annotated[float, POSITIVE] | None = 0.2
    """values count as moved by at most this in a step (PPO2); null is off"""
    value_huber: Annotated[float, POSITIVE] | None = None
    """errors of values beyond this cost linearly, not squared (Huber); null is off"""
    loss_agg: Annotated[str, Choices("token-mean", "sequence-mean")] = "token-mean"
    """mean over trained tokens, or over sequences of their token means"""


@dataclass(kw_only=True)
class GAEConfig:
    """Configures more of GAE (`gae`), as `compute_gae` of megarl.algos.actor takes it.

    length_alpha: lambda of an answer of l trained tokens is 1 - 1 / (length_alpha * l), instead of
        gae_lambda (VAPO: 0.05); None is off.
    critic_lambda: lambda of the critic's returns; None is the advantages'.
    bootstrap: an answer cut at max_new_tokens ends with the critic's value of its last state, not
        with 0.
    """

    length_alpha: Annotated[float, Gt(0), Le(LARGEST_FLOAT)] | None = None
    critic_lambda: Annotated[float, Ge(0), Le(1)] | None = None
    bootstrap: bool = False


PREFERENCE_LOSSES = ("dpo", "ipo", "simpo")


@dataclass(kw_only=True)
class PreferenceConfig:
    """Configures what a policy learns of preferred answers."""

    loss: Annotated[str, Choices(*PREFERENCE_LOSSES)] = "dpo"
    """dpo; ipo; simpo, without a reference (docs/algorithms.md)"""
    options: Options = free()
    """numbers of the loss: beta (all), length_normalized and sft_coef (dpo, ipo), gamma (simpo)"""

    @property
    def needs_reference(self) -> bool:
        """Returns whether the loss measures against a frozen model."""
        return self.loss != "simpo"
