"""Checks numbers and precision of one training engine, as far as they are settled without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.config.engine import ALL_LINEAR, LoRAConfig, OptimizerConfig, TrainEngineConfig

_STATE_DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def precision_problems(key: str, cfg: TrainEngineConfig) -> Iterator[str]:
    """Yields settings of fp8 and of offloading that do not go with the engine's dtype, layers or
    recomputation."""
    if cfg.fp8 != "none":
        if cfg.dtype not in ("auto", "bfloat16"):
            yield f"{key}.fp8={cfg.fp8}: needs {key}.dtype=bfloat16 (it is {cfg.dtype})"
        if cfg.attention == "sdpa":
            yield (
                f"{key}.fp8={cfg.fp8}: needs Transformer Engine's layers; set {key}.attention=te"
            )
    if cfg.offload_activations and cfg.recompute_granularity != "full":
        yield (
            f"{key}.offload_activations=true: copies everything that autograd keeps, and waits for "
            f"it; set {key}.recompute_granularity=full, which leaves the inputs of the layers"
        )
    moves = cfg.optimizer is not None and cfg.optimizer.cpu_offload
    if moves and cfg.dtype not in ("auto", "bfloat16"):
        yield f"{key}.optimizer.cpu_offload=true: needs {key}.dtype=bfloat16 (it is {cfg.dtype})"


def sharing_problems(prefix: str, cfg: TrainEngineConfig) -> Iterator[str]:
    """Yields settings that mb_spec.share_prefixes does not go with, each named after `prefix`."""
    if not cfg.mb_spec.share_prefixes:
        return
    share = f"{prefix}mb_spec.share_prefixes=true"
    if cfg.parallel.cp > 1:
        yield f"{share}: not under context parallelism; set {prefix}parallel.cp=1"
    if cfg.fp8 != "none":
        yield f"{share}: not with FP8; set {prefix}fp8=none"


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
    yield from _sharding_problems(key, cfg)
    yield from _loss_scale_problems(key, cfg)


def _sharding_problems(key: str, cfg: OptimizerConfig) -> Iterator[str]:
    for name in ("overlap_param_gather", "precision_aware", "cpu_offload"):
        if getattr(cfg, name) and not cfg.distributed:
            yield f"{key}.{name}=true: needs {key}.distributed=true"
    if cfg.overlap_param_gather and not cfg.overlap_grad_reduce:
        yield f"{key}.overlap_param_gather=true: needs {key}.overlap_grad_reduce=true"
    small = [n for n in _STATE_DTYPES if getattr(cfg, n) != "float32"]
    if small and not cfg.precision_aware:
        yield f"{key}.{small[0]}={getattr(cfg, small[0])}: needs {key}.precision_aware=true"
    if cfg.cpu_offload and cfg.precision_aware:
        yield (
            f"{key}.cpu_offload=true: keeps main weights and moments in float32 on the CPU; set "
            f"{key}.precision_aware=false"
        )


def _loss_scale_problems(key: str, cfg: OptimizerConfig) -> Iterator[str]:
    if 0 < cfg.initial_loss_scale < cfg.min_loss_scale:
        yield (
            f"{key}.initial_loss_scale={cfg.initial_loss_scale}: must be at least "
            f"{key}.min_loss_scale={cfg.min_loss_scale}"
        )
