"""Says what a recipe runs: which training engines, of which model each, on how many processes; and
which servers, at which addresses, and whether they and the trainers use devices in turn."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.config.algo import RefConfig
from megarl.config.engine import TrainEngineConfig, overridden
from megarl.config.presets import AllocationMode
from megarl.config.recipes import (
    BaseConfig,
    DistillConfig,
    DPOConfig,
    GRPOConfig,
    OfflineConfig,
    PPOConfig,
    main_role,
)
from megarl.config.rollout import RolloutConfig
from megarl.config.rules import TURNS, rule_problems
from megarl.config.run import TRAIN

FROZEN = ("ref", "reward_model", "teacher")  # engines that never train


def engines(cfg: BaseConfig) -> dict[str, TrainEngineConfig]:
    """Returns the training engines of a recipe by their key."""
    if isinstance(cfg, DPOConfig) and cfg.preference.needs_reference:
        return {"model": cfg.model, "ref": cfg.ref}
    if isinstance(cfg, OfflineConfig):
        return {"model": cfg.model}
    assert isinstance(cfg, GRPOConfig), type(cfg)
    by_key: dict[str, TrainEngineConfig | None] = {"actor": cfg.actor, "ref": cfg.ref}
    if isinstance(cfg, PPOConfig):
        by_key["critic"] = cfg.critic
    if isinstance(cfg, DistillConfig) and not cfg.teacher.addresses:
        by_key["teacher"] = cfg.teacher
    by_key["reward_model"] = cfg.reward_model
    return {name: engine for name, engine in by_key.items() if engine is not None}


def uses_block_fp8(cfg: BaseConfig) -> bool:
    """Returns whether an engine multiplies in FP8 with a scale for each block."""
    return any(engine.fp8 == "blockwise" for engine in engines(cfg).values())


def trained_engines(cfg: BaseConfig) -> tuple[str, ...]:
    """Returns the keys of the engines that are trained, the policy first."""
    return tuple(name for name in engines(cfg) if name not in FROZEN)


def saved_engines(cfg: BaseConfig) -> tuple[str, ...]:
    """Returns the keys of the engines that a checkpoint holds: those whose weights change, among
    them a reference that follows the policy, last."""
    follows = isinstance(cfg, GRPOConfig) and cfg.ref is not None and cfg.ref.renewed_every
    return (*trained_engines(cfg), *(["ref"] if follows else []))


def model_path(cfg: BaseConfig, name: str) -> str:
    """Returns the HF directory of engine `name`, for a reference, critic or teacher perhaps that of
    the model that the recipe is about."""
    return _with_the_main_model(cfg, name).path


def model_override(cfg: BaseConfig, name: str) -> dict[str, Any]:
    """Returns the override_config of engine `name`, over that of the model that the recipe is about
    where it has that model's directory for want of a path of its own."""
    own = engines(cfg)[name].override_config
    return overridden(_with_the_main_model(cfg, name).override_config, own)


def _with_the_main_model(cfg: BaseConfig, name: str) -> TrainEngineConfig:
    engine = engines(cfg)[name]
    of_main = name in ("ref", "critic", "teacher") and not engine.path
    return engines(cfg)[main_role(type(cfg))] if of_main else engine


def ref_is_below_adapters(cfg: BaseConfig) -> bool:
    """Returns whether the trained policy's engine without its adapters serves as the reference, so
    that `ref` builds no engine."""
    by_key = engines(cfg)
    policy, ref = by_key[main_role(type(cfg))], by_key.get("ref")
    return (
        ref is not None
        and not (isinstance(ref, RefConfig) and ref.renewed_every)
        and policy.lora is not None
        and model_path(cfg, "ref") == policy.path
        and model_override(cfg, "ref") == policy.override_config
        and ref.init_from_scratch == policy.init_from_scratch
    )


def smallest_world_size(cfg: BaseConfig) -> int:
    """Returns the processes that allocation_mode asks for, else the fewest that every engine of the
    recipe can run on."""
    if cfg.allocation_mode:
        return AllocationMode.from_str(cfg.allocation_mode).trainers.gpus
    layouts = [engine.parallel for engine in engines(cfg).values()]
    return math.lcm(*(p.dense_ranks for p in layouts), *(p.expert_ranks for p in layouts))


def trainer_processes(cfg: BaseConfig) -> int:
    """Returns the trainer processes of a run where nobody says otherwise: those of trainer.workers,
    else the smallest world."""
    return smallest_world_size(cfg) if cfg.trainer.workers is None else cfg.trainer.workers


ADDRESSES_ENV = "MEGARL_LLM_SERVER_ADDRS"
JUDGES_ENV = "MEGARL_JUDGE_ADDRS"


def needs_servers(cfg: GRPOConfig) -> bool:
    """Returns whether a run generates: a replay of training alone does not."""
    return cfg.replay is None or cfg.replay.get("what") != TRAIN


def server_addresses(config: RolloutConfig) -> list[str]:
    """Returns `rollout.addresses`, or the environment's addresses where the key is empty, and those
    in `rollout.addresses_file`. Raises OSError where the file cannot be read."""
    fixed = list(config.addresses) or listed_addresses()
    listed = addresses_in(config.addresses_file) if config.addresses_file else []
    return list(dict.fromkeys([*fixed, *listed]))


def listed_addresses(name: str = ADDRESSES_ENV) -> list[str]:
    """Returns the comma-separated host:port of a variable: the job's servers, or with JUDGES_ENV
    the judge's that the launcher has started."""
    return [a.strip() for a in os.environ.get(name, "").split(",") if a.strip()]


def addresses_in(file: str | Path) -> list[str]:
    """Returns the lines of a file of addresses, without empty ones and comments (# to the end)."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return [address for line in lines if (address := line.partition("#")[0].strip())]


def takes_turns(cfg: GRPOConfig) -> bool:
    """Returns whether servers and trainers give their memory up to each other. What
    server.release_memory=auto stands for is settled by the launcher; by itself it is false."""
    return cfg.server.release_memory == "true"


def settle_turns(cfg: GRPOConfig, *, shared: bool) -> None:
    """Says true or false where server.release_memory is auto. shared: servers that the launcher
    starts have the trainers' devices."""
    if cfg.server.release_memory == "auto":
        able = shared and cfg.server.count > 0 and not any(_obstacles(cfg))
        cfg.server.release_memory = "true" if able else "false"


def turn_problems(cfg: GRPOConfig) -> Iterator[str]:
    """Yields what does not go with server.release_memory=true."""
    for why in _obstacles(cfg) if takes_turns(cfg) else ():
        yield f"server.release_memory=true: {why}"


def _obstacles(cfg: GRPOConfig) -> Iterator[str]:
    """Yields why servers cannot release their memory while the trainers work."""
    yield from rule_problems(TURNS, cfg)
    both = isinstance(cfg, DistillConfig) and {*cfg.teacher.addresses} & {*cfg.rollout.addresses}
    if both:
        fix = "name servers in teacher.addresses that the policy does not use"
        yield f"the teacher answers at {min(both)}, which rests in the trainers' turn; {fix}"
