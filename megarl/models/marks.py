"""Marks parameters for megatron-core's data parallelism and gradient norm."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megarl.models.piece_table import PieceTable
from megarl.parallel.layout import Coords


def mark_params(table: PieceTable, c: Coords, params: Mapping[str, Tensor]) -> None:
    """Sets the marks of all parameters of the rank at `c`, by canonical name, from the piece table.
    Raises AssertionError unless they are the table's.

    tensor_model_parallel: the gradient norm counts such a parameter on every tensor-parallel rank,
    and any other on the first alone. Layers cannot be trusted with it: Transformer Engine leaves
    the mark out of grouped experts since 2.13, and sets it on projections that every rank repeats.

    allreduce=False: an expert's gradient is averaged over the ranks that hold the expert.
    megatron-core says so for ep > 1 only: with etp unlike tp it would average an expert over the
    wrong ranks, and a checkpoint of another ep would have its optimizer state under other names.
    """
    table.check_params(c, {name: param.shape for name, param in params.items()})
    for name, local in table.local_params(c).items():
        if name in table.buffers:
            continue
        param = params[name]
        param.tensor_model_parallel = not local.replicated  # type: ignore[attr-defined]
        if local.place.ep is not None:
            param.allreduce = False  # type: ignore[attr-defined]
