"""Defines the parts of a Batch: ragged per-token fields, which rank holds which rows, and a way for
ranks to talk; and padded batches, dict[str, Tensor] of right-padded per-token fields [B,S,...] and
per-sample fields [B].

B rows of the job, b rows that a rank holds, S positions, T tokens of the held rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarl.config.foreign_names import AnswersForeignNames

MASK, IDS = "attention_mask", "input_ids"


class Comm(Protocol):
    """Defines how a Batch reaches the other ranks. `parallel.ranks` implements it over gloo."""

    rank: int
    size: int

    def all_gather(self, data: Tensor, name: str = "all_gather") -> list[Tensor]:
        """Returns every rank's host tensor of bytes [n]; `name`: of the call, for errors."""


_default_comm: Callable[[], Comm | None] | None = None


def register_comm(make: Callable[[], Comm | None]) -> None:
    """Sets the Comm that `comm=None` stands for; `make` returns None where there is one process."""
    global _default_comm
    _default_comm = make


def comm_or_default(comm: Comm | None) -> Comm | None:
    """Returns `comm`, or the registered one for None; None where there is one rank alone. Raises
    ValueError over several ranks where none is registered."""
    if comm is None and _default_comm is not None:
        comm = _default_comm()
    elif comm is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            "a Batch over several ranks needs to know how they talk: import megarl.engine (or "
            "megarl.parallel.ranks) first, or pass comm="
        )
    return comm if comm is not None and comm.size > 1 else None


# ---- a per-token field ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens(AnswersForeignNames):
    """Holds a per-token field of b rows: `values` [T, ...], row after row, and `lengths` [b] int64.
    Raises ValueError where the two do not fit."""

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        if int(self.lengths.sum()) != len(self.values):
            raise ValueError(
                f"{len(self.values)} values do not make rows of {int(self.lengths.sum())} tokens"
            )

    @staticmethod
    def from_padded(values: Tensor, lengths: Tensor) -> Tokens:
        """Takes the first lengths[i] positions of every row of `values` [b, S, ...]."""
        real = torch.arange(values.shape[1]) < lengths[:, None]
        return Tokens(values[real], lengths)

    @staticmethod
    def concat(parts: Sequence[Tokens]) -> Tokens:
        """Joins the rows of several Tokens, in their order."""
        return Tokens(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    def row(self, i: int) -> Tensor:
        """Returns the values [n, ...] of the i-th of these rows, a view."""
        return self.take([i]).values

    @property
    def starts(self) -> Tensor:
        """Returns where each row begins in `values`, [b]."""
        return self.lengths.cumsum(0) - self.lengths

    def take(self, index: Sequence[int] | Tensor) -> Tokens:
        """Takes the rows at `index` (places among these rows, not row numbers)."""
        index = torch.as_tensor(index, dtype=torch.long)
        lengths, starts = self.lengths[index], self.starts[index]
        if torch.equal(starts[1:], (starts + lengths)[:-1]):  # side by side: no copy
            first = int(starts[0]) if len(starts) else 0
            return Tokens(self.values[first : first + int(lengths.sum())], lengths)
        return Tokens(torch.cat(self.pieces(index)), lengths)

    def pieces(self, index: Tensor) -> list[Tensor]:
        """Returns the rows at `index` one by one, as views."""
        starts = self.starts[index]
        ends = starts + self.lengths[index]
        return [self.values[a:z] for a, z in zip(starts.tolist(), ends.tolist())]

    def padded(self, fill: float = 0, *, width: int | None = None) -> Tensor:
        """Returns [b, S, ...] with `fill` after the end of a row; S is the longest, or `width`."""
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        width = longest if width is None else width
        shape = (len(self.lengths), width, *self.values.shape[1:])
        out = torch.full(shape, fill, dtype=self.values.dtype)
        out[torch.arange(width) < self.lengths[:, None]] = self.values
        return out


# ---- who holds what ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Home:
    """Says which rows every rank holds: rank r those with of_row == of_rank[r].

    of_rank: an index by rank; ranks of one index hold the same rows (for an engine, the
             data-parallel index; at the origin, every driver has its own).
    of_row:  [B] int64, the index that holds a row.
    """

    of_rank: tuple[int, ...]
    of_row: Tensor

    @staticmethod
    def everywhere(ranks: int, rows: int) -> Home:
        """Returns the home in which every rank holds every row."""
        return Home((0,) * ranks, torch.zeros(rows, dtype=torch.long))

    def rows(self, rank: int) -> Tensor:
        """Returns the rows [b] of a rank, ascending."""
        return (self.of_row == self.of_rank[rank]).nonzero().flatten()

    def take(self, rows: Tensor) -> Home:
        """Returns the home of some of the rows, which are numbered anew."""
        return Home(self.of_rank, self.of_row[rows])

    def speakers(self) -> list[int]:
        """Returns the first rank of every index that has one, in the order of ranks."""
        return sorted({index: r for r, index in reversed([*enumerate(self.of_rank)])}.values())


# ---- bytes and lengths


def row_bytes(values: Tensor) -> int:
    """Returns the bytes of one row (or token) of `values` [n, ...]."""
    return values.element_size() * math.prod(values.shape[1:])


def as_bytes(values: Tensor) -> Tensor:
    """Returns the bytes of `values` as a flat uint8 tensor, a view where `values` is contiguous."""
    return values.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(raw: Tensor, dtype: torch.dtype, inner: Sequence[int]) -> Tensor:
    """Returns the flat uint8 `raw` as [n, *inner] of `dtype`: the inverse of `as_bytes`."""
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    count = len(raw) // (math.prod(inner) * dtype.itemsize)
    return raw.view(dtype).reshape(count, *inner)


def row_lengths(padded: Mapping[str, Tensor]) -> Tensor:
    """[B] int64 tokens of right-padded rows. ValueError naming what is missing or misshapen, or the
    first row that is not right-padded."""
    for key in (IDS, MASK):
        if key not in padded:
            raise ValueError(f"the batch has no {key!r}, only {sorted(padded)}")
    mask = padded[MASK].bool()
    if mask.ndim != 2 or mask.shape != padded[IDS].shape[:2]:
        raise ValueError(
            f"attention_mask {tuple(mask.shape)} and input_ids {tuple(padded[IDS].shape)}: both "
            "must be [B,S]"
        )
    if len(mask) == 0:
        raise ValueError("the batch is empty: B = 0")
    broken = (mask[:, 1:] & ~mask[:, :-1]).any(1)
    if broken.any():
        row = int(broken.nonzero()[0])
        raise ValueError(
            f"attention_mask of row {row} is not right-padded (a real token after a padded one)"
        )
    return mask.sum(1)


# ---- padded batches ------------------------------------------------------------------------------

Padded = dict[str, torch.Tensor]

# what a padded position holds; everything else pads with 0
PAD = {"versions": -1, "given_ids": -1}
# begins the names of fields [B] with parts of a reward, NaN in rows whose reward has no such part
REWARD_PART = "reward_part/"


def is_per_token(key: str, value: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether the field `key` is per token: it is where it has several dimensions, for
    [B,k] numbers of a sample could not be told from [B,S] where k is S. Raises ValueError where the
    first two are not those of input_ids [B,S]."""
    shape = tuple(batch["input_ids"].shape[:2])
    if value.ndim >= 2 and tuple(value.shape[:2]) != shape:
        raise ValueError(
            f"{key!r} of shape {tuple(value.shape)}: a field of several dimensions is per token, "
            f"and begins with [B, S] = {list(shape)} as input_ids does; for several numbers of a "
            f"sample use several fields [{shape[0]}]"
        )
    return value.ndim >= 2


def concat_padded(batches: Sequence[Padded]) -> Padded:
    """Joins padded batches of different S along B, padding to the longest S.

    Raises ValueError if the batches do not share the same keys, or for a field that is neither per
    token nor per sample.
    """
    if not batches:
        raise ValueError("concat_padded: nothing to join")
    keys = set(batches[0])
    for i, b in enumerate(batches):
        if set(b) != keys:
            raise ValueError(
                f"concat_padded: batch {i} has keys {sorted(b)}, batch 0 has {sorted(keys)}"
            )
    width = max(b["input_ids"].shape[1] for b in batches)
    out: Padded = {}
    for k in batches[0]:
        parts = []
        for b in batches:
            v = b[k]
            if is_per_token(k, v, b) and v.shape[1] < width:
                pad = [0, 0] * (v.ndim - 2) + [0, width - v.shape[1]]
                v = F.pad(v, pad, value=PAD.get(k, 0))
            parts.append(v)
        out[k] = torch.cat(parts)
    return out


concat_padded_tensors = concat_padded  # the name other systems have


def select(batch: Padded, index: Sequence[int] | torch.Tensor) -> Padded:
    """Returns the rows `index` of every tensor, trimmed to the longest of them."""
    idx = torch.as_tensor(index, dtype=torch.long)
    return trim({k: v[idx] for k, v in batch.items()})


def trim(batch: Padded) -> Padded:
    """Drops columns beyond the last real token of any sequence."""
    mask = batch["attention_mask"]
    width = int(mask.bool().sum(1).max()) if len(mask) else 0
    return {k: v[:, :width] if is_per_token(k, v, batch) else v for k, v in batch.items()}


def seqlens(batch: Padded) -> list[int]:
    """Returns the real tokens of every sequence, B numbers."""
    return batch["attention_mask"].bool().sum(1).tolist()
