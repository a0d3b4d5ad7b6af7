"""Works on the rows of a Batch, which lie on several ranks, makes sums that every rank learns, and
knows which rows are of one rollout.

B sequences of the batch, b of them (T tokens) held by this rank, R rollouts, S positions. A sum
over the batch is made in two steps: every row by itself, in fp64 and in the order of its tokens,
then all rows with `math.fsum`, which rounds once. So no number depends on who holds which row, on
how many threads a rank has, or on the width that rows were padded to.

A rollout whose conversation forked has a row for each of its branches. Numbers about rewards are of
rollouts: one with five rows counts once in the mean of its group, and all its rows get its
advantage.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from megarl.api.batch import UNITS, Batch, Padded, Tokens
from megarl.api.tokens import select

CHUNK_TOKENS = 1 << 20  # padded tokens of one chunk: bounds the memory of work on rows

P = ParamSpec("P")
T = TypeVar("T")
Data = Batch | Padded  # what roles take; a plain dict is the same on every rank


def as_batch(data: Data) -> Batch:
    """Returns the data as a Batch; every rank holds all rows of what was a plain dict."""
    return data if isinstance(data, Batch) else Batch.from_padded(data)


def where_it_lies(fn: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Has a function of a batch run where the batch's tokens are: here, or (RemoteBatch) on the
    workers that hold them. The batch is its first argument, the result plain data."""

    @wraps(fn)
    def run(data: Any, *args: P.args, **kw: P.kwargs) -> T:
        group = getattr(data, "group", None)
        if group is None:
            return fn(data, *args, **kw)
        found: T = group.call(run, data, *args, **kw)
        return found

    return run


def put(data: Data, name: str, value: Tokens | Tensor) -> None:
    """Adds a field to the data; to a plain dict a per-token field comes padded to its [B,S]."""
    if isinstance(value, Tokens) and not isinstance(data, Batch):
        value = value.padded(width=data["input_ids"].shape[1])
    data[name] = value  # type: ignore[assignment]


def select_rows(data: Data, rows: Sequence[int], names: Sequence[str]) -> Data:
    """Returns some rows (ascending) and the fields `names` of the data, and those that say which
    rows stay together."""
    wanted = dict.fromkeys([*names, *(name for name in UNITS if name in data)])
    if isinstance(data, Batch):
        return data.select(rows, [name for name in wanted if name in data])
    return select({name: data[name] for name in wanted}, rows)


def only(data: Data, names: Sequence[str]) -> Data:
    """Returns some fields of the data, of all rows."""
    if isinstance(data, Batch):
        return select_rows(data, range(len(data)), names)
    return {name: data[name] for name in names}


def total(per_row: Tensor) -> float:
    """Returns the sum of [B] or [B,1] numbers, rounded once; NaN or Inf where one of them is."""
    finite = bool(per_row.isfinite().all())
    return math.fsum(per_row.flatten().tolist()) if finite else float(per_row.sum())


def reduce_rows(
    batch: Batch, fn: Callable[[Padded], Sequence[Tensor]], names: Sequence[str], how: str = "sum"
) -> Tensor:
    """Returns the sums (`how`: "sum") or maxima ("max") of k columns over each row, [B,k] float64
    on every rank; the maximum of an empty row is -inf. Collective.

    `fn` is given the per-token fields `names` of some whole rows, flat [t,...], and returns k
    columns [t]. It sees CHUNK_TOKENS or one row at a time, so that its temporaries stay small.
    """
    found = []
    for lengths, part in _flat_parts(batch, names):
        found.append(torch.stack([_by_row(column, lengths, how) for column in fn(part)], 1))
    return batch.gather(torch.cat(found))


def map_tokens(batch: Batch, fn: Callable[[Padded], Tensor], names: Sequence[str]) -> Tokens:
    """Returns what `fn` makes of each token by itself: it is given flat fields `names` [t,...] of
    some rows at a time, and returns [t,...]."""
    parts = [fn(part) for _, part in _flat_parts(batch, names)]
    return Tokens(torch.cat(parts), batch.lengths[batch.rows])


def _flat_parts(batch: Batch, names: Sequence[str]) -> Iterator[tuple[Tensor, Padded]]:
    """Yields (lengths, views of the fields) of the held rows, some at a time; once at least."""
    lengths = batch.lengths[batch.rows]
    ends = lengths.cumsum(0).tolist()
    row = token = 0
    while True:
        last = max(bisect_right(ends, token + CHUNK_TOKENS), min(row + 1, len(ends)))
        end = ends[last - 1] if last else 0
        yield lengths[row:last], {name: batch[name].values[token:end] for name in names}
        row, token = last, end
        if row == len(ends):
            return


def _by_row(values: Tensor, lengths: Tensor, how: str) -> Tensor:
    if not len(lengths):
        return values.double()  # segment_reduce refuses to work on no rows
    return torch.segment_reduce(values.double(), how, lengths=lengths)


def trained_tokens(batch: Batch) -> Tensor:
    """Returns how many tokens of each row loss_mask marks, [B] float64 on every rank."""
    return reduce_rows(batch, lambda part: [part["loss_mask"]], ["loss_mask"])[:, 0]


def moments(
    batch: Batch, column: Callable[[Padded], Tensor], names: Sequence[str]
) -> tuple[int, float, float]:
    """Returns count, mean and sum of squared deviations of `column` over the trained tokens of the
    whole batch; the mean of nothing is 0. Collective: two passes.

    `column` makes [t] numbers of flat fields `names`, as `fn` of reduce_rows does.
    """
    fields = [*names, "loss_mask"]

    def counted(part: Padded) -> list[Tensor]:
        mask = part["loss_mask"].bool()
        return [mask, column(part).double().where(mask, 0.0)]

    counts, sums = reduce_rows(batch, counted, fields).unbind(1)
    count = int(total(counts))
    mean = total(sums) / max(1, count)

    def squared(part: Padded) -> list[Tensor]:
        deviation = column(part).double() - mean
        return [deviation.square().where(part["loss_mask"].bool(), 0.0)]

    return count, mean, total(reduce_rows(batch, squared, fields))


def map_rows(
    batch: Batch, fn: Callable[[Tensor, Padded], tuple[Tensor, ...]], names: Sequence[str]
) -> tuple[Tokens, ...]:
    """Returns what `fn(rows, padded)` makes of the rows this rank holds, some at a time.

    `rows` [c] are numbers of rows of the batch, `padded` their fields `names`: [c,S], or [c] for a
    per-sample field. The results are [c,S,...], and come back as Tokens of all held rows.
    """
    order = batch.lengths[batch.rows].argsort(stable=True)  # rows of like length: little padding
    held, parts = batch.rows[order], []
    chunks = batch.chunks(CHUNK_TOKENS, names, rows=held)
    for rows, padded in chunks if len(held) else [(held, batch.padded(held, names))]:
        made = fn(rows, padded)
        parts.append([Tokens.from_padded(values, batch.lengths[rows]) for values in made])
    back = order.argsort()
    return tuple(Tokens.concat(pieces).take(back) for pieces in zip(*parts, strict=True))


# ---- rollouts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollouts:
    """Holds the rollout of every row, of_row [B], counted from 0 in the order of their first rows,
    which are first [R]."""

    of_row: Tensor
    first: Tensor

    def __len__(self) -> int:
        """Returns R."""
        return len(self.first)

    def of_first(self, values: Tensor) -> Tensor:
        """Returns of `values` [B] those of the rollouts' first rows, [R]."""
        return values[self.first]

    def common(self, values: Tensor, name: str) -> Tensor:
        """Returns the rollouts' `values`: [B] -> [R]. Raises ValueError, with the field's `name`,
        where rows of one rollout differ."""
        of_rollout = values[self.first]
        other = of_rollout[self.of_row]
        same = (other == values) | (other.isnan() & values.isnan())
        differs = (~same).nonzero().flatten().tolist()
        if differs:
            row, first = differs[0], int(self.first[self.of_row[differs[0]]])
            raise ValueError(
                f"{name} of rows {first} and {row} are {values[first].item():g} and "
                f"{values[row].item():g}, and they are branches of one rollout: what a rollout "
                "earned stands on each of its rows; have the workflow score whole rollouts"
            )
        return of_rollout

    def sums(self, values: Tensor) -> Tensor:
        """Returns the sums over the rows of each rollout: [B] -> [R], of the dtype of `values`."""
        if len(self) == len(values):
            return values[self.first]
        return values.new_zeros(len(self)).index_add(0, self.of_row, values)

    def spread(self, values: Tensor) -> Tensor:
        """Returns the rollouts' `values` on each of their rows: [R] -> [B]."""
        return values[self.of_row]

    def any(self, mask: Tensor) -> Tensor:
        """Returns whether `mask` [B] is true of a row of the rollout, [R] bool."""
        return self.sums(mask.long()) > 0


def rollouts_of(data: Data | Mapping[str, Tensor]) -> Rollouts:
    """Returns the rollouts by rollout_ids [B]; without the field every row is one."""
    ids = data.get("rollout_ids")
    if ids is None:
        each = torch.arange(len(data) if isinstance(data, Batch) else len(data["input_ids"]))
        return Rollouts(each, each)
    _, index = ids.unique(return_inverse=True)
    rows = torch.arange(len(ids))
    first = rows.new_zeros(int(index.max()) + 1)
    first = first.scatter_reduce(0, index, rows, "amin", include_self=False)
    order = first.argsort()
    return Rollouts(order.argsort()[index], first[order])


def refuse_branches(data: Data, who: str) -> None:
    """Raises ValueError where a rollout has several rows, which `who` cannot work with."""
    rollouts = rollouts_of(data)
    rows = torch.bincount(rollouts.of_row)
    if len(rows) < len(rollouts.of_row):
        first = int(rollouts.first[int((rows > 1).nonzero()[0])])
        raise ValueError(
            f"{who}: {int((rows > 1).sum())} of {len(rows)} rollouts forked, the first at row "
            f"{first}, into {int(rows.max())} rows at most; where a conversation forks, a state "
            "has several successors and no one value: use advantages of groups (GRPO), or a "
            "workflow whose conversations never fork"
        )
