"""Checks the settings of one engine and of an algorithm's part, as far as torch is not needed. The
recipe calls these checks before anything starts, and the parts call them for a script's settings.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megarl.config.algo import PPOActorConfig, PPOCriticConfig
from megarl.config.engine import ALL_LINEAR, LoRAConfig, OptimizerConfig
from megarl.config.errors import raise_if_any
from megarl.config.parallel import ParallelConfig
from megarl.config.rules import ACTOR, OPTIMIZER, PARALLEL, rule_problems
from megarl.config.schema import show, value_problems

_STATE_DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
# fields of megatron-core's OptimizerConfig that keys of ours, the engine's dtype or megarl set
_SET_BY_KEYS = (
    *("optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps"),
    *("clip_grad", "bf16", "fp16", "params_dtype", "use_distributed_optimizer"),
    *("overlap_param_gather", "use_precision_aware_optimizer", "store_param_remainders"),
    "optimizer_cpu_offload",
)


def check_parallel(parallel: ParallelConfig, world_size: int) -> None:
    """Raises ConfigError that names the degrees that do not fit `world_size`."""
    raise_if_any([*value_problems(parallel, "parallel."), *parallel_problems(parallel, world_size)])


def parallel_problems(
    p: ParallelConfig, world_size: int | None, key: str = "parallel"
) -> Iterator[str]:
    """Yields degrees that do not go together or do not divide `world_size` (None: not known); `key`
    is the section's name."""
    if min(p.tp, p.pp, p.vpp, p.cp, p.ep, p.etp) < 1:
        return  # which their bounds say
    for what, degrees, ranks in (
        ("tp*pp*cp", f"{p.tp}*{p.pp}*{p.cp}", p.dense_ranks),
        ("etp*ep*pp", f"{p.etp}*{p.ep}*{p.pp}", p.expert_ranks),
    ):
        if world_size is not None and world_size % ranks:
            yield (
                f"{key}: {what} = {degrees} = {ranks} does not divide the world size "
                f"{world_size}; start a multiple of {ranks} processes (--nproc, trainer.workers) "
                "or lower a degree"
            )
    yield from rule_problems(PARALLEL, p, f"{key}.")
    if p.pipeline_split is not None and p.pp > 1 and len(p.pipeline_split) != p.pp * p.vpp:
        yield (
            f"{key}.pipeline_split={p.pipeline_split}: {len(p.pipeline_split)} numbers for "
            f"{key}.pp*vpp = {p.pp}*{p.vpp} chunks; give one per chunk, in the order of the layers"
        )


def lora_problems(key: str, cfg: LoRAConfig) -> Iterator[str]:
    """Yields problems of an engine's adapters, but for the module names: models.lora checks
    these."""
    if not cfg.target_modules:
        yield f"{key}.target_modules=[]: nothing to train; use [{ALL_LINEAR}]"
    if ALL_LINEAR in cfg.target_modules and len(cfg.target_modules) > 1:
        yield f"{key}.target_modules={cfg.target_modules}: {ALL_LINEAR} stands alone"
    if cfg.adapter_path and not (Path(cfg.adapter_path) / "adapter_config.json").is_file():
        yield (
            f"{key}.adapter_path={cfg.adapter_path}: no adapter_config.json there; name a PEFT "
            "directory, or leave it empty"
        )


def optimizer_problems(key: str, cfg: OptimizerConfig) -> Iterator[str]:
    """Yields options of the optimizer that need others, and those that megatron-core lacks."""
    yield from rule_problems(OPTIMIZER, cfg, f"{key}.")
    known = _fields_of_megatron()
    for name, value in cfg.options.items():
        option = f"{key}.options.{name}={show(value)}"
        if name in _SET_BY_KEYS:
            yield f"{option}: a key of {key}, or the engine's dtype, sets it; leave it out"
        elif known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            yield f"{option}: megatron-core's OptimizerConfig has no such field{meant}"
        elif name in _STATE_DTYPES and value not in ("float32", "bfloat16", "float16"):
            yield f"{option}: not one of float32, bfloat16, float16"
        elif name in _STATE_DTYPES and value != "float32" and not cfg.precision_aware:
            yield f"{option}: needs {key}.precision_aware=true"
        elif isinstance(value, str) and known.get(name) in ("float", "int", "bool"):
            yield f"{option}: not of type {known[name]}"


@cache
def _fields_of_megatron() -> dict[str, str]:
    """Returns the type of each field of megatron-core's OptimizerConfig as its source has it, since
    to import it takes seconds; nothing where it is not installed."""
    spec = find_spec("megatron")
    places = (spec.submodule_search_locations if spec else None) or ()
    files = [Path(p) / "core/optimizer/optimizer_config.py" for p in places]
    texts = (f.read_text(encoding="utf-8") for f in files if f.is_file())
    return {
        ast.unparse(node.target): ast.unparse(node.annotation)
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.AnnAssign)
    }


def actor_problems(cfg: PPOActorConfig, key: str = "actor.") -> Iterator[str]:
    """Yields a line for each contradiction in `cfg`; `key` is its section, with a dot."""
    yield from rule_problems(ACTOR, cfg, key)
    if cfg.adv_std != "sample" and not cfg.reads_adv_std:
        yield (
            f"{key}adv_std={cfg.adv_std}: nothing is divided by such a std with {key}advantages="
            f"{cfg.advantages.type}, {key}adv_norm={cfg.adv_norm}; leave it out"
        )


def check_actor(cfg: PPOActorConfig, temperature: float) -> None:
    """Raises ConfigError, a ValueError, with everything that is wrong with an actor's settings."""
    sampled = f"temperature={temperature}: training needs sampled tokens; set it above 0"
    raise_if_any(
        [*value_problems(cfg, "actor."), *actor_problems(cfg), *([sampled] * (temperature <= 0))]
    )


def check_critic(cfg: PPOCriticConfig) -> None:
    """Raises ConfigError, a ValueError, with everything that is wrong with a critic's settings."""
    raise_if_any(value_problems(cfg, "critic."))
