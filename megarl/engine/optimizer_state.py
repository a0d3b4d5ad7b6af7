"""The optimizer's part of a training checkpoint.

The distributed optimizer's moments and fp32 weights stand on disk as megatron-core's
"fully_reshardable" format has them, tensors of the model's shapes that any layout reads. Its own
writer gathers them over the data-parallel ranks first, each of which then holds the state of all.
Here every rank writes its range of each parameter as boxes (ckpt/boxes.py) and reads it so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megarl.ckpt.boxes import cut
from megarl.engine.optimizer import decoupled, kind, parts
from megarl.parallel import mcore  # noqa: F401  before megatron

from megatron.core.dist_checkpointing import ShardedTensor  # isort: skip
from megatron.core.dist_checkpointing.dict_utils import nested_values  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory  # isort: skip
from megatron.core.dist_checkpointing.utils import (  # isort: skip
    extract_sharded_tensors_and_factories,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer  # isort: skip

_STATES = ("param", "exp_avg", "exp_avg_sq")
# part of the optimizer -> number of the parameter -> state -> its boxes, in their order
Own = dict[int, dict[int, dict[str, list[ShardedTensor]]]]


def sharded_state(
    optimizer: Any, model_state: dict[str, Any], metadata: dict[str, Any], *, loading: bool
) -> tuple[dict[Any, Any], Own]:
    """(what the ranks share, what is this rank's own) for ckpt.dist.Sharded. `model_state` says how
    parameters are cut; what is loaded goes to `load_state`."""
    if kind(optimizer) == "plain":
        found = optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=metadata)
        return found, {}
    chained = parts(optimizer)
    if loading:  # makes what is not there yet
        for part in chained:
            part.load_state_dict(part.state_dict())
    elif len(chained) > 1:
        optimizer._synchronize_steps()
    common = {i: _common(part) for i, part in enumerate(chained)}
    places = _places(model_state)
    own = {i: _boxes(part, places, loading=loading) for i, part in enumerate(chained)}
    return common if len(chained) > 1 else common[0], own


@torch.no_grad()
def load_state(optimizer: Any, shared: Any, own: dict[int, Any]) -> None:
    """Takes over what was loaded."""
    optimizer.load_state_dict(shared)
    for i, numbered in own.items():
        part = parts(optimizer)[i]
        for (param, _, _), states in zip(_ranges(part), numbered.values(), strict=True):
            flat = {k: torch.cat([t.flatten() for t in boxes]) for k, boxes in states.items()}
            part._set_main_param_and_optimizer_states(param, flat)
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            part.optimizer._sync_hdo_state_to_sub_optimizers()


def _common(part: Any) -> dict[str, Any]:
    """Without its tensors: counts of steps, the loss scale."""
    found: dict[str, Any] = part.state_dict()
    return found | {"param_state_sharding_type": "fully_reshardable"}


def _places(model_state: dict[str, Any]) -> dict[Tensor, list[ShardedTensor]]:
    """Parameter -> the parts that checkpoints keep it in, in their order (gate, then up)."""
    stored, _ = extract_sharded_tensors_and_factories(model_state)
    found = {}
    for item in nested_values(stored):
        built = item.build() if isinstance(item, ShardedTensorFactory) else [item]
        found[item.data] = list(nested_values(built))
    return found


def _ranges(part: Any) -> Iterator[tuple[Tensor, int, int]]:
    """(parameter, start, stop): elements of it that are this rank's."""
    for ranges in itertools.chain.from_iterable(
        buckets for buffer in part.gbuf_ranges for buckets in buffer.values()
    ):
        for param, where in ranges["param_map"].items():
            yield param, where["param"].start, where["param"].end


def _boxes(
    part: Any, places: dict[Tensor, list[ShardedTensor]], *, loading: bool
) -> dict[int, dict[str, list[ShardedTensor]]]:
    found = {}
    for number, (param, start, stop) in enumerate(_ranges(part)):
        if loading:
            states = {k: torch.empty(stop - start, dtype=torch.float32) for k in _STATES}
        else:
            mine = part._get_main_param_and_optimizer_states(param)
            states = {k: mine[k].detach() for k in _STATES}
            if decoupled(part):  # made for us, in fp32: that must not pile up on the device
                states = {k: state.to("cpu", torch.float32) for k, state in states.items()}
        found[number] = {
            k: _cut_over(places[param], f"optimizer.state.{k}", start, stop, state)
            for k, state in states.items()
        }
    return found


def _cut_over(
    stored: list[ShardedTensor], prefix: str, start: int, stop: int, state: Tensor
) -> list[ShardedTensor]:
    """`state`, elements [start, stop) of a parameter stored in parts that follow each other."""
    found: list[ShardedTensor] = []
    begin = 0
    for whole in stored:
        end = begin + whole.data.numel()
        low, high = max(start, begin), min(stop, end)
        if low < high:
            mine = state[low - start : high - start]
            found += cut(whole, f"{prefix}.{whole.key}", low - begin, high - begin, mine)
        begin = end
    return found
