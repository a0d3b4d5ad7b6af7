"""Makes a cluster's configuration one that this machine can run: the same recipe, small. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megarl.cli.rehearse.layout import Shrunk
from megarl.config.base import SeamConfig
from megarl.config.cluster import ClusterConfig
from megarl.config.dataset import GENERATED, DatasetConfig, PartConfig, TokenizerConfig
from megarl.config.engine import MicroBatchSpec, TrainEngineConfig
from megarl.config.loader import config_yaml
from megarl.config.recipe_engines import engines
from megarl.config.recipes import BaseConfig, GRPOConfig, RMConfig, SFTConfig
from megarl.config.rollout import GenerationHyperparameters, ServerConfig
from megarl.config.run import FrequencyConfig, ProfilerConfig, StatsLoggerConfig
from megarl.utils.importing import is_import_path

STEPS = 2  # and one more after the resume
CONTEXT = 256  # tokens
LONG_CONTEXT = 2048  # where the user's code says what the policy reads; a token is a byte or more
ANSWER = 8  # tokens
SAMPLES = 16  # sequences of a step, at most
MICRO_BATCH = 128  # tokens: several micro-batches a step
WAIT = 300.0  # seconds, the longest that anything waits here
REWARD = "megarl.cli.rehearse.reward:even_share"


def shrink_config(
    cfg: BaseConfig, layouts: Shrunk, models: Mapping[str, str], *, fileroot: str
) -> BaseConfig:
    """Returns a copy of `cfg` that runs STEPS small steps on this machine. models: the directory of
    each engine's small model, by the engine's key."""
    cfg = copy.deepcopy(cfg)
    for name, engine in engines(cfg).items():
        engine.path = models[name]
        _shrink_engine(engine)
        engine.parallel = layouts.parallel[name]
    cfg.fileroot, cfg.tokenizer_path, cfg.tokenizer = fileroot, "", TokenizerConfig()
    cfg.allocation_mode, cfg.cluster = "", ClusterConfig()
    cfg.total_train_epochs, cfg.total_train_steps, cfg.max_train_seconds = 1000, STEPS, None
    cfg.collective_timeout = min(cfg.collective_timeout, WAIT)
    _shrink_run(cfg)
    rl = isinstance(cfg, GRPOConfig)
    cfg.train_dataset = _small_data(cfg.train_dataset, rl=rl, split="train")
    if cfg.valid_dataset is not None:
        cfg.valid_dataset = _small_data(cfg.valid_dataset, rl=rl, split="test")
    cfg.valid_datasets = {
        name: _small_data(data, rl=rl, split="test") for name, data in cfg.valid_datasets.items()
    }
    if isinstance(cfg, GRPOConfig):
        _shrink_generation(cfg, layouts.world_size)
    elif isinstance(cfg, SFTConfig):
        cfg.generation = None  # its servers would be of the real model
    elif isinstance(cfg, RMConfig):
        cfg.margin = cfg.margin and is_import_path(cfg.train_dataset.type)
    return cfg


def changes(before: BaseConfig, after: BaseConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, value before, value after) for each plain key that differs."""
    import yaml

    trees = (yaml.safe_load(config_yaml(cfg)) for cfg in (before, after))
    flat = [dict(_leaves(tree)) for tree in trees]
    for key in dict.fromkeys([*flat[0], *flat[1]]):
        old, new = (f.get(key) for f in flat)
        if old != new:
            yield key, old, new


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


def _shrink_engine(engine: TrainEngineConfig) -> None:
    """Changes what a CPU cannot do, and what small sizes ask for."""
    engine.fp8, engine.attention = "none", "auto"
    engine.mb_spec = MicroBatchSpec(max_tokens_per_mb=MICRO_BATCH)
    engine.recompute_num_layers = 1
    engine.moe.token_dispatcher = "alltoall"
    if engine.optimizer is not None:
        engine.optimizer = replace(
            engine.optimizer, precision_aware=False, cpu_offload=False, options={}
        )
    if engine.lora is not None:
        engine.lora = replace(engine.lora, r=min(4, engine.lora.r), adapter_path="")


def _shrink_run(cfg: BaseConfig) -> None:
    """Has a checkpoint made at the end, and no word sent elsewhere."""
    for section in (cfg.saver, cfg.recover, cfg.evaluator):
        _never(section)
    cfg.trainer.workers, cfg.trainer.scheduler = None, "local"  # those of a controller
    cfg.saver.final, cfg.saver.keep_best = True, 0
    cfg.recover.mode, cfg.recover.restarts = "auto", 0
    cfg.evaluator.at_start = False
    cfg.stats_logger = StatsLoggerConfig(table=False, report=False)
    cfg.profiler = ProfilerConfig()


def _never(section: FrequencyConfig) -> None:
    section.freq_epochs = section.freq_steps = section.freq_secs = None


def _small_data(data: DatasetConfig, *, rl: bool, split: str) -> DatasetConfig:
    """Returns a few rows: the data set's own where it makes them or the user's code does, else
    sums. A reward of the user's stays, where its rows do."""
    parts = {
        name: PartConfig(
            type="arithmetic",
            options={"level": 2},
            size=32,
            weight=part.weight,
            split=split,
            reward=SeamConfig(type=REWARD if rl else ""),
        )
        for name, part in data.parts.items()
    }
    if parts:
        return replace(data, parts=parts, batch_size=4 if rl else SAMPLES, num_workers=0)
    own = is_import_path(data.type)
    if not own and data.type not in GENERATED:
        data = DatasetConfig(type="arithmetic", split=split, options={"level": 2})
    data = replace(data, files=[], size=64, batch_size=4, max_length=None, num_workers=0)
    if not rl:
        return replace(data, batch_size=SAMPLES)
    if not is_import_path(data.reward.type):
        data = replace(data, reward=SeamConfig(type=REWARD))
    return data


def _shrink_generation(cfg: GRPOConfig, world_size: int) -> None:
    cfg.gconfig, cfg.eval_gconfig = _short(cfg.gconfig), _short(cfg.eval_gconfig)
    old, new = cfg.server, ServerConfig()
    context = LONG_CONTEXT if is_import_path(cfg.train_dataset.type) else CONTEXT
    options = cfg.rollout.workflow.options
    if isinstance(most := options.get("max_length"), int):
        options["max_length"] = min(most, context)
    cfg.server = replace(
        new,
        type="embedded",
        count=min(2, max(1, old.count)),
        dtype=old.dtype,
        context_length=context,
        max_running_requests=32,
        deterministic=old.deterministic,
        start_timeout=WAIT,
    )
    sync = cfg.weight_sync
    sync.bucket_mb, sync.quantization, sync.verify = 1, "none", "full"
    sync.timeout = min(sync.timeout, WAIT)
    if sync.senders is not None:
        sync.senders = min(sync.senders, world_size)
    if cfg.judge is not None:  # a small random model gives no verdicts
        cfg.judge = None
        for data in filter(None, (cfg.train_dataset, cfg.valid_dataset)):
            data.reward = SeamConfig(type=REWARD)
    r = cfg.rollout
    r.addresses_file, r.reward_addresses = "", []
    r.addresses, r.max_concurrent_rollouts, r.reward_workers = [], None, min(2, r.reward_workers)
    r.workers = min(2, r.workers)
    for name in ("request_timeout", "retry_timeout", "episode_timeout", "setup_timeout"):
        setattr(r, name, min(getattr(r, name), WAIT))


def _short(g: GenerationHyperparameters) -> GenerationHyperparameters:
    return replace(
        g,
        n_samples=min(g.n_samples, SAMPLES // 4),
        max_new_tokens=min(g.max_new_tokens, ANSWER),
        min_new_tokens=min(g.min_new_tokens, ANSWER),
        stop_token_ids=[],
    )
