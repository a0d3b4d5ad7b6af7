"""Saves and loads the optimizer's part of a training checkpoint.

The distributed optimizer's moments and fp32 weights stand on disk as megatron-core's
"fully_reshardable" format has them, tensors of the model's shapes that any layout reads. Its own
writer gathers them over the data-parallel ranks first, each of which then holds the state of all.
Here every data-parallel rank writes its range of each flattened parameter as a few boxes of the
parameter, and reads it so: nothing is gathered, and any layout can read what another one wrote.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megarl.engine.optimizer import decoupled, kind, parts
from megarl.parallel import mcore  # noqa: F401  before megatron
from megarl.parallel.ranks import Ranks

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import (
    extract_sharded_tensors_and_factories,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

_STATES = ("param", "exp_avg", "exp_avg_sq")
# part of the optimizer -> number of the parameter -> state -> its boxes, in their order
Own = dict[int, dict[int, dict[str, list[ShardedTensor]]]]


def sharded_state(
    optimizer: Any, model_state: dict[str, Any], metadata: dict[str, Any], *, loading: bool
) -> tuple[dict[Any, Any], Own]:
    """Returns (what the ranks share, what is this rank's own) for ckpt.dist.Sharded. `model_state`
    says how parameters are cut; what is loaded goes to `load_state`. Collective."""
    if kind(optimizer) == "plain":
        shared = optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=metadata)
        if not loading:
            _give_step(shared, _steps_of_all_ranks(optimizer))
        return shared, {}
    chained = parts(optimizer)
    if loading:  # makes what is not there yet
        for part in chained:
            part.load_state_dict(part.state_dict())
    form = {"param_state_sharding_type": "fully_reshardable"}  # counts of steps, the loss scale
    common = {i: part.state_dict() | form for i, part in enumerate(chained)}
    shared = common if len(chained) > 1 else common[0]
    if not loading:
        _give_step(shared, _steps_of_all_ranks(optimizer))
    places = _places(model_state)
    own = {i: _boxes(part, places, loading=loading) for i, part in enumerate(chained)}
    return shared, {i: boxes for i, boxes in own.items() if boxes}


def _steps_of_all_ranks(optimizer: Any) -> set[int]:
    """Returns the counts of steps of groups that have parameters here or on another rank.
    Collective.

    Every rank updates all it has, or nothing, so there is one count at most. A group without
    parameters (the experts' on a stage that has none) does not count.
    """
    steps = {
        int(group["step"])
        for part in parts(optimizer)
        for group in part.optimizer.param_groups
        if group["params"] and group.get("step") is not None
    }
    return set().union(*Ranks.of().gather(steps))


def _give_step(shared: dict[Any, Any], steps: Iterable[int]) -> None:
    """Gives all parameter groups of `shared` the one count of `steps`, if there is one: rank 0's
    are saved for every rank, and it may hold no parameters of a group that others have."""
    (step,) = set(steps) or (None,)
    if step is None:
        return
    for group in _saved_groups(shared):
        group["step"] = step


_RATES = ("max_lr", "min_lr")  # the schedule's: alike in every group


def _saved_groups(shared: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yields the parameter groups in an optimizer's state, of one part or of several."""
    if "param_groups" in shared:
        yield from shared["param_groups"]
    elif "optimizer" in shared:
        yield from _saved_groups(shared["optimizer"])
    else:
        for part in shared.values():
            yield from _saved_groups(part)


@torch.no_grad()
def load_state(optimizer: Any, shared: Any, own: dict[int, Any]) -> None:
    """Puts what was loaded into the optimizer: `shared` and `own`, as `sharded_state` laid them
    out. Then sets the model's fp32 parameters; a rank of the distributed optimizer sets its range.

    A checkpoint of a model whose parameters were all 16-bit has fp32 values as main weights only.
    """
    known = (group.get("step") for group in _saved_groups(shared))
    _give_step(shared, {int(step) for step in known if step is not None})
    rates = {k: v for k, v in optimizer.param_groups[0].items() if k in _RATES}
    for group in _saved_groups(shared):  # the config's; megatron-core 0.19 finds a group by them
        group.update(rates)
    if kind(optimizer) == "plain":
        for part in shared.values() if len(parts(optimizer)) > 1 else [shared]:
            _restore_empty(part)
    optimizer.load_state_dict(shared)
    for part in parts(optimizer):
        if hasattr(part, "float16_groups"):
            part._copy_main_params_to_model_params()
    for group in optimizer.param_groups:
        if not group["params"]:  # as in training, where nothing of it is counted
            group.pop("step", None)
    for i, numbered in own.items():
        part = parts(optimizer)[i]
        for (param, start, stop), states in zip(_ranges(part), numbered.values(), strict=True):
            flat = {k: torch.cat([t.flatten() for t in boxes]) for k, boxes in states.items()}
            part._set_main_param_and_optimizer_states(param, flat)
            if param.dtype == torch.float32:
                param.view(-1)[start:stop].copy_(flat["param"])
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            part.optimizer._sync_hdo_state_to_sub_optimizers()


def _restore_empty(part: dict[str, Any]) -> None:
    """Puts back what megatron-core's loader leaves out where it is empty: the state of experts on a
    stage that has none."""
    if "optimizer" in part:  # of 16-bit weights
        part.setdefault("fp32_from_fp16_params", [])
        part = part["optimizer"]
    part.setdefault("state", {})


def _places(model_state: dict[str, Any]) -> dict[Tensor, list[ShardedTensor]]:
    """Returns, by parameter, the parts that checkpoints keep it in, in order (gate, then up)."""
    stored, _ = extract_sharded_tensors_and_factories(model_state)
    places = {}
    for item in nested_values(stored):
        state = item.build() if isinstance(item, ShardedTensorFactory) else [item]
        places[item.data] = list(nested_values(state))
    return places


def _ranges(part: Any) -> Iterator[tuple[Tensor, int, int]]:
    """Yields (parameter, start, stop): the elements of a parameter that are this rank's."""
    for ranges in itertools.chain.from_iterable(
        buckets for buffer in part.gbuf_ranges for buckets in buffer.values()
    ):
        for param, where in ranges["param_map"].items():
            yield param, where["param"].start, where["param"].end


def _boxes(
    part: Any, places: dict[Tensor, list[ShardedTensor]], *, loading: bool
) -> dict[int, dict[str, list[ShardedTensor]]]:
    boxes = {}
    for number, (param, start, stop) in enumerate(_ranges(part)):
        if loading:
            states = {k: torch.empty(stop - start, dtype=torch.float32) for k in _STATES}
        else:
            values = part._get_main_param_and_optimizer_states(param)
            # Transformer Engine's optimizer does not update the main weight of an fp32 parameter.
            if param.dtype == torch.float32:
                values["param"] = param.flatten()[start:stop]
            states = {k: values[k].detach() for k in _STATES}
            if decoupled(part):  # made for us, in fp32: that must not pile up on the device
                states = {k: state.to("cpu", torch.float32) for k, state in states.items()}
        boxes[number] = {
            k: _cut_over(places[param], f"optimizer.state.{k}", start, stop, state)
            for k, state in states.items()
        }
    return boxes


def _cut_over(
    stored: list[ShardedTensor], prefix: str, start: int, stop: int, state: Tensor
) -> list[ShardedTensor]:
    """Cuts `state`, elements [start, stop) of a parameter, over the stored parts that it spans."""
    boxes: list[ShardedTensor] = []
    begin = 0
    for whole in stored:
        end = begin + whole.data.numel()
        low, high = max(start, begin), min(stop, end)
        if low < high:
            part = state[low - start : high - start]
            boxes += cut(whole, f"{prefix}.{whole.key}", low - begin, high - begin, part)
        begin = end
    return boxes


# ---- flat ranges as boxes ----------------------------------------------------------------------


Shape = tuple[int, ...]


def flat_boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Yields (offsets, sizes) of the boxes that are elements [start, stop) of a row-major array of
    `shape`, in their order. There are at most 2 * ndim - 1: the end of a row, whole rows, the
    beginning of a row."""
    if len(shape) <= 1:
        if start < stop:
            yield (start,), (stop - start,)
        return
    rest, width = shape[1:], math.prod(shape[1:])
    while start < stop:
        row, skipped = divmod(start, width)
        if skipped or stop - start < width:  # within a row
            end = min(stop, start - skipped + width)
            for offsets, sizes in flat_boxes(rest, skipped, skipped + end - start):
                yield (row, *offsets), (1, *sizes)
        else:
            rows = (stop - start) // width
            yield (row, *(0 for _ in rest)), (rows, *rest)
            end = start + rows * width
        start = end


def cut(whole: ShardedTensor, key: str, start: int, stop: int, data: Tensor) -> list[ShardedTensor]:
    """Returns the boxes of tensor `key` that are elements [start, stop) of what `whole` is locally,
    with views of `data` [stop - start], which holds them.

    `whole` is a parameter's, alike on the data-parallel ranks; a box belongs to one of them.
    """
    lead = whole.global_offset[: whole.prepend_axis_num]
    inner = whole.global_offset[whole.prepend_axis_num :]
    boxes, at = [], 0
    for offsets, sizes in flat_boxes(tuple(whole.local_shape), start, stop):
        n, shape = math.prod(sizes), (*(1 for _ in lead), *sizes)
        boxes.append(
            replace(
                whole,
                key=key,
                data=data[at : at + n].view(shape),
                dtype=data.dtype,
                local_shape=shape,
                global_offset=(*lead, *(a + b for a, b in zip(inner, offsets, strict=True))),
                axis_fragmentations=None,  # no regular grid
                prepend_axis_num=0,
                replica_id=(*whole.replica_id[:2], 0),  # type: ignore[index]
            )
        )
        at += n
    assert at == data.numel() == stop - start, (whole, start, stop, data.shape)
    return boxes
