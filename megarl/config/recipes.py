"""Defines the recipes: the top level of a YAML file. `recipe:` in the file picks one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any

from megarl.config.algo import (
    PPOActorConfig,
    PPOCriticConfig,
    PreferenceConfig,
    RefConfig,
    RewardModelConfig,
    TeacherConfig,
    ValueModelConfig,
)
from megarl.config.base import (
    FRACTION,
    FRACTION_ABOVE_ZERO,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    TIMEOUT,
    AnswersForeignKeys,
    Bounds,
    Choices,
    Options,
    OptionsOf,
    SeamConfig,
    free,
    section,
)
from megarl.config.dataset import DatasetConfig, PartConfig, SourceConfig
from megarl.config.engine import TrainEngineConfig
from megarl.config.errors import ConfigError
from megarl.config.presets import ALGORITHMS
from megarl.config.rollout import (
    GenerationConfig,
    GenerationHyperparameters,
    RolloutConfig,
    ServerConfig,
    WeightSyncConfig,
)
from megarl.config.run import (
    ClusterConfig,
    EvaluatorConfig,
    RecoverConfig,
    SaverConfig,
    StatsLoggerConfig,
    TrainerConfig,
)
from megarl.utils.importing import is_import_path, load_object

DEFAULT_RECIPE = "grpo"
_RECIPES = Choices("sft", "dpo", "rm", "grpo", "ppo", "distill", or_path=True)


@dataclass(kw_only=True)
class BaseConfig(AnswersForeignKeys):
    """Holds the keys that every recipe has."""

    recipe: Annotated[str, _RECIPES] = DEFAULT_RECIPE
    """what to run; a path names a dataclass of your own, a subclass of one of the recipes'"""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """class of the training loop, made with (cfg, ctx); empty is the recipe's own"""
    experiment_name: str = "megarl"
    """groups runs; part of the run directory"""
    trial_name: str = "trial0"
    """this run; part of the run directory"""
    fileroot: str = "runs"
    """runs live in <fileroot>/<experiment_name>/<trial_name>"""
    allocation_mode: str = ""
    """GPUs of servers and trainers, like sglang.d4t2+megatron.d2t2p2: sets server.type,
    server.count, server.tp, the trained model's parallel.* and the number of processes; empty
    leaves these to their keys"""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """machines of the job"""
    seed: Annotated[int, SEED] = 1
    """seed of data order, initial weights and dropout"""
    tokenizer_path: str = ""
    """tokenizer directory; empty is the model's path"""
    chat_template: str = ""
    """Jinja file of the chat template, in place of the tokenizer's own; it is saved with the model;
    a base model's tokenizer often has none"""
    trust_remote_code: bool = False
    """run the code that lies beside the tokenizer; it may do anything"""
    total_train_epochs: Annotated[int, POSITIVE] = 1
    """passes over the training set"""
    total_train_steps: Annotated[int, Bounds(ge=0, note="0 evaluates only")] | None = None
    """stop after this many steps; null is no bound, 0 evaluates only"""
    max_train_seconds: Annotated[float, POSITIVE] | None = None
    """stop after this many seconds of training"""
    collective_timeout: Annotated[float, TIMEOUT] = 1800.0
    """seconds a trainer process waits for the others in one collective operation"""
    train_dataset: DatasetConfig = field(default_factory=DatasetConfig)
    """training data"""
    valid_dataset: DatasetConfig | None = None
    """held-out data; null is no evaluation"""
    valid_datasets: dict[str, DatasetConfig] = free()
    """more held-out data by name, each with the keys of valid_dataset; metrics are
    eval/<name>/..."""
    saver: SaverConfig = field(default_factory=SaverConfig)
    """HF saves"""
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    """checkpoints to continue from"""
    self_check: Annotated[Options, OptionsOf("megarl.config.run:SelfCheckConfig")] = free()
    """what the run checks about itself: on_failure of a check of the first step after a start
    (stop, warn, off), on_nonfinite loss or gradient (skip the update and save its batch, or stop),
    max_skips (5; stop after so many in a row)"""
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    """when to evaluate"""
    stats_logger: StatsLoggerConfig = field(default_factory=StatsLoggerConfig)
    """where metrics go"""
    profiler: Annotated[Options, OptionsOf("megarl.config.run:ProfilerConfig")] = free()
    """traces by torch's profiler: start_step (the first, null is never), steps (1), ranks ([0]),
    phases ([] is whole steps, else each in its own file: logp, ref, values, train, ... of
    timing/<phase>_s), options of torch.profiler.profile (profile_memory, with_stack, ...); and
    peak_tflops of a device, for perf/mfu"""


@dataclass(kw_only=True)
class OfflineConfig(BaseConfig):
    """Holds the keys of recipes that train one model on rows that exist already."""

    model: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    """the trained model"""


@dataclass(kw_only=True)
class SFTConfig(OfflineConfig):
    """Configures supervised fine-tuning of one model."""

    recipe: Annotated[str, _RECIPES] = "sft"
    stop_at_exact_match: Annotated[float, FRACTION_ABOVE_ZERO] | None = None
    """stop once this fraction of held-out answers is greedily right; null is off"""
    generation: GenerationConfig | None = None
    """evaluate by generation, too, as RL does; null is by loss alone"""


@dataclass(kw_only=True)
class DPOConfig(OfflineConfig):
    """Configures learning from preferred answers: DPO and its relatives."""

    recipe: Annotated[str, _RECIPES] = "dpo"
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    """the loss"""
    ref: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    """the frozen reference, where the loss has one; empty path is model.path, and with
    model.lora then the model's own engine, adapters off"""


@dataclass(kw_only=True)
class RMConfig(OfflineConfig):
    """Configures the training of a reward model on pairs (Bradley-Terry)."""

    recipe: Annotated[str, _RECIPES] = "rm"
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """the reward model, or the language model it begins as"""
    margin: bool = False
    """train for the difference of scores in each row's column margin"""
    center: Annotated[float, NOT_NEGATIVE] = 0.0
    """weight of the squared sum of a pair's scores, which keeps them near 0"""


@dataclass(kw_only=True)
class GRPOConfig(BaseConfig):
    """Configures RL without a critic: a policy, its rollouts and the servers that generate."""

    algorithm: Annotated[str, Choices(*ALGORITHMS)] = ""
    """a published algorithm, which stands for some keys of `actor` (docs/algorithms.md); keys
    that are set win over it; empty is none"""
    actor: PPOActorConfig = field(default_factory=PPOActorConfig)
    """the trained policy"""
    ref: RefConfig | None = None
    """reference for the KL term; null is none; an empty path is actor.path, and with actor.lora the
    actor without its adapters; frozen unless refresh_every or ema is set"""
    reward_model: ValueModelConfig | None = None
    """frozen; its score of the last token replaces the reward; null is none"""
    kl_ctl: Annotated[float, NOT_NEGATIVE] = 0.0
    """weight of the KL to the reference as a penalty in the reward: of every token in PPO, of
    their sum in GRPO"""
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    """sampling during training"""
    eval_gconfig: GenerationHyperparameters = section(GenerationHyperparameters, greedy=True)
    """sampling during evaluation"""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """generation client"""
    episodes: Annotated[Options, OptionsOf("megarl.config.run:EpisodesConfig")] = free()
    """record for megarl view: keep (16; the first n groups of every step, token by token, and as
    many that were rejected because something failed; 0 is off, null all), entropy (of every token,
    too)"""
    record: Annotated[Options, OptionsOf("megarl.config.run:RecordConfig")] = free()
    """record for megarl diff: fingerprints (true; a hash and a norm of every tensor of a step),
    servers (of their weights, too, which costs a pass over them); for megarl replay: keep (the
    batches of the newest n steps, 0 is off, null all)"""
    replay: Annotated[Options | None, OptionsOf("megarl.config.run:ReplayConfig")] = None
    """run a step of an earlier run again; megarl replay sets it"""
    server: ServerConfig = field(default_factory=ServerConfig)
    """servers the launcher starts"""
    judge: ServerConfig | None = None
    """servers of a judge's model (judge.path) that the launcher starts for the reward judge; null
    is none (the reward's option base_url names a server)"""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    """weights to the servers"""


@dataclass(kw_only=True)
class PPOConfig(GRPOConfig):
    """Configures PPO: GRPO's keys, with a critic and GAE instead of comparing samples."""

    recipe: Annotated[str, _RECIPES] = "ppo"
    actor: PPOActorConfig = section(PPOActorConfig, adv_norm="batch")
    critic: PPOCriticConfig = field(default_factory=PPOCriticConfig)
    """the value function; empty path is actor.path"""
    discount: Annotated[float, FRACTION] = 1.0
    """GAE: discount per trained token"""
    gae_lambda: Annotated[float, FRACTION] = 1.0
    """GAE: 1 is the whole return, 0 one step ahead"""
    gae: Annotated[Options, OptionsOf("megarl.config.algo:GAEConfig")] = free()
    """more of GAE: length_alpha (lambda of an answer of l trained tokens is 1 - 1 / (this * l);
    VAPO: 0.05), critic_lambda (of the critic's returns), bootstrap (an answer cut at max_new_tokens
    ends with the critic's value of its last state, not with 0)"""


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

    recipe: Annotated[str, _RECIPES] = "distill"
    actor: PPOActorConfig = field(default_factory=_student)
    """the student, whose rollouts are compared"""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """the frozen model that the student is drawn to; empty path is actor.path: its own earlier
    self"""


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


def workflow_of(default: SeamConfig, data: SourceConfig) -> SeamConfig:
    """Returns the workflow of a data set's rows, with the data set's chat_template_kwargs among its
    options. default: rollout.workflow. Raises ValueError if the workflow has other ones."""
    named = data.workflow if isinstance(data, PartConfig) and data.workflow.type else default
    key = "chat_template_kwargs"
    rows, own = data.options.get(key) or {}, named.options.get(key)
    if own is not None and own != rows:
        why = "all turns of a chat need the same; set them in the options of the data set only"
        raise ValueError(f"options.{key}={rows}, but the workflow's options.{key}={own}: {why}")
    return SeamConfig(type=named.type, options=named.options | {key: rows}) if rows else named


def sources(cfg: BaseConfig) -> dict[str, SourceConfig]:
    """Returns where all data of a recipe comes from, by key: data sets, or the parts of one."""
    by_key: dict[str, SourceConfig] = {}
    for key, data in datasets(cfg).items():
        by_key |= {f"{key}.parts.{name}": part for name, part in data.parts.items()}
        if not data.parts:
            by_key[key] = data
    return by_key


def train_rewards(cfg: GRPOConfig) -> list[SeamConfig]:
    """Returns the rewards of the training data: of each part of a mixture its own."""
    parts = cfg.train_dataset.parts.values()
    return [source.reward for source in parts] or [cfg.train_dataset.reward]


def sampled_parts(cfg: GRPOConfig) -> list[str]:
    """Returns the parts of the reward that dynamic sampling compares; [] for the reward itself.
    DAPO asks whether some answers of a group are right and some are wrong (arXiv 2503.14476, eq.
    11), so that the penalty of length does not count."""
    sampling, advantages = cfg.actor.dynamic_sampling, cfg.actor.advantages
    if isinstance(sampling, list):
        return sampling
    if advantages.type == "gdpo":
        return list(advantages.options.get("parts") or ())
    weighted = [r.options.get("parts") for r in train_rewards(cfg) if r.type == "weighted"]
    parts = {name: part for each in weighted for name, part in (each or {}).items()}
    types = {n: p.get("type") if isinstance(p, dict) else p for n, p in parts.items()}
    if "overlong" not in types.values():
        return []
    ignored = {n for n, p in parts.items() if isinstance(p, dict) and p.get("weight", 1) == 0}
    return [name for name, kind in types.items() if kind != "overlong" and name not in ignored]


def main_role(cls: type[BaseConfig]) -> str:
    """Returns the key of the model that the recipe trains."""
    return "actor" if issubclass(cls, GRPOConfig) else "model"


def data_purpose(cfg: BaseConfig) -> str:
    """Returns what the recipe reads its data for (`purpose` of megarl.data.sources.load_rows)."""
    if isinstance(cfg, DPOConfig | RMConfig):
        return "pairs"
    return "rl" if isinstance(cfg, GRPOConfig) else "sft"


RECIPES: dict[str, type[BaseConfig]] = {
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "rm": RMConfig,
    "grpo": GRPOConfig,
    "ppo": PPOConfig,
    "distill": DistillConfig,
}
# a recipe's trainer is the first that it is, or is derived from
TRAINERS: dict[type[BaseConfig], str] = {
    DPOConfig: "megarl.trainer.offline:DPOTrainer",
    RMConfig: "megarl.trainer.offline:RMTrainer",
    PPOConfig: "megarl.trainer.rl:PPOTrainer",
    DistillConfig: "megarl.trainer.rl:DistillTrainer",
    GRPOConfig: "megarl.trainer.rl:RLTrainer",
    OfflineConfig: "megarl.trainer.offline:SFTTrainer",
}


def recipe_class(
    tree: Mapping[str, Any], overrides: Mapping[str, Any], cls: type[BaseConfig] | None = None
) -> type[BaseConfig]:
    """Returns the dataclass that the keys `recipe` and `trainer` of a configuration ask for, or
    `cls` where it is given and fits them. Raises ConfigError for a name that no recipe has."""
    name = overrides.get("recipe", tree.get("recipe"))
    named: type[BaseConfig] | None
    if isinstance(name, str) and is_import_path(name):
        named = _own_class(name, "recipe")
    elif name is not None and name not in tuple(RECIPES):
        raise ConfigError(f"recipe={name}: not one of {', '.join(RECIPES)} (or pkg.module:name)")
    else:
        named = RECIPES.get(name)
        trainer = _own_trainer(tree, overrides)
        if cls is None and trainer is not None:
            cls = getattr(_load(trainer, "trainer"), "config_class", None)
    if cls is None:
        return named or RECIPES[DEFAULT_RECIPE]
    if named is not None and not issubclass(cls, named):
        why = f"{cls.__name__} is not one of that recipe's; leave it out"
        raise ConfigError(f"recipe={name}: {why}")
    return cls


def find_recipe(name: str) -> type[BaseConfig]:
    """Returns the dataclass of a recipe's name or import path, or raises ConfigError."""
    return recipe_class({}, {"recipe": name})


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
        raise ConfigError(f"{key}={name}: not a subclass of a recipe's, as SFTConfig, GRPOConfig")
    if not is_dataclass(cls) or "__dataclass_fields__" not in vars(cls):
        raise ConfigError(f"{key}={name}: write @dataclass(kw_only=True) above the class")
    return cls


def _load(name: str, key: str) -> Any:
    try:
        return load_object(name, what=key)
    except ValueError as e:
        raise ConfigError(str(e)) from e
