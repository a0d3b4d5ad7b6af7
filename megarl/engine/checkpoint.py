"""Moves an engine's weights in and out: files, generation servers, full tensors by HF name.

A training checkpoint of a model with adapters holds these alone: the weights below them are the
model's that the engine starts from. Of a moving average it holds the fp32 numbers. Everything but
`check_meta` is collective, in the scope of the engine's groups.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from megarl.api.records import SaveLoadMeta
from megarl.ckpt.background import PendingSave
from megarl.ckpt.dist import (
    Sharded,
    describe_model,
    load_sharded,
    open_checkpoint,
    save_sharded,
    settle_keys,
)
from megarl.ckpt.dist import begin_save as write_behind
from megarl.ckpt.hf import load_hf, save_hf
from megarl.ckpt.peft import load_peft, save_peft
from megarl.engine import optimizer as opt
from megarl.engine.copying import average_in_place, begin_average, round_off
from megarl.engine.optimizer_state import load_state, sharded_state
from megarl.engine.setup import (
    EngineState,
    head_seed,
    reseed,
    rng_state,
    set_rng_state,
)
from megarl.models.adapters import base_params
from megarl.models.lora import is_trained, meaning
from megarl.models.shapes import differing
from megarl.observability.logging import get_logger
from megarl.parallel import mcore
from megarl.transfer.gather import BucketGatherer, export_dtype, plan_buckets
from megarl.utils.files import Fingerprint
from megarl.weight_sync.receiver.megarl_receiver.fingerprint import hash_text
from megarl.weight_sync.transports import WeightSender, WeightSource
from megarl.weight_sync.verify import weight_hashes

import megatron.core
from megatron.core.dist_checkpointing import ShardedObject

log = get_logger(__name__)

_STATE_BUCKET_BYTES = 256 << 20


def check_meta(meta: SaveLoadMeta, state: EngineState) -> None:
    """Raises ValueError for a format that does not exist, "peft" without adapters, or optimizer
    state where the format or the engine has none."""
    if meta.weight_format not in ("hf", "peft", "dist"):
        raise ValueError(
            f"SaveLoadMeta.weight_format={meta.weight_format!r}: use 'hf', 'peft' or 'dist', the "
            "distributed checkpoint that others call dcp"
        )
    if meta.weight_format == "peft" and state.adapters is None:
        raise ValueError(
            "SaveLoadMeta.weight_format='peft': this engine has no adapters; set its `lora`, or "
            "use 'hf'"
        )
    if meta.with_optim and meta.weight_format != "dist":
        raise ValueError(
            f"SaveLoadMeta.with_optim=True: the {meta.weight_format!r} format has no place for "
            "optimizer state; use weight_format='dist'"
        )
    if meta.with_optim and state.optimizer is None:
        raise ValueError(
            "SaveLoadMeta.with_optim=True, but this engine has no optimizer: set its `optimizer`, "
            "or use with_optim=False"
        )


def save(state: EngineState, meta: SaveLoadMeta, version: int) -> None:
    """Writes to meta.path in meta.weight_format: a training checkpoint, adapters, or an HF
    directory."""
    opt.gather_params(state.chunks)
    base = meta.base_model_path or state.config.path
    if meta.weight_format == "dist":
        with average_in_place(state):
            save_sharded(meta.path, *_to_save(state, meta.with_optim, version))
    elif meta.weight_format == "peft":
        assert state.adapters is not None  # check_meta has seen to it
        save_peft(
            meta.path,
            state.adapters,
            state.groups.rank,
            base_model_path=base,
            tokenizer=meta.tokenizer,
        )
    else:
        save_hf(
            meta.path,
            state.table,
            state.layout,
            state.groups.rank,
            state.whole_weights(),
            base_model_path=base,
            tokenizer=meta.tokenizer,
        )
    state.groups.barrier()


def load(state: EngineState, meta: SaveLoadMeta) -> int | None:
    """Loads meta.path; returns the version that a training state was saved with, None for weights
    alone."""
    version = None
    if meta.weight_format == "dist":
        info = _load_dist(state, meta.path, meta.with_optim)
        version = info["version"] if meta.with_optim else None
    elif meta.weight_format == "peft":
        assert state.adapters is not None
        load_peft(meta.path, state.adapters)
    else:
        weights, seed = base_params(state.params), head_seed(state.config, state.seed)
        rank = state.groups.rank
        load_hf(meta.path, state.table, state.layout, rank, weights, head_seed=seed)
        state.average.clear()
        if state.adapters is not None:  # whole weights come without: these start anew
            state.adapters.reset(state.seed)
    if not meta.with_optim:
        opt.reload_main_params(state.optimizer)
    state.groups.barrier()
    return version


# ---- training checkpoints ----------------------------------------------------------------------


def begin_save(state: EngineState, path: str, with_optim: bool, version: int) -> PendingSave[Any]:
    """Begins a save of the "dist" format; a thread writes the files. Collective."""
    opt.gather_params(state.chunks)
    with average_in_place(state):
        return write_behind(path, *_to_save(state, with_optim, version))


def _to_save(state: EngineState, with_optim: bool, version: int) -> tuple[Sharded, dict[str, Any]]:
    """Returns the weights, and with `with_optim` also optimizer state (moments, step, fp32 weights)
    and every rank's random states; and what is said of them, with the schedule's position."""
    tensors: dict[str, Any] = _model_state(state)
    own: dict[Any, Any] = {}
    if with_optim:
        opt.materialize_state(state.optimizer)
        tensors["optimizer"], own = sharded_state(
            state.optimizer, dict(tensors), _metadata(state), loading=False
        )
        tensors["rng"] = _rng_object(state, rng_state())
    info = _info(state, with_optim) | {"version": version}
    if with_optim:
        info["schedule_steps"] = state.schedule.num_steps
    return Sharded(shared=tensors, own=own, replicas=state.groups.dp_cp), info


def _load_dist(state: EngineState, path: str, with_optim: bool) -> dict[str, Any]:
    """Loads a checkpoint; returns what was saved about it ("version", "layout", ...). Raises
    ValueError, naming value and fix, for one that does not fit this engine. Collective.

    In the layout it was saved in, with `with_optim`, training continues bit for bit. On another
    layout (any tp, pp, vpp, dp) everything is resharded but the random states, which belong to
    ranks: they are seeded anew from the engine's seed and the schedule's position. Learning rate,
    betas and the like come from the engine's config, not from the checkpoint. Without `with_optim`
    the optimizer's fp32 weights are left as they are (optimizer.reload_main_params renews them).
    """
    info = open_checkpoint(path, lambda saved: _check(state, path, saved, with_optim))
    if info.get("averaged"):
        begin_average(state)
    else:
        state.average.clear()
    with average_in_place(state):
        _load(state, path, with_optim, info)
    round_off(state)
    return info


def _load(state: EngineState, path: str, with_optim: bool, info: dict[str, Any]) -> None:
    here = _info(state, with_optim)
    same_ranks = all(info[k] == here[k] for k in ("layout", "device"))
    tensors: dict[str, Any] = _model_state(state)
    own: dict[Any, Any] = {}
    if with_optim:
        hyperparameters = opt.hyperparameters(state.optimizer)
        shared, own = sharded_state(state.optimizer, dict(tensors), _metadata(state), loading=True)
        tensors["optimizer"] = shared
        if same_ranks:
            tensors["rng"] = _rng_object(state, None)
    sharded = Sharded(shared=tensors, own=own, replicas=state.groups.dp_cp)
    loaded, own = load_sharded(path, sharded)
    _load_model(state, loaded)
    if with_optim:
        load_state(state.optimizer, loaded["optimizer"], own)
        opt.gather_params(state.chunks, loaded=True)
        opt.set_hyperparameters(state.optimizer, hyperparameters)
        opt.set_position(state.schedule, info["schedule_steps"])
        if same_ranks:
            set_rng_state(loaded["rng"])
        else:
            log.info("%s is of another layout (%s): random states start anew", path, info["layout"])
            reseed(state.seed + info["schedule_steps"])


def _metadata(state: EngineState) -> dict[str, Any]:
    """Returns how megatron-core cuts its state: by model parameter and layer, so that any layout
    can read it."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "non_homogeneous_layers": True,
        "dp_cp_group": state.groups.dp_cp,
    }


def _chunk_names(state: EngineState) -> list[str]:
    """Returns the names of the chunks that megatron-core's optimizer looks for."""
    return [f"model{i}" for i in range(len(state.chunks))] if len(state.chunks) > 1 else ["model"]


def _model_state(state: EngineState) -> dict[str, Any]:
    """Returns the parameters of each chunk, under the keys they are saved under. Transformer
    Engine's extra state is left out: it is empty outside of fp8, and a checkpoint of the local
    layers has none."""
    states = [m.sharded_state_dict(metadata=_metadata(state)) for m in state.models]
    trained = {
        name: {k: v for k, v in tensors.items() if "_extra_state" not in k and _is_kept(k, state)}
        for name, tensors in zip(_chunk_names(state), states, strict=True)
    }
    settle_keys(trained, state.table)
    return trained


def _is_kept(name: str, state: EngineState) -> bool:
    return state.config.lora is None or is_trained(name, state.model)


def _load_model(state: EngineState, loaded: dict[str, Any]) -> None:
    for name, model in zip(_chunk_names(state), state.models, strict=True):
        keys = model.load_state_dict(loaded[name], strict=False)
        missing = (k for k in keys.missing_keys if not k.endswith("_extra_state"))
        lost = [k for k in missing if _is_kept(k, state)]
        assert not lost and not keys.unexpected_keys, (lost, keys.unexpected_keys)


def _rng_object(state: EngineState, data: Any) -> ShardedObject:
    return ShardedObject("rng", data, (state.groups.layout.world_size,), (state.groups.rank,))


def _info(state: EngineState, with_optim: bool) -> dict[str, Any]:
    info = {
        **describe_model(state.model),
        "dtype": str(state.dtype).removeprefix("torch."),
        "layout": asdict(state.groups.layout),
        "device": mcore.device().type,
        "with_optim": with_optim,
        "optimizer": opt.kind(state.optimizer) if with_optim else None,
        "averaged": bool(state.average),
        "lora": state.config.lora and meaning(state.model, state.config.lora),
        "versions": {
            "torch": torch.__version__,
            "megatron-core": megatron.core.__version__,
        },
    }
    as_read: dict[str, Any] = json.loads(json.dumps(info))  # as it is read back: lists for tuples
    return as_read


def _check(state: EngineState, path: str, saved: dict[str, Any], with_optim: bool) -> None:
    """Raises ValueError, naming value and fix, if the checkpoint cannot go into this engine."""
    own = _info(state, with_optim)
    if name := differing(saved["model"], own["model"]):
        raise ValueError(
            f"{path} is of another model: {name}={saved['model'].get(name)!r}, this engine's is "
            f"{own['model'].get(name)!r}; set the engine's path to the model it was trained from"
        )
    if saved.get("lora") != own["lora"]:
        raise ValueError(
            f"{path} was trained with lora={saved.get('lora')}, this engine has {own['lora']}: "
            "set lora as it was (a merged model is had from weight_format='hf')"
        )
    if not with_optim:
        return
    if not saved["with_optim"]:
        raise ValueError(
            f"{path} holds weights only, with_optim=True asks for optimizer state too; load it "
            "with with_optim=False, or another checkpoint"
        )
    for name, field in (("dtype", "dtype"), ("optimizer", "optimizer.distributed")):
        if saved[name] != own[name]:
            raise ValueError(
                f"{path} was trained with {name}={saved[name]!r}, this engine has {own[name]!r}: "
                f"set {field} as it was, or load the weights alone (with_optim=False)"
            )


# ---- servers, full tensors by HF name ----------------------------------------------------------


def sender(state: EngineState) -> WeightSender:
    """Makes the sender of this engine's weights to servers."""
    source = WeightSource(
        state.table,
        state.layout,
        state.groups.rank,
        state.whole_weights(),
        state.groups.world,
        dtype=state.dtype if state.adapters else None,
        adapters=state.adapters,
        base_model_path=state.config.path,
    )
    return WeightSender(source)


def fingerprints(state: EngineState) -> dict[str, Fingerprint]:
    """Returns the fingerprints of the trained weights; see MegatronEngine.fingerprints."""
    opt.gather_params(state.chunks)
    table = state.trained_table
    sums = weight_hashes(table, state.groups.rank, state.params, mcore.device())
    for per_tensor in sums:
        dist.all_reduce(per_tensor, group=state.groups.world)
    hashes, squares = (per_tensor.tolist() for per_tensor in sums)
    kinds = (str(export_dtype(t, state.dtype)).removeprefix("torch.") for t in table.tensors)
    return {
        tensor.name: Fingerprint(
            hash_text(number), math.sqrt(square), shape=f"{kind} {list(tensor.shape)}"
        )
        for tensor, kind, number, square in zip(table.tensors, kinds, hashes, squares, strict=True)
    }


def hf_state(
    state: EngineState, grads: bool, scope: Callable[[], AbstractContextManager[None]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields full tensors by HF name; see MegatronEngine.hf_state. `scope` is left while the caller
    has a bucket's tensors. Raises ValueError for `grads` without an optimizer."""
    values, table, dtype = state.whole_weights(), state.table, state.dtype
    if grads:
        if state.optimizer is None:
            raise ValueError("this engine has no optimizer, so it keeps no gradients")
        table, dtype = state.trained_table, torch.float32
        trained = {n: p for n, p in state.params.items() if p.requires_grad}
        values = {n: p.main_grad for n, p in trained.items()}  # type: ignore[attr-defined]
    buckets = plan_buckets(table, dtype, _STATE_BUCKET_BYTES)
    gatherer: BucketGatherer | None = None
    for bucket in buckets:
        with scope():
            opt.gather_params(state.chunks)
            gatherer = gatherer or BucketGatherer(
                table, state.groups.rank, values, buckets, device=mcore.device()
            )
            flat = gatherer.gather(bucket)
        if flat is not None:
            yield from bucket.views(flat)
