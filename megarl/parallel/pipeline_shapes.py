"""Tells pipeline stages the shapes of what they receive, which all of them can work out.

Packed micro-batches differ in length, so megatron-core sends a shape before every tensor, and stops
the device to read it. But all ranks of a pipeline cut the same rows into the same micro-batches, in
one order: the k-th tensor from a neighbour is that of a known micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megarl.parallel import mcore  # noqa: F401  before megatron

from megatron.core import parallel_state as ps  # isort: skip
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # isort: skip
from megatron.core.pipeline_parallel.schedules import get_schedule_table  # isort: skip

Shape = list[int]
_NONE: Shape = [0, 0, 0]


@dataclass
class _Coming:
    """Yields the shapes of tensors to come from the stage before, and from the stage after."""

    forward: Iterator[Shape]
    backward: Iterator[Shape]


_coming: list[_Coming] = []  # of the pass under way
_ask = P2PCommunicator._communicate_shapes


def _shapes(self: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool) -> Any:
    if not _coming:
        return _ask(self, send_next, send_prev, recv_prev, recv_next)
    coming = _coming[-1]
    return (
        next(coming.forward) if recv_prev else _NONE,
        next(coming.backward) if recv_next else _NONE,
    )


P2PCommunicator._communicate_shapes = _shapes


@contextmanager
def known_shapes(lengths: Sequence[int], *, chunks: int, config: Any) -> Iterator[None]:
    """Has a pass of megatron-core's schedules send no shapes inside. lengths: of the micro-batches,
    packed tokens of this context-parallel rank. chunks: of this rank's model. config: its
    TransformerConfig. In the scope of the layout's groups."""
    share = config.tensor_model_parallel_size if config.sequence_parallel else 1
    shapes = [[n // share, 1, config.hidden_size] for n in lengths]
    first = ps.is_pipeline_first_stage(ignore_virtual=True)
    last = ps.is_pipeline_last_stage(ignore_virtual=True)
    order = [(i, 0) for i in range(len(lengths))]
    if chunks > 1:
        order = get_schedule_table(len(lengths), chunks, config.microbatch_group_size_per_vp_stage)
    # backward goes through the chunks in reverse: the first of each group is the last chunk
    coming = _Coming(
        iter([shapes[i] for i, chunk in order if not (first and chunk == 0)]),
        iter([shapes[i] for i, chunk in order if not (last and chunk == 0)]),
    )
    _coming.append(coming)
    try:
        yield
    finally:
        _coming.pop()
