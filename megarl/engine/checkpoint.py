"""What a training checkpoint of an engine holds, and putting it back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megarl.api.records import SaveLoadMeta
from megarl.ckpt.dist import describe_model, load_sharded, open_checkpoint, save_sharded
from megarl.ckpt.rng import reseed, rng_state, set_rng_state
from megarl.config.engine import LoRAConfig
from megarl.engine import optimizer as opt
from megarl.models.hf_config import ModelConfig
from megarl.models.lora import is_trained, meaning
from megarl.models.names import unwrap
from megarl.observability.logging import get_logger
from megarl.parallel import mcore
from megarl.parallel.groups import ProcessGroups

import megatron.core  # isort: skip
from megatron.core.dist_checkpointing import ShardedObject  # isort: skip

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """The parts of an engine that a checkpoint is about; without optimizer, weights only. With
    adapters it holds these alone: the weights below them are the model's that the engine starts
    from."""

    model: ModelConfig
    dtype: torch.dtype
    groups: ProcessGroups
    chunks: list[torch.nn.Module]
    optimizer: Any
    schedule: Any
    seed: int
    lora: LoRAConfig | None = None


def check_meta(meta: SaveLoadMeta, *, trained: bool, adapted: bool) -> None:
    """ValueError for a format that does not exist, or optimizer state where there is none."""
    if meta.weight_format not in ("hf", "peft", "dist"):
        raise ValueError(
            f"SaveLoadMeta.weight_format={meta.weight_format!r}: use 'hf', 'peft' or 'dist'"
        )
    if meta.weight_format == "peft" and not adapted:
        raise ValueError(
            "SaveLoadMeta.weight_format='peft': this engine has no adapters; set its `lora`, or "
            "use 'hf'"
        )
    if meta.with_optim and meta.weight_format != "dist":
        raise ValueError(
            f"SaveLoadMeta.with_optim=True: the {meta.weight_format!r} format has no place for "
            "optimizer state; use weight_format='dist'"
        )
    if meta.with_optim and not trained:
        raise ValueError(
            "SaveLoadMeta.with_optim=True, but this engine has no optimizer: set its `optimizer`, "
            "or use with_optim=False"
        )


def save(t: Trainee, path: str, with_optim: bool, version: int) -> None:
    """Collective. Weights; with `with_optim` also optimizer state (moments, step, fp32 weights),
    the schedule's position, every rank's random states, and the weight version."""
    state = _model_state(t)
    if with_optim:
        opt.materialize_state(t.optimizer)
        state["optimizer"] = t.optimizer.sharded_state_dict(dict(state), metadata=_metadata(t))
        state["rng"] = _rng_object(t, rng_state())
    info = _info(t, with_optim) | {"version": version}
    if with_optim:
        info["schedule_steps"] = t.schedule.num_steps
    save_sharded(path, state, info, replicas=t.groups.dp_cp)


def load(t: Trainee, path: str, with_optim: bool) -> dict[str, Any]:
    """Collective. Returns what was saved about the checkpoint ("version", "layout", ...).

    In the layout it was saved in, with `with_optim`, training continues bit for bit. On another
    layout (any tp, pp, vpp, dp) everything is resharded but the random states, which belong to
    ranks: they are seeded anew from the engine's seed and the schedule's position. Learning rate,
    betas and the like come from the engine's config, not from the checkpoint.
    """
    info = open_checkpoint(path, lambda found: _check(t, path, found, with_optim))
    mine = _info(t, with_optim)
    same_ranks = all(info[k] == mine[k] for k in ("layout", "device"))
    state = _model_state(t)
    if with_optim:
        hyperparameters = opt.hyperparameters(t.optimizer)
        state["optimizer"] = t.optimizer.sharded_state_dict(
            dict(state), is_loading=True, metadata=_metadata(t)
        )
        if same_ranks:
            state["rng"] = _rng_object(t, None)
    loaded = load_sharded(path, state, replicas=t.groups.dp_cp)
    _load_model(t, loaded)
    if with_optim:
        t.optimizer.load_state_dict(loaded["optimizer"])
        opt.set_hyperparameters(t.optimizer, hyperparameters)
        opt.set_position(t.schedule, info["schedule_steps"])
        if same_ranks:
            set_rng_state(loaded["rng"])
        else:
            log.info("%s is of another layout (%s): random states start anew", path, info["layout"])
            reseed(t.seed + info["schedule_steps"])
    elif t.optimizer is not None:
        opt.reload_main_params(t.optimizer)
    return info


def _metadata(t: Trainee) -> dict[str, Any]:
    """How megatron-core shall cut its state: by model parameter and layer, so that any layout can
    read it. While a rank saves, its host memory holds its (tp, pp) part of the optimizer state.
    """
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "non_homogeneous_layers": True,
        "dp_cp_group": t.groups.dp_cp,
    }


def _chunk_names(t: Trainee) -> list[str]:
    """megatron-core's optimizer looks for these."""
    return [f"model{i}" for i in range(len(t.chunks))] if len(t.chunks) > 1 else ["model"]


def _model_state(t: Trainee) -> dict[str, Any]:
    """Parameters only: Transformer Engine's extra state is empty outside of fp8, and a checkpoint
    of the local layers has none."""
    states = [unwrap(c).sharded_state_dict(metadata=_metadata(t)) for c in t.chunks]  # type: ignore[operator]
    return {
        name: {k: v for k, v in state.items() if "_extra_state" not in k and _is_kept(k, t)}
        for name, state in zip(_chunk_names(t), states, strict=True)
    }


def _is_kept(name: str, t: Trainee) -> bool:
    return t.lora is None or is_trained(name, t.model)


def _load_model(t: Trainee, loaded: dict[str, Any]) -> None:
    for name, chunk in zip(_chunk_names(t), t.chunks, strict=True):
        found = unwrap(chunk).load_state_dict(loaded[name], strict=False)
        missing = (k for k in found.missing_keys if not k.endswith("_extra_state"))
        lost = [k for k in missing if _is_kept(k, t)]
        assert not lost and not found.unexpected_keys, (lost, found.unexpected_keys)


def _rng_object(t: Trainee, data: Any) -> ShardedObject:
    return ShardedObject("rng", data, (t.groups.layout.world_size,), (t.groups.rank,))


def _info(t: Trainee, with_optim: bool) -> dict[str, Any]:
    info = {
        **describe_model(t.model),
        "dtype": str(t.dtype).removeprefix("torch."),
        "layout": asdict(t.groups.layout),
        "device": mcore.device().type,
        "with_optim": with_optim,
        "optimizer": opt.kind(t.optimizer) if with_optim else None,
        "lora": t.lora and meaning(t.model, t.lora),
        "versions": {
            "torch": torch.__version__,
            "megatron-core": megatron.core.__version__,
        },
    }
    found: dict[str, Any] = json.loads(json.dumps(info))  # as it is read back: lists for tuples
    return found


def _check(t: Trainee, path: str, found: dict[str, Any], with_optim: bool) -> None:
    """ValueError, naming value and fix, if the checkpoint cannot go into this engine."""
    mine = _info(t, with_optim)
    for name, value in mine["model"].items():
        if found["model"].get(name) != value:
            raise ValueError(
                f"{path} is of another model: {name}={found['model'].get(name)!r}, this engine's "
                f"is {value!r}; set the engine's path to the model it was trained from"
            )
    if found.get("lora") != mine["lora"]:
        raise ValueError(
            f"{path} was trained with lora={found.get('lora')}, this engine has {mine['lora']}: "
            "set lora as it was (a merged model is had from weight_format='hf')"
        )
    if not with_optim:
        return
    if not found["with_optim"]:
        raise ValueError(
            f"{path} holds weights only, with_optim=True asks for optimizer state too; load it "
            "with with_optim=False, or another checkpoint"
        )
    for name, field in (("dtype", "dtype"), ("optimizer", "optimizer.distributed")):
        if found[name] != mine[name]:
            raise ValueError(
                f"{path} was trained with {name}={found[name]!r}, this engine has {mine[name]!r}: "
                f"set {field} as it was, or load the weights alone (with_optim=False)"
            )
