"""Reads what the planner asks for, a model's shapes and options out of a recipe, and says what
memory it takes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megarl.config.algo import RefConfig
from megarl.config.engine import TrainEngineConfig
from megarl.config.presets import AllocationMode
from megarl.config.recipe_engines import (
    FROZEN,
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
from megarl.models.hf_config import TEXT, ModelConfig, language_model, parse_hf_config
from megarl.parallel.layout import Layout
from megarl.planning.advice import Cluster, make_layout
from megarl.planning.memory import (
    FP32,
    StageMemory,
    Workload,
    model_bytes,
    server_weights,
    training_memory,
    turn_memory,
)

GIB = 1 << 30
_LONGEST = 2048  # tokens of a prompt where the data set has no max_length
_SIZES = {"float16": 2, "bfloat16": 2, "uint8": 1, "fp8": 1}  # of a dtype beside fp32


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
    if isinstance(text := raw.get(TEXT), dict):
        raw[TEXT] = {k: v for k, v in text.items() if k != "quantization_config"}
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
        **_kept(engine),
        "recompute": "full" if engine.recompute_granularity == "full" else "none",
        **{degree: getattr(p, degree) for degree in ("tp", "pp", "vpp", "cp", "ep", "etp")},
    }


def _kept(engine: TrainEngineConfig) -> dict[str, Any]:
    """Returns the fields of a Workload that say how much an engine keeps of what, in which
    precision. Of the optimizer's state a part may be in host memory."""
    options = engine.optimizer.options if engine.optimizer is not None else {}
    kinds = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    size = sum(_SIZES.get(str(options.get(kind)), FP32) for kind in kinds)
    if options.get("optimizer_cpu_offload"):
        size *= 1 - options.get("optimizer_offload_fraction", 1.0)
    return {
        "state_bytes": size,
        "fp8": engine.fp8 != "none",
        "head_chunk_tokens": engine.options.get("lm_head_chunk_tokens", 4096),
        "head_keep_bytes": engine.options.get("lm_head_keep_mb", 1024) << 20,
    }


def workload(answers: Mapping[str, Any], **more: Any) -> Workload:
    """Returns the workload that `answers`, options of tools/plan.py by name, describe."""
    names = {field.name for field in fields(Workload)}
    return Workload(**{k: v for k, v in answers.items() if k in names} | more)


def other_models(cfg: BaseConfig, gpus: int, read: Callable[[str], ModelConfig]) -> tuple[int, int]:
    """Returns the bytes that the engines beside the policy have on the fullest of `gpus` GPUs: of
    all that are there always, and of the largest that is there for its own passes alone. read:
    gives the model of a path. Raises ValueError for a layout that does not fit."""
    turns = isinstance(cfg, GRPOConfig) and _takes_turns(cfg)
    always = passing = 0
    for name, engine in list(engines(cfg).items())[1:]:
        if name == "ref" and ref_is_below_adapters(cfg):
            continue
        m = read(model_path(cfg, name))
        layout = make_layout(m, gpus, engine.parallel)
        average = isinstance(engine, RefConfig) and bool(engine.ema)
        work = Workload(**_kept(engine))
        size = model_bytes(m, layout, work, trained=name not in FROZEN, average=average)
        if name in FROZEN and (engine.offload or turns):
            passing = max(passing, size)
        else:
            always += size
    return always, passing


def expected_memory(cfg: BaseConfig, raw: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of what a recipe takes of each GPU, of the fewest H100 that it runs on. raw:
    the config.json of each model, by its path."""

    def read(path: str) -> ModelConfig:
        return parse_hf_config(language_model(raw[path]), path)

    answers, gpus = questions(cfg), smallest_world_size(cfg)
    m, parallel = read(answers["model"]), next(iter(engines(cfg).values())).parallel
    others, resting = other_models(cfg, gpus, read)
    work = workload(answers, others=others, resting=resting)
    yield from memory_report(m, make_layout(m, gpus, parallel), work, Cluster(), answers)


def memory_report(
    m: ModelConfig,
    layout: Layout,
    work: Workload,
    cluster: Cluster,
    answers: Mapping[str, Any],
) -> Iterator[str]:
    """Yields the lines of a plan that say what each GPU holds, and whether it fits. answers: of
    servers, the options of tools/plan.py by name."""
    stages = training_memory(m, layout, work)
    names = list(vars(stages[0]))
    yield "GiB per GPU  " + "".join(f"{n:>12}" for n in (*names, "total"))
    shown = {0, len(stages) - 1, max(range(len(stages)), key=lambda i: stages[i].total)}
    for i in sorted(shown):
        values = (*(getattr(stages[i], n) for n in names), stages[i].total)
        yield f"  stage {i:<5}" + "".join(f"{v / GIB:12.1f}" for v in values)
    yield _verdict(max(s.total for s in stages), cluster)
    if answers.get("turns"):
        yield from _turns(m, stages, cluster, answers)


def _turns(
    m: ModelConfig, stages: Sequence[StageMemory], cluster: Cluster, answers: Mapping[str, Any]
) -> Iterator[str]:
    weights = server_weights(m, answers["server_tp"]) // (2 if answers["server_fp8"] else 1)
    room = max(0, int(answers["server_memory"] * cluster.gpu_bytes) - weights)
    buckets = 2 * answers["bucket_mb"] << 20
    turns = turn_memory(stages, weights=weights, kv_cache=room, buckets=buckets)
    yield "servers and trainers in turn, GiB per GPU: " + ", ".join(
        f"{turn} {n / GIB:.1f}" for turn, n in turns.items()
    )
    yield _verdict(max(turns.values()), cluster)


def _verdict(nbytes: int, cluster: Cluster) -> str:
    need = nbytes + cluster.reserve
    verdict = "fits" if need <= cluster.gpu_bytes else "does NOT fit"
    return (
        f"  {need / GIB:.1f} GiB with {cluster.reserve / GIB:.0f} GiB for CUDA, NCCL and gaps: "
        f"{verdict} {cluster.gpu_bytes / GIB:.0f} GiB"
    )


def _generation(cfg: GRPOConfig) -> dict[str, Any]:
    server, sync, pool = cfg.server, cfg.weight_sync, cfg.cluster.server_pool
    turns, options = _takes_turns(cfg), server.options
    return {
        "serve": _grid(server.count * server.gpus, pool or cfg.cluster) if server.count else None,
        "server_tp": server.tp,
        "server_fp8": sync.options.get("quantization") == "fp8_block",
        "server_memory": float(options.get("mem_fraction_static") or (0.8 if turns else 0.85)),
        "bucket_mb": sync.bucket_mb,
        "turns": turns,
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
