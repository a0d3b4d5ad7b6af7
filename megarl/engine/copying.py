"""Copies weights from engine to engine, of one mesh or of two.

Ranks of the source, of the target, or of both take part; each calls with what it knows of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from megarl.engine import optimizer
from megarl.engine.setup import EngineState
from megarl.models.hf_config import ModelConfig
from megarl.models.piece_table import PieceTable, build_piece_table
from megarl.models.shapes import differing
from megarl.parallel import mcore
from megarl.parallel.groups import model_scope
from megarl.parallel.ranks import Ranks
from megarl.parallel.worlds import everyone, union_group, waiting_for
from megarl.transfer.reallocate import Reallocator

if TYPE_CHECKING:
    from megarl.engine.engine import MegatronEngine


# the model of the source, made anew by each of its initializations, and the plan for its weights
CopyPlan = tuple[ModelConfig, Reallocator]


def copy_weights(
    source: MegatronEngine, target: MegatronEngine, keep: float
) -> tuple[dict[str, float], int]:
    """Returns the metrics of MegatronEngine.copy_weights, and the version of the source, which its
    ranks tell the others. The plan stays with the target, for the next copy from this source."""
    version = source.get_version()
    members = [engine for engine in (target, source) if engine.is_member]
    ranks = source.ranks, target.ranks
    if not members:
        return {"sent": 0.0, "kept": 0.0, "peak": 0.0}, version

    def require_weights() -> None:
        for engine in members:
            engine.memory.require("copy_weights", ("params",))

    with ExitStack() as stack:
        for engine in members:
            stack.enter_context(engine.memory.at_hand(changes=engine is target))
        stack.enter_context(waiting_for(members[0].groups.coords, "copy_weights"))
        if target.copy_plan is None or target.copy_plan[0] is not source.model_config:
            target.copy_plan = source.model_config, _plan(source, target)
        move = target.copy_plan[1]
        given = source.state if source.is_member else None
        taken = target.state if target.is_member else None
        what = "copy_weights from ranks {} to ranks {}".format(*map(list, ranks))
        both = Ranks.of(move.group)
        both.together(require_weights, what=what)
        version = max(both.gather(-1 if given is None else version))
        return _move(move, given, taken, keep), version


def _plan(source: MegatronEngine, target: MegatronEngine) -> Reallocator:
    """Plans the copy of weights between two engines. Raises ValueError for models of unlike shapes,
    and for a target with adapters. Collective over the ranks of both."""
    if target.config.lora is not None:
        raise ValueError(
            "copy_weights: the engine that receives has adapters, whose base would change under "
            "them; leave its `lora` out"
        )
    own, others = (e.model_config.meaning() for e in (target, source))
    if name := differing(own, others):
        raise ValueError(
            f"copy_weights: this engine's model has {name}={own[name]!r}, the other's "
            f"{others[name]!r}; weights go between engines of one model"
        )
    union = tuple(sorted({*source.ranks, *target.ranks}))
    whole = next((e for e in (source, target) if e.ranks == union), None)
    return Reallocator(
        _table(source),
        _table(target),
        union.index(everyone().rank()),
        dtype=source.dtype,
        source_ranks=[union.index(r) for r in source.ranks],
        target_ranks=[union.index(r) for r in target.ranks],
        group=whole.groups.world if whole else union_group(union),
        device=mcore.device(),
    )


def _table(engine: MegatronEngine) -> PieceTable:
    if engine.is_member:
        return engine.state.table
    return build_piece_table(engine.model_config, engine.layout)


def _move(
    move: Reallocator, source: EngineState | None, target: EngineState | None, keep: float
) -> dict[str, float]:
    weights = None
    if source is not None:
        with model_scope(source.groups):
            optimizer.gather_params(source.chunks)
        weights = source.whole_weights()
    if target is None:
        return move(weights, None)
    with model_scope(target.groups):
        if keep:
            begin_average(target)
        else:
            target.average.clear()
        stats = move(weights, target.params | target.average, keep=keep)
        round_off(target)
        optimizer.reload_main_params(target.optimizer)
    return stats


# ---- a moving average in fp32 ------------------------------------------------------------------


def begin_average(state: EngineState) -> None:
    """Makes the average of parameters that are not in fp32 out of them, unless it is there. It
    rests in host memory where the engine's weights do (`offload`)."""
    if state.average:
        return
    for name, param in state.params.items():
        if param.dtype != torch.float32:
            state.average[name] = param.detach().to(
                "cpu" if state.config.offload else None, torch.float32
            )


@torch.no_grad()
def round_off(state: EngineState) -> None:
    """Sets the parameters to their average, where there is one."""
    for name, values in state.average.items():
        state.params[name].copy_(values)


@contextmanager
def average_in_place(state: EngineState) -> Iterator[None]:
    """Has the parameters be their average in fp32 inside, for a checkpoint; what they are then
    loaded with becomes the average (`round_off` then makes it the parameters)."""
    rounded = {name: state.params[name].data for name in state.average}
    for name, values in state.average.items():
        state.params[name].data = values.to(rounded[name].device)
    try:
        yield
    finally:
        for name, data in rounded.items():
            state.average[name].copy_(state.params[name].data)
            state.params[name].data = data
