"""Holds the samples of one training step, each row's tokens only where they are worked on.

B samples (rows) of the job, b rows that this rank holds, S positions, T tokens of the held rows.

Per-sample fields [B] are on every rank. Per-token fields are ragged (`Tokens`), and a rank has
those of its own rows only. Rows stand in ascending order of (episode, sample) wherever they come
from. A loss or an estimator never meets this class: it sees padded [b, S] dicts (`Padded`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from megarl.api.failures import on_every_rank
from megarl.api.local_rows import gather_rows
from megarl.api.tokens import (
    IDS,
    MASK,
    PAD,
    Comm,
    Home,
    Padded,
    Tokens,
    as_bytes,
    comm_or_default,
    from_bytes,
    is_per_token,
    register_comm,
    row_lengths,
)
from megarl.config.foreign_names import AnswersForeignNames

T = TypeVar("T")

# fields [B] that say which rows stay together, the first that is there
UNITS = ("unit_ids", "rollout_ids")

__all__ = ["Batch", "Comm", "Home", "Padded", "Tokens", "register_comm", "row_lengths"]


class Batch(AnswersForeignNames):
    """Holds the samples of a step: `batch[name]` is the Tensor [B] of a per-sample field, or the
    Tokens of the held rows.

    lengths:     [B] int64, tokens of every row.
    home:        which rank holds which rows.
    placed:      whether an engine has chosen the home; before, tokens are at their origin.
    minibatches: the rows of each of the step's mini-batches, set before the first engine verb,
                 which then balances each of them over ranks; None is all rows at once.
    packed:      what engines have made of the token ids for a pass, by how, for the next pass over
                 the same rows; a selection of all rows shares it.
    written:     the names of fields that were set since somebody last cleared it.
    """

    def __init__(
        self,
        lengths: Tensor,
        per_sample: Mapping[str, Tensor],
        per_token: Mapping[str, Tokens],
        *,
        home: Home,
        comm: Comm | None = None,
    ) -> None:
        self.lengths, self.home, self.comm = lengths, home, comm
        self.per_sample, self.per_token = dict(per_sample), dict(per_token)
        self.minibatches: list[list[int]] | None = None
        self.packed: dict[Any, Any] = {}
        self.written: set[str] = set()
        self.placed = False

    # -- where it comes from

    @staticmethod
    def from_padded(padded: Mapping[str, Tensor], *, comm: Comm | None = None) -> Batch:
        """Makes a batch of padded [B, S] tensors that are the same on every rank; every rank holds
        all rows.

        Raises ValueError where attention_mask is not right-padded, or a field is neither [B] nor
        [B, S, ...].
        """
        comm = comm_or_default(comm)
        lengths = row_lengths(padded)
        tokens = {k for k, v in padded.items() if is_per_token(k, v, padded)} - {MASK}
        return Batch(
            lengths,
            {k: v for k, v in padded.items() if k not in tokens and k != MASK},
            {k: Tokens.from_padded(padded[k], lengths) for k in sorted(tokens)},
            home=Home.everywhere(comm.size if comm else 1, len(lengths)),
            comm=comm,
        )

    @staticmethod
    def from_local(
        padded: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None,
        *,
        comm: Comm | None = None,
    ) -> Batch:
        """Makes a batch of the rows that each rank brings: padded [b, S] tensors, or a list of such
        dicts (one for each episode, each with its own S), or None for no rows. Collective.

        Rows are put in the order of `episode_ids` [b] where the field exists (rows of an episode
        stay in their order), else in the order of ranks. Raises ValueError, on every rank, where
        the rows of the ranks do not fit together or are not right-padded.
        """
        comm = comm_or_default(comm)
        parts = [padded] if isinstance(padded, Mapping) else list(padded or ())
        lengths, per_sample, per_token, home = gather_rows(parts, comm)
        return Batch(lengths, per_sample, per_token, home=home, comm=comm)

    # -- fields

    def __len__(self) -> int:
        """Returns B."""
        return len(self.lengths)

    @property
    def rows(self) -> Tensor:
        """Returns the rows [b] whose tokens this rank holds, ascending."""
        return self.home.rows(self.comm.rank if self.comm else 0)

    @property
    def unit_ids(self) -> Tensor:
        """Returns the unit of every row, [B]: no mini-batch and no rank separates rows of one unit.
        By default a rollout is a unit, and without rollout_ids each row."""
        found = (self.per_sample.get(name) for name in UNITS)
        return next((ids for ids in found if ids is not None), torch.arange(len(self)))

    @property
    def rollout_ids(self) -> Tensor:
        """Returns the rollout of every row, [B]. By default each row is a rollout of its own."""
        return self.per_sample.get("rollout_ids", torch.arange(len(self)))

    def keys(self) -> list[str]:
        """Returns the names of all fields, without attention_mask: `lengths` has it."""
        return [*self.per_sample, *self.per_token]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, name: str) -> bool:
        return name in self.per_sample or name in self.per_token

    def __getitem__(self, name: str) -> Any:
        if name in self.per_token:
            return self.per_token[name]
        if name not in self.per_sample:
            raise KeyError(f"the batch has no {name!r}, only {sorted(self.keys())}")
        return self.per_sample[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the field, or `default` where there is none of this name."""
        return self.per_token.get(name, self.per_sample.get(name, default))

    def pop(self, name: str) -> Any:
        """Removes the field and returns it."""
        value = self[name]
        del (self.per_token if name in self.per_token else self.per_sample)[name]
        return value

    def __setitem__(self, name: str, value: Tensor | Tokens) -> None:
        """Sets a field. Raises ValueError unless it is [B] or Tokens of the held rows."""
        self.written.add(name)
        if isinstance(value, Tokens):
            if not torch.equal(value.lengths, self.lengths[self.rows]):
                raise ValueError(
                    f"batch[{name!r}]: Tokens of {len(value.lengths)} rows do not fit the lengths "
                    f"of the {len(self.rows)} rows that this rank holds"
                )
            if name == IDS:
                self.packed = {}
            self.per_sample.pop(name, None)
            self.per_token[name] = value
            return
        if not isinstance(value, Tensor) or value.shape != (len(self),):
            what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"batch[{name!r}] = {what}: a per-sample field is a Tensor [{len(self)}], a "
                "per-token field is Tokens of the held rows; of a padded tensor [B, S] these are "
                "Tokens.from_padded(value[batch.rows], batch.lengths[batch.rows])"
            )
        self.per_token.pop(name, None)
        self.per_sample[name] = value

    # -- parts of it

    def select(self, rows: Sequence[int] | Tensor, names: Sequence[str] | None = None) -> Batch:
        """A Batch of some rows (ascending), and of some fields if `names` are given. Who holds a
        row keeps it. Of a boolean tensor [B], the rows that are True. Raises ValueError for rows
        that are not ascending or not there, KeyError for a field that is not.
        """
        index = self._index(rows)
        mine = self.rows
        held = torch.isin(mine, index).nonzero().flatten()
        wanted = set(self.keys() if names is None else names)
        if missing := sorted(wanted - set(self.keys())):
            raise KeyError(f"the batch has no {missing[0]!r}, only {sorted(self.keys())}")
        wanted |= set(UNITS)  # what belongs together does so in every part
        out = Batch(
            self.lengths[index],
            {k: v[index] for k, v in self.per_sample.items() if k in wanted},
            {k: v.take(held) for k, v in self.per_token.items() if k in wanted},
            home=self.home.take(index),
            comm=self.comm,
        )
        out.placed = self.placed
        if len(index) == len(self):
            out.packed = self.packed
        return out

    def _index(self, rows: Sequence[int] | Tensor) -> Tensor:
        """[n] int64, the numbers of `rows` as select takes them."""
        index = torch.as_tensor(rows)
        if index.dtype == torch.bool:
            if index.shape != (len(self),):
                shape = tuple(index.shape)
                raise ValueError(f"a mask of rows has shape {shape}, not [{len(self)}]")
            return index.nonzero().flatten()
        index = index.long()
        if len(index) and not (
            index[0] >= 0 and index[-1] < len(self) and bool((index[1:] > index[:-1]).all())
        ):
            raise ValueError(
                f"rows {index.tolist()[:8]} ...: they must ascend, from 0 to {len(self) - 1}"
            )
        return index

    def keep(self, mask: Tensor) -> Batch:
        """A Batch without the rows where `mask` [B] is False, as if they had never been in it: its
        mini-batches are made, and its tokens placed, anew by the next engine verb.
        """
        out = self.select(mask.bool())
        out.placed = False
        return out

    def with_ids(self, values: Tensor, lengths: Tensor) -> Batch:
        """A Batch of other token ids `values` [T] of the held rows, rows that all ranks know to be
        of `lengths` [B], held by the same ranks and in the same units."""
        tokens = {IDS: Tokens(values, lengths[self.rows])}
        units = {name: self.per_sample[name] for name in UNITS if name in self.per_sample}
        out = Batch(lengths, units, tokens, home=self.home, comm=self.comm)
        out.placed = self.placed
        return out

    def padded(
        self, rows: Sequence[int] | Tensor | None = None, names: Sequence[str] | None = None
    ) -> Padded:
        """Returns padded [b, S] tensors and attention_mask of held rows (None takes all of them),
        with their per-sample fields [b, ...]; S is the longest of these rows. `names` limits the
        fields. Raises ValueError for a row that this rank does not hold."""
        mine = self.rows
        index = mine if rows is None else torch.as_tensor(rows, dtype=torch.long)
        places = torch.searchsorted(mine, index)
        if len(index) and (len(mine) == 0 or not torch.equal(mine[places % len(mine)], index)):
            raise ValueError(f"rows {index.tolist()[:8]} ...: this rank does not hold all of them")
        tokens = {k: t.take(places) for k, t in _named(self.per_token, names).items()}
        return self._pad(index, tokens, names)

    def _pad(
        self, rows: Tensor, tokens: Mapping[str, Tokens], names: Sequence[str] | None
    ) -> Padded:
        lengths = self.lengths[rows]
        width = int(lengths.max()) if len(rows) else 0
        out = {k: t.padded(PAD.get(k, 0)) for k, t in tokens.items()}
        out[MASK] = torch.arange(width) < lengths[:, None]
        return out | {k: v[rows] for k, v in _named(self.per_sample, names).items()}

    def chunks(
        self,
        max_tokens: int = 1 << 20,
        names: Sequence[str] | None = None,
        *,
        rows: Tensor | None = None,
    ) -> Iterator[tuple[Tensor, Padded]]:
        """Yields the held rows in order, or `rows` of them in theirs, as (rows, padded) of at most
        `max_tokens` padded tokens each; a longer row comes alone."""
        part: list[int] = []
        longest = 0
        for row in (self.rows if rows is None else rows).tolist():
            n = max(longest, int(self.lengths[row]))
            if part and n * (len(part) + 1) > max_tokens:
                yield torch.tensor(part), self.padded(part, names)
                part, n = [], int(self.lengths[row])
            part.append(row)
            longest = n
        if part:
            yield torch.tensor(part), self.padded(part, names)

    # -- what every rank learns

    def gather(self, values: Tensor) -> Tensor:
        """Returns [B, ...] on every rank, put together from each rank's `values` [b, ...] for its
        held rows. Collective. Raises ValueError where the number of values is not that of the held
        rows."""
        mine = self.rows
        if len(values) != len(mine):
            raise ValueError(f"gather: {len(values)} values for the {len(mine)} rows held here")
        if self.comm is None or len(set(self.home.of_rank)) == 1:
            return values
        rows_of = {r: self.home.rows(r) for r in self.home.speakers()}
        out = torch.empty((len(self), *values.shape[1:]), dtype=values.dtype)
        counts = {r: len(rows) for r, rows in rows_of.items()}
        out[torch.cat([*rows_of.values()])] = self._of_speakers(values, counts)
        return out

    def _of_speakers(self, values: Tensor, counts: Mapping[int, int]) -> Tensor:
        """Returns the `values` [n, ...] of all speakers, one after another; counts: n by speaker.
        Collective."""
        assert self.comm is not None
        own = values if self.comm.rank in counts else values[:0]
        raw = self.comm.all_gather(as_bytes(own), "Batch.gather")
        return from_bytes(torch.cat([raw[r] for r in counts]), values.dtype, values.shape[1:])

    def row_sums(
        self,
        fn: Callable[[Padded], Any],
        names: Sequence[str] | None = None,
        *,
        what: str = "row_sums",
    ) -> Tensor:
        """Returns the number of `fn` for every row, [B] float64, on every rank. `fn` gets one row
        at a time, as padded [1, n] tensors. Collective. Where `fn` raises on one rank, all raise an
        error that names the rank and `what` failed there.

        A row's number depends on the row alone: not on its neighbours, the layout or the number of
        threads. Combine the numbers by math.fsum.
        """

        def of_held_rows() -> Tensor:
            with _one_thread():
                numbers = [float(fn(row)) for row in self._single_rows(names)]
            return torch.tensor(numbers, dtype=torch.float64)

        return self.gather(on_every_rank(what, of_held_rows, self.comm))

    def _single_rows(self, names: Sequence[str] | None) -> Iterator[Padded]:
        """Yields every held row as padded [1, n] tensors, which are views."""
        rows = self.rows
        lengths = self.lengths[rows]
        ends = lengths.cumsum(0)
        real = torch.ones(1, int(lengths.max()) if len(rows) else 0, dtype=torch.bool)
        tokens, samples = _named(self.per_token, names), _named(self.per_sample, names)
        for row, n, end in zip(rows.tolist(), lengths.tolist(), ends.tolist()):
            out = {k: t.values[end - n : end][None] for k, t in tokens.items()}
            out |= {k: v[row : row + 1] for k, v in samples.items()}
            yield out | {MASK: real[:, :n]}

    def fetch(self, rows: Sequence[int] | Tensor, names: Sequence[str] | None = None) -> Padded:
        """Returns `padded` of a few rows on every rank, whichever ranks hold them. Collective."""
        part = self.select(rows, names)
        if part.comm is None or len(set(part.home.of_rank)) == 1:
            return part.padded()
        rows_of = {r: part.home.rows(r) for r in part.home.speakers()}
        order = torch.cat([*rows_of.values()])
        counts = {r: int(part.lengths[rows].sum()) for r, rows in rows_of.items()}
        tokens = {}
        for name in sorted(part.per_token):
            values = part._of_speakers(part.per_token[name].values, counts)
            tokens[name] = Tokens(values, part.lengths[order]).take(order.argsort())
        return part._pad(torch.arange(len(part)), tokens, None)


def _named(fields: Mapping[str, T], names: Sequence[str] | None) -> dict[str, T]:
    """Returns the fields `names`; None is all."""
    return {k: v for k, v in fields.items() if names is None or k in names}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Has torch use one thread inside: several would split long sums and round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
