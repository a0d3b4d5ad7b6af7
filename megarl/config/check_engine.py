"""Checks numbers and precision of one training engine, as far as they are settled without torch."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megarl.config.engine import ALL_LINEAR, LoRAConfig, OptimizerConfig
from megarl.config.rules import OPTIMIZER, rule_problems
from megarl.config.schema import show

_STATE_DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
# fields of megatron-core's OptimizerConfig that keys of ours, the engine's dtype or megarl set
_SET_BY_KEYS = (
    *("optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps"),
    *("clip_grad", "bf16", "fp16", "params_dtype", "use_distributed_optimizer"),
    *("overlap_param_gather", "use_precision_aware_optimizer", "store_param_remainders"),
    *("optimizer_cpu_offload", "optimizer_offload_fraction"),
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
    """Yields options of the optimizer that need others, and loss scales in the wrong order."""
    yield from rule_problems(OPTIMIZER, cfg, f"{key}.")
    yield from _dtype_problems(key, cfg)
    yield from _option_problems(key, cfg)


def _dtype_problems(key: str, cfg: OptimizerConfig) -> Iterator[str]:
    small = [n for n in _STATE_DTYPES if cfg.options.get(n, "float32") != "float32"]
    if small and not cfg.precision_aware:
        shown = f"{key}.options.{small[0]}={cfg.options[small[0]]}"
        yield f"{shown}: needs {key}.precision_aware=true"


def _option_problems(key: str, cfg: OptimizerConfig) -> Iterator[str]:
    known = _fields_of_megatron()
    for name, value in cfg.options.items():
        shown = f"{key}.options.{name}={show(value)}"
        if name in _SET_BY_KEYS:
            yield f"{shown}: a key of {key}, or the engine's dtype, sets it; leave it out"
        elif known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            yield f"{shown}: megatron-core's OptimizerConfig has no such field{meant}"
        elif name in _STATE_DTYPES and value not in ("float32", "bfloat16", "float16"):
            yield f"{shown}: not one of float32, bfloat16, float16"
        elif isinstance(value, str) and known.get(name) in ("float", "int", "bool"):
            yield f"{shown}: not of type {known[name]}"


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
