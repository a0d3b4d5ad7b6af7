"""Recipe roots: the top level of a YAML file. `recipe:` in the file picks one."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.algo import PPOActorConfig, PPOCriticConfig, ValueModelConfig
from megarl.config.base import arg
from megarl.config.bounds import (
    FRACTION,
    FRACTION_ABOVE_ZERO,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    TIMEOUT,
    Bounds,
)
from megarl.config.dataset import DatasetConfig
from megarl.config.engine import TrainEngineConfig
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, ServerConfig
from megarl.config.run import (
    EvaluatorConfig,
    ProfilerConfig,
    RecoverConfig,
    SaverConfig,
    SelfCheckConfig,
    StatsLoggerConfig,
)
from megarl.config.weight_sync import WeightSyncConfig


@dataclass(kw_only=True)
class BaseConfig:
    recipe: str = arg("grpo", help="what to run", choices=("sft", "grpo", "ppo"))
    experiment_name: str = arg("megarl", help="groups runs; part of the run directory")
    trial_name: str = arg("trial0", help="this run; part of the run directory")
    fileroot: str = arg("runs", help="runs live in <fileroot>/<experiment_name>/<trial_name>")
    seed: int = arg(1, bounds=SEED, help="seed of data order, initial weights and dropout")
    tokenizer_path: str = arg("", help="tokenizer directory; empty is the model's path")
    total_train_epochs: int = arg(1, bounds=POSITIVE, help="passes over the training set")
    total_train_steps: int | None = arg(
        None,
        bounds=Bounds(ge=0, note="0 evaluates only"),
        help="stop after this many steps; null is no bound, 0 evaluates only",
    )
    max_train_seconds: float | None = arg(
        None, bounds=POSITIVE, help="stop after this many seconds of training"
    )
    collective_timeout: float = arg(
        1800.0,
        bounds=TIMEOUT,
        help="seconds a trainer process waits for the others in one collective operation",
    )
    train_dataset: DatasetConfig = arg(factory=DatasetConfig, help="training data")
    valid_dataset: DatasetConfig | None = arg(None, help="held-out data; null is no evaluation")
    saver: SaverConfig = arg(factory=SaverConfig, help="HF saves")
    recover: RecoverConfig = arg(factory=RecoverConfig, help="checkpoints to continue from")
    self_check: SelfCheckConfig = arg(
        factory=SelfCheckConfig, help="what the run checks about itself"
    )
    evaluator: EvaluatorConfig = arg(factory=EvaluatorConfig, help="when to evaluate")
    stats_logger: StatsLoggerConfig = arg(factory=StatsLoggerConfig, help="where metrics go")
    profiler: ProfilerConfig = arg(factory=ProfilerConfig, help="traces and hardware utilisation")


@dataclass(kw_only=True)
class SFTConfig(BaseConfig):
    recipe: str = arg("sft", help="what to run", choices=("sft", "grpo", "ppo"))
    model: TrainEngineConfig = arg(factory=TrainEngineConfig, help="the trained model")
    stop_at_exact_match: float | None = arg(
        None,
        bounds=FRACTION_ABOVE_ZERO,
        help="stop once this fraction of held-out answers is greedily right; null is off",
    )


@dataclass(kw_only=True)
class GRPOConfig(BaseConfig):
    actor: PPOActorConfig = arg(factory=PPOActorConfig, help="the trained policy")
    ref: TrainEngineConfig | None = arg(
        None,
        help="frozen reference for the KL term; null is none; empty path is actor.path, and with "
        "actor.lora then the actor's own engine, adapters off",
    )
    gconfig: GenerationHyperparameters = arg(
        factory=GenerationHyperparameters, help="sampling during training"
    )
    eval_gconfig: GenerationHyperparameters = arg(
        factory=lambda: GenerationHyperparameters(greedy=True), help="sampling during evaluation"
    )
    rollout: RolloutConfig = arg(factory=RolloutConfig, help="generation client")
    server: ServerConfig = arg(factory=ServerConfig, help="servers the launcher starts")
    weight_sync: WeightSyncConfig = arg(factory=WeightSyncConfig, help="weights to the servers")


@dataclass(kw_only=True)
class PPOConfig(GRPOConfig):
    recipe: str = arg("ppo", help="what to run", choices=("sft", "grpo", "ppo"))
    actor: PPOActorConfig = arg(
        factory=lambda: PPOActorConfig(adv_norm="batch"), help="the trained policy"
    )
    critic: PPOCriticConfig = arg(
        factory=PPOCriticConfig, help="the value function; empty path is actor.path"
    )
    reward_model: ValueModelConfig | None = arg(
        None, help="frozen; its score of the last token replaces the reward; null is none"
    )
    discount: float = arg(1.0, bounds=FRACTION, help="GAE: discount per trained token")
    gae_lambda: float = arg(
        1.0, bounds=FRACTION, help="GAE: 1 is the whole return, 0 one step ahead"
    )
    kl_ctl: float = arg(
        0.0, bounds=NOT_NEGATIVE, help="weight of the KL to the reference, taken off every reward"
    )
    bootstrap_truncated: bool = arg(
        False,
        help="an answer cut at max_new_tokens ends with the value of going on, not with nothing",
    )


RECIPES: dict[str, type[BaseConfig]] = {"sft": SFTConfig, "grpo": GRPOConfig, "ppo": PPOConfig}
