"""The roles of algos/ bound to MegatronEngine, as scripts use them."""

from __future__ import annotations

from megarl.algos.actor import Actor
from megarl.algos.critic import Critic
from megarl.algos.metrics import Decode, spell_ids
from megarl.algos.ref import LoRARef, Ref
from megarl.algos.reward import RewardModel
from megarl.algos.sft import SFT
from megarl.algos.teacher import Teacher
from megarl.config.algo import (
    PPOActorConfig,
    PPOCriticConfig,
    TeacherConfig,
    ValueModelConfig,
)
from megarl.config.engine import TrainEngineConfig
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
    """Computes the logprobs of the policy below the actor's adapters, in the actor's engine:
    `compute_logp`."""

    engine: MegatronEngine

    def __init__(self, actor: MegatronActor) -> None:
        super().__init__(actor)


class MegatronSFT(SFT):
    """Fine-tunes a model on a MegatronEngine, by `train`, `evaluate` and the engine's verbs."""

    engine: MegatronEngine

    def __init__(self, config: TrainEngineConfig, *, seed: int = 1) -> None:
        super().__init__(config, MegatronEngine(config, seed=seed))
