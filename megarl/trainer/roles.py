"""The roles of algos/ bound to MegatronEngine, as scripts use them. `world` is that of the engine:
the mesh that it spans, by default the world in scope."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from megarl.algos.actor import Actor
from megarl.algos.critic import Critic
from megarl.algos.metrics import Decode, spell_ids
from megarl.algos.preference_roles import PreferencePolicy, RewardLearner
from megarl.algos.ref import LoRARef, Policy, Ref, RewardModel, Teacher
from megarl.algos.sft import SFT
from megarl.config.algo import (
    PPOActorConfig,
    PPOCriticConfig,
    PreferenceConfig,
    TeacherConfig,
    ValueModelConfig,
)
from megarl.config.engine import TrainEngineConfig
from megarl.config.recipe_engines import engines, model_override, model_path, ref_is_below_adapters
from megarl.config.recipes import BaseConfig, DistillConfig, GRPOConfig, PPOConfig
from megarl.engine import MegatronEngine
from megarl.parallel.worlds import World

C = TypeVar("C", bound=TrainEngineConfig)


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
        world: World | None = None,
    ) -> None:
        """Raises TypeError for another section than a policy's."""
        if not isinstance(config, PPOActorConfig):
            raise TypeError(
                f"MegatronActor({type(config).__name__}): takes the policy's section, "
                "config.actor; a frozen reference is MegatronRef(config.ref, temperature=...)"
            )
        super().__init__(
            config,
            MegatronEngine(config, seed=seed, world=world),
            temperature=temperature,
            seed=seed,
            decode=decode,
        )


class MegatronCritic(Critic):
    """Trains the value function on a MegatronEngine, by `compute_values`, `ppo_update` and the
    engine's verbs."""

    engine: MegatronEngine

    def __init__(
        self, config: PPOCriticConfig, *, seed: int = 1, world: World | None = None
    ) -> None:
        super().__init__(config, MegatronEngine(config, seed=seed, world=world), seed=seed)


class MegatronRewardModel(RewardModel):
    """Scores answers with a frozen model on a MegatronEngine: `compute_rewards`."""

    engine: MegatronEngine

    def __init__(
        self, config: ValueModelConfig, *, seed: int = 1, world: World | None = None
    ) -> None:
        super().__init__(MegatronEngine(config, seed=seed, world=world))


class MegatronRef(Ref):
    """Computes a frozen policy's logprobs on a MegatronEngine: `compute_logp`."""

    engine: MegatronEngine

    def __init__(
        self,
        config: TrainEngineConfig,
        *,
        temperature: float,
        seed: int = 1,
        world: World | None = None,
    ) -> None:
        """Raises TypeError for what is no section of an engine."""
        if not isinstance(config, TrainEngineConfig):
            raise TypeError(
                f"MegatronRef({type(config).__name__}): takes the reference's section, config.ref; "
                "where that is null there is no reference"
            )
        super().__init__(
            config, MegatronEngine(config, seed=seed, world=world), temperature=temperature
        )


class MegatronTeacher(Teacher):
    """Says what a frozen model thinks of a student's tokens, on a MegatronEngine: `teach`."""

    engine: MegatronEngine

    def __init__(
        self,
        config: TeacherConfig,
        *,
        temperature: float,
        seed: int = 1,
        world: World | None = None,
    ) -> None:
        super().__init__(
            config, MegatronEngine(config, seed=seed, world=world), temperature=temperature
        )


class MegatronLoRARef(LoRARef):
    """Computes the logprobs of the policy below its adapters, in its own engine: `compute_logp`."""

    engine: MegatronEngine

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)


class MegatronSFT(SFT):
    """Fine-tunes a model on a MegatronEngine, by `train`, `evaluate` and the engine's verbs."""

    engine: MegatronEngine

    def __init__(
        self, config: TrainEngineConfig, *, seed: int = 1, world: World | None = None
    ) -> None:
        super().__init__(config, MegatronEngine(config, seed=seed, world=world))


class MegatronPreferencePolicy(PreferencePolicy):
    """Trains a policy on preferred answers on a MegatronEngine, by `compare`, `train`, `evaluate`
    and the engine's verbs."""

    engine: MegatronEngine

    def __init__(
        self,
        config: TrainEngineConfig,
        preference: PreferenceConfig,
        *,
        seed: int = 1,
        world: World | None = None,
    ) -> None:
        super().__init__(config, preference, MegatronEngine(config, seed=seed, world=world))


class MegatronRewardLearner(RewardLearner):
    """Trains a reward model on a MegatronEngine, by `train`, `evaluate` and the engine's verbs."""

    engine: MegatronEngine

    def __init__(
        self,
        config: ValueModelConfig,
        *,
        center: float = 0.0,
        seed: int = 1,
        world: World | None = None,
    ) -> None:
        super().__init__(config, MegatronEngine(config, seed=seed, world=world), center=center)


def make_actor(cfg: GRPOConfig, tokenizer: Any) -> MegatronActor:
    """Returns the actor of a recipe, not initialized."""
    actor = MegatronActor(
        cfg.actor, temperature=cfg.gconfig.temperature, seed=cfg.seed, decode=tokenizer.decode
    )
    if cfg.episodes.entropy and cfg.episodes.keep != 0:
        actor.also = ("entropy",)
    return actor


def make_critic(cfg: PPOConfig) -> MegatronCritic:
    """Returns the critic of a recipe, not initialized."""
    return MegatronCritic(_of_model(cfg, "critic", cfg.critic), seed=cfg.seed)


def make_teacher(cfg: DistillConfig) -> MegatronTeacher:
    """Returns the teacher of a recipe, not initialized."""
    config, temperature = _of_model(cfg, "teacher", cfg.teacher), cfg.gconfig.temperature
    return MegatronTeacher(config, temperature=temperature, seed=cfg.seed)


def make_ref(cfg: BaseConfig, policy: Policy) -> MegatronRef | MegatronLoRARef:
    """Returns the reference of a recipe that has one: the engine of `ref`, initialized, or that of
    `policy` without its adapters. Collective."""
    if ref_is_below_adapters(cfg):
        return MegatronLoRARef(policy)
    ref = make_frozen(cfg, policy.temperature)
    ref.initialize(None, None)
    return ref


def make_frozen(cfg: BaseConfig, temperature: float) -> MegatronRef:
    """Returns the reference of a recipe with an engine of its own, not initialized."""
    config = _of_model(cfg, "ref", engines(cfg)["ref"])
    config.optimizer = None
    return MegatronRef(config, temperature=temperature, seed=cfg.seed)


def _of_model(cfg: BaseConfig, name: str, section: C) -> C:
    """Returns a copy of an engine's section with the model that it is to have."""
    config = copy.deepcopy(section)
    config.path, config.override_config = model_path(cfg, name), model_override(cfg, name)
    return config
