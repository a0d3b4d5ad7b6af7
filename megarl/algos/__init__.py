"""Algorithms: losses, advantages, KL estimators, and the roles that use them over a TrainEngine.

Plain torch. Nothing here knows of ranks, packing or Megatron: a loss sees padded [b,S] tensors of
whole sequences and returns a sum; the engine divides by the global weight.

Position t of every per-token tensor belongs to input_ids[:, t] (logprobs[:, t] = log p(x_t|x_<t)).

How to add an algorithm
-----------------------
1. A loss: a function `my_loss(config, **options) -> LossSpec` (specs.py), in losses.py and NAMES or
   anywhere, named in `actor.loss` by its import path. Sum, never divide by the batch: everything
   that normalises over the batch belongs in the weight, which adds up when the batch is cut.
2. If it needs one, an advantage: `my_advantages(config, **options) -> AdvantageSpec`, in the same
   way, for `actor.advantages`.
3. If it has another model or other steps, a role: a subclass of `Role` whose methods are the verbs
   of the training script (`compute_logp`, `ppo_update`, ...), calling `engine.forward`,
   `train_batch`, `eval_batch`; and a trainer, named in `trainer`.
4. A test against a plain Python loop over tokens, and one that cuts the batch in two.
"""

from megarl.algos.actor import Actor
from megarl.algos.advantages import (
    gae,
    grpo_advantages,
    place_rewards,
    shape_rewards,
    spread_over_tokens,
    whiten,
)
from megarl.algos.distillation import Distillation, divergence
from megarl.algos.kl import kl_estimate
from megarl.algos.losses import (
    LOSS_WEIGHTS,
    critic_loss,
    rollout_weight,
    sequence_weight,
    sft_loss,
    token_weight,
)
from megarl.algos.metrics import (
    advantage_spread,
    explained_variance,
    gap_by_age,
    logp_gap_stats,
    staleness,
    worst_logp_gaps,
)
from megarl.algos.policy_loss import PolicyLoss, derived_policy_stats, policy_stats
from megarl.algos.preferences import PreferencePolicy, RewardLearner
from megarl.algos.roles import SFT, Critic, LoRARef, Ref, RewardModel, Role, Teacher
from megarl.algos.specs import AdvantageSpec, LossSpec, Surrogate

__all__ = [
    "Actor",
    "AdvantageSpec",
    "Critic",
    "Distillation",
    "LOSS_WEIGHTS",
    "LoRARef",
    "LossSpec",
    "PolicyLoss",
    "PreferencePolicy",
    "Ref",
    "RewardLearner",
    "RewardModel",
    "Role",
    "SFT",
    "Surrogate",
    "Teacher",
    "advantage_spread",
    "critic_loss",
    "derived_policy_stats",
    "divergence",
    "explained_variance",
    "gae",
    "gap_by_age",
    "grpo_advantages",
    "kl_estimate",
    "logp_gap_stats",
    "place_rewards",
    "policy_stats",
    "rollout_weight",
    "sequence_weight",
    "sft_loss",
    "shape_rewards",
    "spread_over_tokens",
    "staleness",
    "token_weight",
    "whiten",
    "worst_logp_gaps",
]
