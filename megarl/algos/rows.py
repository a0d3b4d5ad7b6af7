"""Work on the rows of a Batch, which lie on several ranks, and sums that every rank learns.

B sequences of the batch, b of them (T tokens) held by this rank, S positions. A sum over the batch
is made in two steps: every row by itself, in fp64 and in the order of its tokens, then all rows
with `math.fsum`, which rounds once. So no number depends on who holds which row, on how many
threads a rank has, or on the width that rows were padded to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megarl.api.batch import Batch, Padded, Tokens
from megarl.utils.batch import select

CHUNK_TOKENS = 1 << 20  # padded tokens of one chunk: bounds the memory of work on rows

Data = Batch | Padded  # what roles take; a plain dict is the same on every rank


def as_batch(data: Data) -> Batch:
    """Returns the data as a Batch; every rank holds all rows of what was a plain dict."""
    return data if isinstance(data, Batch) else Batch.from_padded(data)


def put(data: Data, name: str, value: Tokens | Tensor) -> None:
    """Adds a field to the data; to a plain dict a per-token field comes padded to its S."""
    if isinstance(value, Tokens) and not isinstance(data, Batch):
        value = value.padded(width=data["input_ids"].shape[1])
    data[name] = value  # type: ignore[assignment]


def select_rows(data: Data, rows: Sequence[int], names: Sequence[str]) -> Data:
    """Returns some rows (ascending) and fields of the data, and what its units are."""
    if isinstance(data, Batch):
        wanted = [name for name in (*names, "unit_ids") if name in data]
        return data.select(rows, wanted)
    return select({name: data[name] for name in names}, rows)


def only(data: Data, names: Sequence[str]) -> Data:
    """Returns some fields of the data, of all rows."""
    if isinstance(data, Batch):
        return select_rows(data, range(len(data)), names)
    return {name: data[name] for name in names}


def total(per_row: Tensor) -> float:
    """Returns the sum of [B] numbers, rounded once; NaN or Inf where one of them is."""
    finite = bool(per_row.isfinite().all())
    return math.fsum(per_row.tolist()) if finite else float(per_row.sum())


def row_sums(batch: Batch, values: Tensor) -> Tensor:
    """Returns the sum of `values` [T] or [T,k] over each row, [B] or [B,k] float64 on every rank.

    Collective. T are the tokens this rank holds, row after row.
    """
    return batch.gather(_by_row(batch, values.double(), "sum"))


def row_maxima(batch: Batch, values: Tensor) -> Tensor:
    """Returns the largest of `values` [T] in each row, [B] float64 on every rank, -inf for a row
    without tokens. Collective.
    """
    return batch.gather(_by_row(batch, values.double(), "max"))


def _by_row(batch: Batch, values: Tensor, reduce: str) -> Tensor:
    lengths = batch.lengths[batch.rows]
    if not len(lengths):
        return values  # segment_reduce refuses to work on no rows
    return torch.segment_reduce(values, reduce, lengths=lengths)


def trained_tokens(batch: Batch) -> Tensor:
    """Returns how many tokens of each row loss_mask marks, [B] float64 on every rank."""
    return row_sums(batch, batch["loss_mask"].values)


def moments(batch: Batch, values: Tensor, mask: Tensor) -> tuple[int, float, float]:
    """Returns count, mean and sum of squared deviations of `values` [T] where `mask` [T] is set,
    over the whole batch; the mean of nothing is 0. Collective: two passes.
    """
    mask = mask.bool()
    counted = torch.stack([mask.double(), values.double().where(mask, 0.0)], 1)
    counts, sums = row_sums(batch, counted).unbind(1)
    count = int(total(counts))
    mean = total(sums) / max(1, count)
    squares = row_sums(batch, (values.double() - mean).square().where(mask, 0.0))
    return count, mean, total(squares)


def map_rows(
    batch: Batch, fn: Callable[[Tensor, Padded], tuple[Tensor, ...]], names: Sequence[str]
) -> tuple[Tokens, ...]:
    """Returns what `fn(rows, padded)` makes of the rows this rank holds, some at a time.

    `rows` [c] are numbers of rows of the batch, `padded` their fields `names`: [c,S], or [c] for a
    per-sample field. The results are [c,S,...], and come back as Tokens of all held rows.
    """
    parts = []
    chunks = batch.chunks(CHUNK_TOKENS, names) if len(batch.rows) else [_no_rows(batch, names)]
    for rows, padded in chunks:
        lengths = batch.lengths[rows]
        parts.append([Tokens.from_padded(made, lengths) for made in fn(rows, padded)])
    return tuple(Tokens.concat(pieces) for pieces in zip(*parts, strict=True))


def _no_rows(batch: Batch, names: Sequence[str]) -> tuple[Tensor, Padded]:
    return batch.rows, batch.padded([], names)
