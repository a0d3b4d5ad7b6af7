"""Finds what is not finite, and where: functions that return a Finding, or None if all is well.

Collective as those of checks.py are. B sequences of the batch, T tokens of those held here.
"""

from __future__ import annotations

import math

from torch import Tensor

from megarl.algos.checks import Finding, some
from megarl.algos.metrics import Decode, row_ids, spell_ids
from megarl.algos.rows import reduce_rows
from megarl.api.batch import Batch, Padded, Tokens


def nonfinite_inputs(batch: Batch) -> Finding | None:
    """Finds numbers that are not finite where the loss reads them, before any pass is spent on
    them. Collective.
    """
    samples = {n: v for n, v in batch.per_sample.items() if v.is_floating_point()}
    tokens = [n for n, v in batch.per_token.items() if v.values.is_floating_point()]
    counts = {}
    if tokens:

        def columns(part: Padded) -> list[Tensor]:
            mask = part["loss_mask"].bool()
            return [_bad(part[name], mask).flatten(1).sum(1) for name in tokens]

        sums = reduce_rows(batch, columns, [*tokens, "loss_mask"])
        counts = dict(zip(tokens, sums.unbind(1), strict=True))
    counts |= {name: _bad(values).flatten(1).sum(1) for name, values in samples.items()}
    details = []
    for name, count in counts.items():
        if rows := count.nonzero().flatten().tolist():
            place, value = _first_bad(batch, name, rows[0])
            details.append(
                f"{name}: {int(count.sum())} numbers in rows {some(rows)}, "
                f"the first at {place}: {value}"
            )
    if not details:
        return None
    return Finding("the batch holds numbers that are not finite", tuple(details))


def _bad(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns where `values` are not finite; of one number per token, only where `mask` is set."""
    bad = ~values.isfinite()
    bad = bad & mask if mask is not None and bad.shape == mask.shape else bad
    return bad if bad.ndim > 1 else bad[:, None]


def _first_bad(batch: Batch, name: str, row: int) -> tuple[list[int], float]:
    """Returns the place and the value of a row's first number that is not finite. Collective."""
    if isinstance(batch[name], Tokens):
        found = batch.fetch([row], [name, "loss_mask"])
        values, mask = found[name][0], found["loss_mask"][0].bool()
    else:
        values, mask = batch[name][row : row + 1], None
    bad = _bad(values, mask)
    at = bad.reshape(values.shape).nonzero()[0].tolist()
    inner = at if isinstance(batch[name], Tokens) else at[1:]
    return [row, *inner], float(values[tuple(at)])


def nonfinite_update(stats: dict[str, float]) -> Finding | None:
    """Finds an update that the engine refused, for a number that is not finite or for a spike of
    the gradient, but for one that a smaller loss scale mends (float16)."""
    if stats["update_successful"] or stats.get("overflow"):
        return None
    metrics = ", ".join(f"{k} = {stats[k]:g}" for k in ("loss", "grad_norm"))
    if is_spike(stats):
        return Finding(f"the gradient is larger than optimizer.spike_norm allows: {metrics}")
    return Finding(f"the update is not finite: {metrics}")


def is_spike(stats: dict[str, float]) -> bool:
    """Returns whether an update that was refused is finite."""
    return math.isfinite(stats["loss"]) and math.isfinite(stats["grad_norm"])


def nonfinite_origin(row_loss: Tensor, batch: Batch, *, decode: Decode = spell_ids) -> str:
    """Says which sequences make the loss [B] what it is; where there are none, the backward pass
    did. Collective."""
    bad = (~row_loss.isfinite()).nonzero().flatten().tolist()
    if not bad:
        return (
            "the loss of every sequence is finite by itself: it overflowed in the sum or in the "
            "backward pass"
        )
    text = decode(row_ids(batch, bad[:1])[0])
    return (
        f"the loss is not finite in {len(bad)} of {len(row_loss)} sequences, rows {some(bad)}; "
        f"row {bad[0]} ends in {text[-80:]!r}"
    )
