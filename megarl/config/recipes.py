"""Defines the recipes: the top level of a YAML file. `recipe:` in the file picks one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from megarl.config.algo import (
    PPOActorConfig,
    PPOCriticConfig,
    RefConfig,
    RewardModelConfig,
    TeacherConfig,
    ValueModelConfig,
)
from megarl.config.base import SeamConfig, arg
from megarl.config.bounds import (
    FRACTION,
    FRACTION_ABOVE_ZERO,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    TIMEOUT,
    Bounds,
)
from megarl.config.cluster import ClusterConfig
from megarl.config.dataset import DatasetConfig, SourceConfig, TokenizerConfig
from megarl.config.engine import TrainEngineConfig
from megarl.config.episodes import EpisodesConfig
from megarl.config.errors import ConfigError
from megarl.config.generation import GenerationConfig
from megarl.config.preferences import PreferenceConfig
from megarl.config.presets import ALGORITHMS
from megarl.config.record import RecordConfig, ReplayConfig
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, ServerConfig
from megarl.config.run import (
    EvaluatorConfig,
    ProfilerConfig,
    RecoverConfig,
    SaverConfig,
    SelfCheckConfig,
    StatsLoggerConfig,
    TrainerConfig,
)
from megarl.config.weight_sync import WeightSyncConfig
from megarl.utils.importing import is_import_path, load_object

DEFAULT_RECIPE = "grpo"
_WHAT = "what to run; a path names a dataclass of your own, a subclass of one of the recipes'"


def _recipe(name: str) -> Any:
    names = ("sft", "dpo", "rm", "grpo", "ppo", "distill")
    return arg(name, help=_WHAT, choices=names, or_path=True)


@dataclass(kw_only=True)
class BaseConfig:
    """Holds the keys that every recipe has."""

    recipe: str = _recipe(DEFAULT_RECIPE)
    trainer: TrainerConfig = arg(
        factory=TrainerConfig,
        help="class of the training loop, made with (cfg, ctx); empty is the recipe's own",
    )
    experiment_name: str = arg("megarl", help="groups runs; part of the run directory")
    trial_name: str = arg("trial0", help="this run; part of the run directory")
    fileroot: str = arg("runs", help="runs live in <fileroot>/<experiment_name>/<trial_name>")
    allocation_mode: str = arg(
        "",
        help="GPUs of servers and trainers, like sglang.d4t2+megatron.d2t2p2: sets server.type, "
        "server.count, server.tp, the trained model's parallel.* and the number of processes; "
        "empty leaves them to their own keys",
    )
    cluster: ClusterConfig = arg(factory=ClusterConfig, help="machines of the job")
    seed: int = arg(1, bounds=SEED, help="seed of data order, initial weights and dropout")
    tokenizer_path: str = arg("", help="tokenizer directory; empty is the model's path")
    tokenizer: TokenizerConfig = arg(factory=TokenizerConfig, help="the run's tokenizer")
    trust_remote_code: bool = arg(
        False, help="run the code that lies beside the tokenizer; it may do anything"
    )
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
    valid_datasets: dict[str, DatasetConfig] = arg(
        factory=dict,
        help="more held-out data by name, each with the keys of valid_dataset; metrics are "
        "eval/<name>/...",
    )
    saver: SaverConfig = arg(factory=SaverConfig, help="HF saves")
    recover: RecoverConfig = arg(factory=RecoverConfig, help="checkpoints to continue from")
    self_check: SelfCheckConfig = arg(
        factory=SelfCheckConfig, help="what the run checks about itself"
    )
    evaluator: EvaluatorConfig = arg(factory=EvaluatorConfig, help="when to evaluate")
    stats_logger: StatsLoggerConfig = arg(factory=StatsLoggerConfig, help="where metrics go")
    profiler: ProfilerConfig = arg(factory=ProfilerConfig, help="traces and hardware utilisation")


@dataclass(kw_only=True)
class OfflineConfig(BaseConfig):
    """Holds the keys of recipes that train one model on rows that exist already."""

    model: TrainEngineConfig = arg(factory=TrainEngineConfig, help="the trained model")


@dataclass(kw_only=True)
class SFTConfig(OfflineConfig):
    """Configures supervised fine-tuning of one model."""

    recipe: str = _recipe("sft")
    stop_at_exact_match: float | None = arg(
        None,
        bounds=FRACTION_ABOVE_ZERO,
        help="stop once this fraction of held-out answers is greedily right; null is off",
    )
    generation: GenerationConfig | None = arg(
        None, help="evaluate by generation, too, as RL does; null is by loss alone"
    )


@dataclass(kw_only=True)
class DPOConfig(OfflineConfig):
    """Configures learning from preferred answers: DPO and its relatives."""

    recipe: str = _recipe("dpo")
    preference: PreferenceConfig = arg(factory=PreferenceConfig, help="the loss")
    ref: TrainEngineConfig = arg(
        factory=TrainEngineConfig,
        help="the frozen reference, where the loss has one; empty path is model.path, and with "
        "model.lora then the model's own engine, adapters off",
    )


@dataclass(kw_only=True)
class RMConfig(OfflineConfig):
    """Configures the training of a reward model on pairs (Bradley-Terry)."""

    recipe: str = _recipe("rm")
    model: RewardModelConfig = arg(
        factory=RewardModelConfig, help="the reward model, or the language model it begins as"
    )
    margin: bool = arg(
        False, help="ask for the difference of scores that each row's column margin says"
    )
    center: float = arg(
        0.0,
        bounds=NOT_NEGATIVE,
        help="weight of the squared sum of a pair's scores, which keeps them near 0",
    )


@dataclass(kw_only=True)
class GRPOConfig(BaseConfig):
    """Configures RL without a critic: a policy, its rollouts and the servers that generate."""

    algorithm: str = arg(
        "",
        help="a published algorithm, which stands for some keys of `actor` (docs/algorithms.md); "
        "keys that are set win over it; empty is none",
        choices=ALGORITHMS,
    )
    actor: PPOActorConfig = arg(factory=PPOActorConfig, help="the trained policy")
    ref: RefConfig | None = arg(
        None,
        help="reference for the KL term, frozen unless refresh_every or ema is set; null is none; "
        "empty path is actor.path, and with actor.lora then, frozen, the actor's own engine, "
        "adapters off",
    )
    reward_model: ValueModelConfig | None = arg(
        None, help="frozen; its score of the last token replaces the reward; null is none"
    )
    kl_ctl: float = arg(
        0.0,
        bounds=NOT_NEGATIVE,
        help="weight of the KL to the reference as a penalty in the reward: of every token in PPO, "
        "of their sum in GRPO",
    )
    gconfig: GenerationHyperparameters = arg(
        factory=GenerationHyperparameters, help="sampling during training"
    )
    eval_gconfig: GenerationHyperparameters = arg(
        factory=lambda: GenerationHyperparameters(greedy=True), help="sampling during evaluation"
    )
    rollout: RolloutConfig = arg(factory=RolloutConfig, help="generation client")
    episodes: EpisodesConfig = arg(factory=EpisodesConfig, help="record for megarl view")
    record: RecordConfig = arg(factory=RecordConfig, help="record for megarl diff and replay")
    replay: ReplayConfig | None = arg(
        None, help="run a step of an earlier run again; megarl replay sets it"
    )
    server: ServerConfig = arg(factory=ServerConfig, help="servers the launcher starts")
    judge: ServerConfig | None = arg(
        None,
        help="servers of a judge's model (judge.path) that the launcher starts for the reward "
        "judge; null is none: the reward's option base_url names others",
    )
    weight_sync: WeightSyncConfig = arg(factory=WeightSyncConfig, help="weights to the servers")


@dataclass(kw_only=True)
class PPOConfig(GRPOConfig):
    """Configures PPO: GRPO's keys, with a critic and GAE instead of comparing samples."""

    recipe: str = _recipe("ppo")
    algorithm: str = arg(
        "",
        help="empty: the published algorithms by name compare samples, without a critic (recipe "
        "grpo); set actor.ratio, actor.surrogate, actor.loss_agg, actor.correction one by one",
        choices=("",),
    )
    actor: PPOActorConfig = arg(
        factory=lambda: PPOActorConfig(adv_norm="batch"), help="the trained policy"
    )
    critic: PPOCriticConfig = arg(
        factory=PPOCriticConfig, help="the value function; empty path is actor.path"
    )
    discount: float = arg(1.0, bounds=FRACTION, help="GAE: discount per trained token")
    gae_lambda: float = arg(
        1.0, bounds=FRACTION, help="GAE: 1 is the whole return, 0 one step ahead"
    )
    gae_length_alpha: float | None = arg(
        None,
        bounds=POSITIVE,
        help="GAE: lambda of an answer of l trained tokens is 1 - 1 / (this * l), instead of "
        "gae_lambda (VAPO: 0.05); null is off",
    )
    gae_lambda_critic: float | None = arg(
        None, bounds=FRACTION, help="GAE: lambda of the critic's returns; null is the advantages'"
    )
    bootstrap_truncated: bool = arg(
        False,
        help="an answer cut at max_new_tokens ends with the value of going on, not with nothing",
    )


def _student() -> PPOActorConfig:
    return PPOActorConfig(
        loss=SeamConfig(type="distill"),
        advantages=SeamConfig(type="teacher"),
        adv_norm="none",
        recompute_logprob="false",
    )


@dataclass(kw_only=True)
class DistillConfig(GRPOConfig):
    """Configures on-policy distillation: GRPO's keys, with a teacher where GRPO has rewards."""

    recipe: str = _recipe("distill")
    actor: PPOActorConfig = arg(factory=_student, help="the student, whose rollouts are compared")
    teacher: TeacherConfig = arg(
        factory=TeacherConfig,
        help="the frozen model that the student is drawn to; empty path is actor.path: its own "
        "earlier self",
    )


def held_out_sets(cfg: BaseConfig) -> dict[str, DatasetConfig]:
    """Returns the validation data sets by name; that of valid_dataset is ""."""
    alone = {} if cfg.valid_dataset is None else {"": cfg.valid_dataset}
    return {**alone, **cfg.valid_datasets}


def held_out_key(name: str) -> str:
    """Returns the key of the validation data set `name`."""
    return f"valid_datasets.{name}" if name else "valid_dataset"


def datasets(cfg: BaseConfig) -> dict[str, DatasetConfig]:
    """Returns every data set of a recipe by its key."""
    held_out = {held_out_key(name): data for name, data in held_out_sets(cfg).items()}
    return {"train_dataset": cfg.train_dataset, **held_out}


def sources(cfg: BaseConfig) -> dict[str, SourceConfig]:
    """Returns where all data of a recipe comes from, by key: data sets, or the parts of one."""
    found: dict[str, SourceConfig] = {}
    for key, data in datasets(cfg).items():
        found |= {f"{key}.parts.{name}": part for name, part in data.parts.items()}
        if not data.parts:
            found[key] = data
    return found


def main_role(cls: type[BaseConfig]) -> str:
    """Returns the key of the model that the recipe trains."""
    return "actor" if issubclass(cls, GRPOConfig) else "model"


def data_purpose(cfg: BaseConfig) -> str:
    """Returns what the recipe reads its data for (`purpose` of megarl.data.load_rows)."""
    if isinstance(cfg, RMConfig):
        return "pairs"
    if isinstance(cfg, DPOConfig):
        return "pairs" if cfg.preference.paired else "unpaired"
    return "rl" if isinstance(cfg, GRPOConfig) else "sft"


RECIPES: dict[str, type[BaseConfig]] = {
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "rm": RMConfig,
    "grpo": GRPOConfig,
    "ppo": PPOConfig,
    "distill": DistillConfig,
}
# recipes with a training loop of their own; the others have that of RLTrainer or SFTTrainer
TRAINERS: dict[type[BaseConfig], str] = {
    DPOConfig: "megarl.trainer.preferences:DPOTrainer",
    RMConfig: "megarl.trainer.preferences:RMTrainer",
    PPOConfig: "megarl.trainer.ppo:PPOTrainer",
    DistillConfig: "megarl.trainer.distill:DistillTrainer",
}


def recipe_class(
    tree: Mapping[str, Any], overrides: Mapping[str, Any], cls: type[BaseConfig] | None = None
) -> type[BaseConfig]:
    """Returns the dataclass that the keys `recipe` and `trainer` of a configuration ask for, or
    `cls` where it is given and fits them. Raises ConfigError for a name that no recipe has."""
    name = overrides.get("recipe", tree.get("recipe"))
    named: type[BaseConfig] | None = None
    if isinstance(name, str) and is_import_path(name):
        named = _own_class(name, "recipe")
    elif name is not None and name not in tuple(RECIPES):
        raise ConfigError([f"recipe={name}: not one of {', '.join(RECIPES)} (or pkg.module:name)"])
    else:
        named = named if name is None else RECIPES[name]
        cls = cls or _config_class_of_trainer(tree, overrides)
    if cls is None:
        return named or RECIPES[DEFAULT_RECIPE]
    if named is not None and not issubclass(cls, named):
        raise ConfigError(
            [f"recipe={name}: {cls.__name__} is not one of that recipe's; leave it out"]
        )
    return cls


def find_recipe(name: str) -> type[BaseConfig]:
    """Returns the dataclass of a recipe's name or import path, or raises ConfigError."""
    return recipe_class({}, {"recipe": name})


def _config_class_of_trainer(
    tree: Mapping[str, Any], overrides: Mapping[str, Any]
) -> type[BaseConfig] | None:
    """Returns the `config_class` of a user's trainer; None where there is none."""
    name = _own_trainer(tree, overrides)
    return None if name is None else getattr(_load(name, "trainer"), "config_class", None)


def _own_trainer(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> str | None:
    trainer = overrides.get("trainer.type", overrides.get("trainer", tree.get("trainer")))
    name = trainer.get("type") if isinstance(trainer, Mapping) else trainer
    return name if isinstance(name, str) and is_import_path(name) else None


def own_code(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> str | None:
    """Returns "recipe=name" or "trainer=name" where code of the user's decides the dataclass, else
    None."""
    recipe, trainer = overrides.get("recipe", tree.get("recipe")), _own_trainer(tree, overrides)
    if isinstance(recipe, str) and is_import_path(recipe):
        return f"recipe={recipe}"
    return None if trainer is None else f"trainer={trainer}"


def _own_class(name: str, key: str) -> type[BaseConfig]:
    cls = _load(name, key)
    if not (isinstance(cls, type) and issubclass(cls, BaseConfig)):
        raise ConfigError([f"{key}={name}: not a subclass of a recipe's, as SFTConfig, GRPOConfig"])
    if not is_dataclass(cls) or "__dataclass_fields__" not in vars(cls):
        raise ConfigError([f"{key}={name}: write @dataclass(kw_only=True) above the class"])
    return cls


def _load(name: str, key: str) -> Any:
    try:
        return load_object(name, what=key)
    except ValueError as e:
        raise ConfigError([str(e)]) from e
