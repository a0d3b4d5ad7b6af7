"""The roles of algos/ bound to MegatronEngine, as scripts use them."""

from __future__ import annotations

import copy

from megarl.algos.actor import Actor
from megarl.algos.critic import Critic
from megarl.algos.metrics import Decode, spell_ids
from megarl.algos.preference_roles import PreferencePolicy, RewardLearner
from megarl.algos.ref import LoRARef, Policy, Ref
from megarl.algos.reward import RewardModel
from megarl.algos.sft import SFT
from megarl.algos.teacher import Teacher
from megarl.config.algo import (
    PPOActorConfig,
    PPOCriticConfig,
    TeacherConfig,
    ValueModelConfig,
)
from megarl.config.check import engines, model_override, model_path, ref_is_below_adapters
from megarl.config.engine import TrainEngineConfig
from megarl.config.preferences import PreferenceConfig
from megarl.config.recipes import BaseConfig
from megarl.engine import MegatronEngine


class MegatronActor(Actor):
    """Trains the policy on a MegatronEngine, by `compute_logp`, `compute_advantages`, `ppo_update`
    and the engine's verbs."""

    engine: MegatronEngine

    def __init__(
        self,
        config: PPOActorConfig,
        *,
        temperature: float,
        seed: int = 1,
        decode: Decode = spell_ids,
    ) -> None:
        super().__init__(
            config,
            MegatronEngine(config, seed=seed),
            temperature=temperature,
            seed=seed,
            decode=decode,
        )


class MegatronCritic(Critic):
    """Trains the value function on a MegatronEngine, by `compute_values`, `ppo_update` and the
    engine's verbs."""

    engine: MegatronEngine

    def __init__(self, config: PPOCriticConfig, *, seed: int = 1) -> None:
        super().__init__(config, MegatronEngine(config, seed=seed), seed=seed)


class MegatronRewardModel(RewardModel):
    """Scores answers with a frozen model on a MegatronEngine: `compute_rewards`."""

    engine: MegatronEngine

    def __init__(self, config: ValueModelConfig, *, seed: int = 1) -> None:
        super().__init__(MegatronEngine(config, seed=seed))


class MegatronRef(Ref):
    """Computes a frozen policy's logprobs on a MegatronEngine: `compute_logp`."""

    engine: MegatronEngine

    def __init__(self, config: TrainEngineConfig, *, temperature: float, seed: int = 1) -> None:
        super().__init__(config, MegatronEngine(config, seed=seed), temperature=temperature)


class MegatronTeacher(Teacher):
    """Says what a frozen model thinks of a student's tokens, on a MegatronEngine: `teach`."""

    engine: MegatronEngine

    def __init__(self, config: TeacherConfig, *, temperature: float, seed: int = 1) -> None:
        super().__init__(config, MegatronEngine(config, seed=seed), temperature=temperature)


class MegatronLoRARef(LoRARef):
    """Computes the logprobs of the policy below its adapters, in its own engine: `compute_logp`."""

    engine: MegatronEngine

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)


class MegatronSFT(SFT):
    """Fine-tunes a model on a MegatronEngine, by `train`, `evaluate` and the engine's verbs."""

    engine: MegatronEngine

    def __init__(self, config: TrainEngineConfig, *, seed: int = 1) -> None:
        super().__init__(config, MegatronEngine(config, seed=seed))


class MegatronPreferencePolicy(PreferencePolicy):
    """Trains a policy on preferred answers on a MegatronEngine, by `compare`, `train`, `evaluate`
    and the engine's verbs."""

    engine: MegatronEngine

    def __init__(
        self, config: TrainEngineConfig, preference: PreferenceConfig, *, seed: int = 1
    ) -> None:
        super().__init__(config, preference, MegatronEngine(config, seed=seed))


class MegatronRewardLearner(RewardLearner):
    """Trains a reward model on a MegatronEngine, by `train`, `evaluate` and the engine's verbs."""

    engine: MegatronEngine

    def __init__(self, config: ValueModelConfig, *, center: float = 0.0, seed: int = 1) -> None:
        super().__init__(config, MegatronEngine(config, seed=seed), center=center)


def make_ref(cfg: BaseConfig, policy: Policy) -> MegatronRef | MegatronLoRARef:
    """Returns the reference of a recipe that has one: the engine of `ref`, initialized, or that of
    `policy` without its adapters. Collective."""
    if ref_is_below_adapters(cfg):
        return MegatronLoRARef(policy)
    config = copy.deepcopy(engines(cfg)["ref"])
    config.path = model_path(cfg, "ref")
    config.override_config = model_override(cfg, "ref")
    config.optimizer = None
    ref = MegatronRef(config, temperature=policy.temperature, seed=cfg.seed)
    ref.initialize(None, None)
    return ref
