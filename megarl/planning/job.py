"""Reads what the planner asks for: a model's shapes, and options out of a recipe."""

from __future__ import annotations

import copy
import json
from pathlib import Path
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


def find_shapes(name: str, cards: Path) -> dict[str, Any]:
    """Returns the config.json of model `name` as plain data, without `quantization_config`, which
    describes published files.

    name: a model directory, such a file, or else a path or hub name whose last part, in lower
    case, is or begins with the name of a file of the directory `cards`: of
    meta-llama/Llama-3.1-70B-Instruct it is llama-3.1-70b.json. Raises ValueError where there is
    none of these, or no JSON object in it.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    elif not path.is_file():
        path = _card(path.name.lower(), cards)
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in cards.glob("*.json")))
        raise ValueError(f"no config.json at {name!r}; give a directory, a file or one of: {known}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ValueError(f"{path} is not a JSON file: {e}") from e
    if not isinstance(raw, dict):
        raise ValueError(f"{path} is not a model's config.json: it holds a {type(raw).__name__}")
    return {k: v for k, v in raw.items() if k != "quantization_config"}


def _card(name: str, cards: Path) -> Path:
    """Returns the file whose name is `name` or its longest beginning before a dash."""
    words = name.split("-")
    tries = [cards / f"{'-'.join(words[:n])}.json" for n in range(len(words), 0, -1)]
    return next((path for path in tries if path.is_file()), tries[0])


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
