"""Copies weights from engine to engine, of one mesh or of two.

Ranks of the source, of the target, or of both take part; each calls with what it knows of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.ckpt.dist import describe_model
from megarl.engine import optimizer
from megarl.engine.offload import Memory
from megarl.engine.setup import EngineState, Resolved
from megarl.models.piece_table import PieceTable, build_piece_table
from megarl.parallel import mcore
from megarl.parallel.agreement import together
from megarl.parallel.groups import model_scope, waiting_for
from megarl.parallel.worlds import everyone, union_group
from megarl.transfer.reallocate import Reallocator


@dataclass(frozen=True, kw_only=True)
class WeightHolder:
    """Says how an engine holds its weights.

    ranks: which of all ranks hold them, as the layout's ranks 0, 1, ...
    here:  what this rank holds of them, and the keeper of its memory; None on another rank.
    """

    what: Resolved
    adapted: bool
    ranks: tuple[int, ...]
    here: tuple[EngineState, Memory] | None

    @property
    def state(self) -> EngineState | None:
        """Returns what this rank holds."""
        return self.here[0] if self.here else None

    @property
    def table(self) -> PieceTable:
        """Returns where every HF tensor lives."""
        if self.state is not None:
            return self.state.table
        return build_piece_table(self.what.model, self.what.layout)

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)}"


class WeightCopier:
    """Copies weights into one engine, and keeps the plan for the next copy from the same source."""

    def __init__(self) -> None:
        self._plan: tuple[Resolved, Reallocator] | None = None

    def copy(
        self, source: WeightHolder, target: WeightHolder, *, keep: float, version: int
    ) -> tuple[dict[str, float], int]:
        """Returns the metrics of MegatronEngine.copy_weights, and the `version` of the source,
        which its ranks tell the others."""
        ends = [held.here for held in (target, source) if held.here is not None]
        if not ends:
            return {"sent": 0.0, "kept": 0.0, "peak": 0.0}, version

        def look() -> None:
            for _, memory in ends:
                memory.require("copy_weights", ("params",))

        with ExitStack() as stack:
            for held, memory in ends:
                changes = target.here is not None and held is target.here[0]
                stack.enter_context(memory.at_hand(changes=changes))
            stack.enter_context(waiting_for(ends[0][0].groups, "copy_weights"))
            if self._plan is None or self._plan[0] is not source.what:
                self._plan = source.what, _plan(source, target)
            move = self._plan[1]
            if source.ranks == target.ranks:
                look()
            else:  # what fails on the ranks of one engine, those of the other hear of
                together(f"copy_weights from {source} to {target}", look, move.group)
                version = _told(move, source.state, version)
            return _move(move, source.state, target.state, keep), version


def _plan(source: WeightHolder, target: WeightHolder) -> Reallocator:
    """Plans the copy of weights between two engines. Raises ValueError for models of unlike shapes,
    and for a target with adapters. Collective over the ranks of both."""
    if target.adapted:
        raise ValueError(
            "copy_weights: the engine that receives has adapters, whose base would change under "
            "them; leave its `lora` out"
        )
    mine, theirs = (describe_model(h.what.model)["model"] for h in (target, source))
    for name, value in mine.items():
        if theirs[name] != value:
            raise ValueError(
                f"copy_weights: this engine's model has {name}={value!r}, the other's "
                f"{theirs[name]!r}; weights go between engines of one model"
            )
    union = tuple(sorted({*source.ranks, *target.ranks}))
    whole = next((h.state for h in (source, target) if h.ranks == union), None)
    return Reallocator(
        source.table,
        target.table,
        union.index(everyone().rank()),
        dtype=source.what.dtype,
        source_ranks=[union.index(r) for r in source.ranks],
        target_ranks=[union.index(r) for r in target.ranks],
        group=whole.groups.world if whole else union_group(union),
        device=mcore.device(),
    )


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


def _told(move: Reallocator, source: EngineState | None, version: int) -> int:
    """Returns the source's version on all ranks of both engines. Collective over those."""
    known = torch.tensor([-1 if source is None else version], device=mcore.device())
    dist.all_reduce(known, dist.ReduceOp.MAX, move.group)
    return int(known.item())


# ---- a moving average in fp32 ------------------------------------------------------------------


def begin_average(state: EngineState) -> None:
    """Makes the average of parameters that are not in fp32 out of them, unless it is there. It
    rests in host memory where the engine's weights do (`offload`)."""
    if state.average:
        return
    for name, param in state.params.items():
        if param.dtype != torch.float32:
            state.average[name] = _at_rest(state, param.detach().float())


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


def _at_rest(state: EngineState, values: torch.Tensor) -> torch.Tensor:
    return values.cpu() if state.config.offload else values
