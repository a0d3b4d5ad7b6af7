"""The roles of algos/ bound to MegatronEngine, as scripts use them."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, TypeVar

from megarl.algos.actor import Actor
from megarl.algos.preferences import PreferencePolicy, RewardLearner
from megarl.algos.roles import SFT, Critic, LoRARef, Policy, Ref, RewardModel, Role, Teacher
from megarl.config.algo import PPOActorConfig
from megarl.config.engine import TrainEngineConfig
from megarl.config.recipe_engines import engines, model_override, model_path, ref_is_below_adapters
from megarl.config.recipes import BaseConfig, DistillConfig, GRPOConfig, PPOConfig
from megarl.engine import MegatronEngine
from megarl.parallel.worlds import World

C = TypeVar("C", bound=TrainEngineConfig)


class OnMegatron(Role):
    """Makes a role of algos/ on a MegatronEngine. It takes the engine's section of the
    configuration, the role's settings, `seed`, and `world`: the mesh that the engine spans, by
    default the world in scope. Raises TypeError for another section than the role's."""

    engine: MegatronEngine
    section: ClassVar[type[TrainEngineConfig]] = TrainEngineConfig
    instead = "takes a section of an engine"  # says what to give in place of a wrong section
    seeded = False  # whether the role draws by the seed, as its engine does

    def __init__(
        self,
        config: Any,
        *settings: Any,
        seed: int = 1,
        world: World | None = None,
        **more: Any,
    ) -> None:
        if not isinstance(config, self.section):
            raise TypeError(f"{type(self).__name__}({type(config).__name__}): {self.instead}")
        if self.seeded:
            more["seed"] = seed
        more["engine"] = MegatronEngine(config, seed=seed, world=world)
        init: Any = super().__init__  # that of the role, which stands behind this class
        init(config, *settings, **more)


class MegatronActor(OnMegatron, Actor):
    """Trains the policy on a MegatronEngine, by `compute_logp`, `compute_advantages`, `ppo_update`
    and the engine's verbs: MegatronActor(config.actor, temperature=..., seed=1, decode=...)."""

    section, seeded = PPOActorConfig, True
    instead = (
        "takes the policy's section, config.actor; a frozen reference is "
        "MegatronRef(config.ref, temperature=...)"
    )


class MegatronCritic(OnMegatron, Critic):
    """Trains the value function on a MegatronEngine, by `compute_values`, `ppo_update` and the
    engine's verbs: MegatronCritic(config.critic, seed=1)."""

    seeded = True


class MegatronRewardModel(OnMegatron, RewardModel):
    """Scores answers with a frozen model on a MegatronEngine, by `compute_rewards`:
    MegatronRewardModel(config.reward_model, seed=1)."""


class MegatronRef(OnMegatron, Ref):
    """Computes a frozen policy's logprobs on a MegatronEngine, by `compute_logp`:
    MegatronRef(config.ref, temperature=..., seed=1)."""

    instead = "takes the reference's section, config.ref; where that is null there is no reference"


class MegatronTeacher(OnMegatron, Teacher):
    """Says what a frozen model thinks of a student's tokens, on a MegatronEngine, by `teach`:
    MegatronTeacher(config.teacher, temperature=..., seed=1)."""


class MegatronLoRARef(LoRARef):
    """Computes the logprobs of the policy below its adapters, in its own engine: `compute_logp`."""

    engine: MegatronEngine


class MegatronSFT(OnMegatron, SFT):
    """Fine-tunes a model on a MegatronEngine, by `train`, `evaluate` and the engine's verbs:
    MegatronSFT(config.model, seed=1)."""


class MegatronPreferencePolicy(OnMegatron, PreferencePolicy):
    """Trains a policy on preferred answers on a MegatronEngine, by `compare`, `train`, `evaluate`
    and the engine's verbs: MegatronPreferencePolicy(config.model, config.preference, seed=1)."""


class MegatronRewardLearner(OnMegatron, RewardLearner):
    """Trains a reward model on a MegatronEngine, by `train`, `evaluate` and the engine's verbs:
    MegatronRewardLearner(config.model, center=0.0, seed=1)."""


def make_actor(cfg: GRPOConfig, tokenizer: Any) -> MegatronActor:
    """Returns the actor of a recipe, not initialized."""
    actor = MegatronActor(
        cfg.actor, temperature=cfg.gconfig.temperature, seed=cfg.seed, decode=tokenizer.decode
    )
    if cfg.episodes.get("entropy") and cfg.episodes.get("keep") != 0:
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
