"""Makes fingerprints of the fields of a batch, which do not depend on who holds which row.

B rows of the batch, b of them held by this rank, T tokens of the held rows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.algos.proximal import CHECK
from megarl.algos.rows import Data, as_batch, reduce_rows, total
from megarl.api.batch import Batch, Padded
from megarl.api.tokens import as_bytes, row_bytes
from megarl.utils.files import Fingerprint, RowDigest

LENGTHS = "lengths"
_FIRST = ("input_ids", "loss_mask", "versions", "logprobs")  # what the others come of


def field_fingerprints(data: Data, names: Collection[str] | None = None) -> dict[str, Fingerprint]:
    """Returns the fingerprints of the lengths of a batch and of its fields, or of those in `names`,
    the same on every rank and in every layout. Collective."""
    batch = as_batch(data)
    # check_logp is there in the first step after a start, which in a replay is another one
    chosen = [n for n in dict.fromkeys([*_FIRST, *sorted(batch)]) if n in batch and n != CHECK]
    chosen = [n for n in chosen if names is None or n in names]
    found = {LENGTHS: _of_samples(batch.lengths)}
    if tokens := [n for n in chosen if n in batch.per_token]:
        found |= _of_tokens(batch, tokens)
    return found | {n: _of_samples(batch[n]) for n in chosen if n in batch.per_sample}


def _of_tokens(batch: Batch, names: Sequence[str]) -> dict[str, Fingerprint]:
    """Returns the fingerprints of per-token fields, of which every holder reads its own rows."""
    fields = [batch.per_token[name] for name in names]
    hashes = _numbers([_row_hashes(f.values, f.lengths.tolist()) for f in fields])
    rows = batch.gather(hashes.T.contiguous())

    def sums(part: Padded) -> list[Tensor]:
        numbers = [part[name].double()[:, None].flatten(1) for name in names]
        return [x for n in numbers for x in (n.sum(1), n.square().sum(1))]

    columns = reduce_rows(batch, sums, names)
    count = int(batch.lengths.sum())
    return {
        name: _fingerprint(
            rows[:, i],
            columns[:, 2 * i],
            columns[:, 2 * i + 1],
            _shape(fields[i].values, f"{len(batch)} rows, {count} tokens"),
        )
        for i, name in enumerate(names)
    }


def _of_samples(values: Tensor) -> Fingerprint:
    """Returns the fingerprint of a per-sample field [B, ...]."""
    numbers = values.double()[:, None].flatten(1)
    hashes = _numbers(_row_hashes(values, [1] * len(values)))
    shape = _shape(values, f"{len(values)} rows")
    return _fingerprint(hashes, numbers.sum(1), numbers.square().sum(1), shape)


def _fingerprint(hashes: Tensor, sums: Tensor, squares: Tensor, shape: str) -> Fingerprint:
    """Puts together what is known of the rows [B] of a field."""
    in_order = RowDigest(as_bytes(hashes).numpy().data).hexdigest()
    in_any = RowDigest(as_bytes(hashes.sort().values).numpy().data).hexdigest()
    return Fingerprint(in_order, math.sqrt(total(squares)), total(sums), shape, in_any)


def _row_hashes(values: Tensor, lengths: Sequence[int]) -> list[int]:
    """Returns the hash of each row, a signed number of 64 bits, of `lengths` values each."""
    raw = memoryview(as_bytes(values).numpy().data)
    each, at, found = row_bytes(values), 0, []
    for length in lengths:
        end = at + each * length
        found.append(RowDigest(raw[at:end]).intdigest() - (1 << 63))
        at = end
    return found


def _numbers(hashes: Sequence[Any]) -> Tensor:
    return torch.tensor(hashes, dtype=torch.int64)


def _shape(values: Tensor, outer: str) -> str:
    """Describes a field for people: "float32 [16 rows, 812 tokens]"."""
    kind = str(values.dtype).removeprefix("torch.")
    return f"{kind} [{', '.join([outer, *map(str, values.shape[1:])])}]"
