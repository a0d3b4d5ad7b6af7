"""Reads what the planner asks for out of a recipe's configuration."""

from __future__ import annotations

import copy
from typing import Any

from megarl.config.presets import AllocationMode
from megarl.config.recipe_engines import (
    engines,
    model_path,
    ref_is_below_adapters,
    settle_turns,
    smallest_world_size,
    takes_turns,
)
from megarl.config.recipes import BaseConfig, GRPOConfig, data_purpose
from megarl.config.rollout import built_in_transport
from megarl.config.run import ClusterConfig, PoolConfig

_LONGEST = 2048  # tokens of a prompt where the data set has no max_length


def questions(cfg: BaseConfig) -> dict[str, Any]:
    """Returns the options of tools/plan.py, by name, that the configuration answers: those of its
    first engine, the policy. Sequences are taken to be as long as they may become. `train` is what
    allocation_mode says, else the fewest GPUs that the layouts fit."""
    name, engine = next(iter(engines(cfg).items()))
    p, data = engine.parallel, cfg.train_dataset
    sequence = data.max_length or _LONGEST
    samples = data.batch_size * (2 if data_purpose(cfg) == "pairs" else 1)
    found: dict[str, Any] = {}
    if isinstance(cfg, GRPOConfig):
        sequence += cfg.gconfig.max_new_tokens
        samples *= cfg.gconfig.n_samples
        found = _generation(cfg)
    return found | {
        "model": model_path(cfg, name),
        "train": _grid(smallest_world_size(cfg), cfg.cluster),
        "split": p.pipeline_split,
        "batch_tokens": samples * sequence,
        "micro_batch_tokens": engine.mb_spec.max_tokens_per_mb * p.cp,
        "sequence": sequence,
        "recompute": "full" if engine.recompute_granularity == "full" else "none",
        **{degree: getattr(p, degree) for degree in ("tp", "pp", "vpp", "cp", "ep", "etp")},
    }


def _generation(cfg: GRPOConfig) -> dict[str, Any]:
    ref, server, sync, pool = cfg.ref, cfg.server, cfg.weight_sync, cfg.cluster.server_pool
    resident = ref is not None and not ref.offload and not ref_is_below_adapters(cfg)
    return {
        "reference": resident,
        "serve": _grid(server.count * server.gpus, pool or cfg.cluster) if server.count else None,
        "server_tp": server.tp,
        "server_fp8": sync.options.get("quantization") == "fp8_block",
        "server_memory": float(server.options.get("mem_fraction_static", 0.85)),
        "bucket_mb": sync.bucket_mb,
        "turns": _takes_turns(cfg),
    }


def _takes_turns(cfg: GRPOConfig) -> bool:
    """Returns whether servers and trainers would use the same GPUs in turn, as far as that does not
    depend on how many there are."""
    transport = built_in_transport(cfg.weight_sync.type)
    shared = transport is not None and transport.requirements.shares_devices
    mode = cfg.allocation_mode
    shared |= bool(mode) and AllocationMode.from_str(mode).colocated
    settled = copy.deepcopy(cfg)
    settle_turns(settled, shared=shared)
    return takes_turns(settled)


def _grid(gpus: int, pool: ClusterConfig | PoolConfig) -> str:
    """Returns GPUs as NODESxGPUS of a node."""
    per_node = min(gpus, pool.n_gpus_per_node)
    return f"{-(-gpus // per_node)}x{per_node}"
