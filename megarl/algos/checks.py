"""Checks what can be wrong with an update, and finds what is not finite, and where: functions that
return a Finding, or None if all is well.

Every rank looks at the rows it holds, learns the others' metrics, and so comes to the same finding;
a row that a finding shows is fetched from whoever holds it. B sequences of the batch, b of a part
of it, S positions, T tokens of those held here. What follows from a finding is
trainer/self_check.py's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megarl.algos.kl import kl_estimate
from megarl.algos.metrics import Decode, LogpGap, row_ids, show_gaps, spell_ids
from megarl.algos.rows import Data, reduce_rows
from megarl.api.batch import Batch, Padded, Tokens
from megarl.api.engine import LossFn, LossWeightFn, TrainEngine
from megarl.observability import stats_tracker

ROW = "row"  # batch key [b]: which sequence of the mini-batch a row of a micro-batch is


@dataclass(frozen=True)
class Finding:
    """Says what is wrong: a headline, and details that a message shows on lines of their own."""

    headline: str
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n  ".join((self.headline, *self.details))


# ---- two policies that should be one ---------------------------------------------------------


@dataclass(frozen=True)
class Bounds:
    """How far rounding alone takes two passes of one policy apart. Each number sees another error.

    mean      of |log ratio| over trained tokens (|ratio - 1| to first order): everything is a bit
              off, e.g. another temperature, other weights, dropout
    sequence  the same mean over one sequence, the worst: a wrong sequence hides in a large batch
    kl        mean k3, about half the mean square: a few tokens that are far off
    token     the largest |log ratio|: for passes that should agree to the bit
    """

    mean: float
    sequence: float
    kl: float
    token: float = math.inf


# Where both passes cut the same micro-batches, the same kernels see the same shapes and the
# difference is 0. Where they do not, sums run in another order. A 12-layer model on a CPU, cut in
# two ways: float32 mean 3e-8, sequence 3e-7, token 3e-6; bfloat16 (8 bits, 2e-3 relative in every
# activation) mean 2e-4, sequence 2e-3, kl 2e-6, token 0.03. The bounds leave two orders for depth
# and for kernels chosen by shape. In bfloat16 single tokens are not bounded: in a mixture of
# experts, a router near a tie picks another expert.
ROUNDING = {
    torch.float32: Bounds(mean=1e-5, sequence=1e-4, kl=1e-6),
    torch.bfloat16: Bounds(mean=2e-2, sequence=1.0, kl=1e-2),
    torch.float16: Bounds(mean=2e-2, sequence=1.0, kl=1e-2),  # no worse than bfloat16
}
# the same shapes may still be summed in another order: kernels look at the alignment of memory
SAME_SHAPES = replace(ROUNDING[torch.float32], token=1e-4)


@dataclass(frozen=True)
class RowGaps:
    """Holds how far two policies are apart on the trained tokens of every sequence, each [B]
    float64."""

    tokens: Tensor
    abs_sum: Tensor  # of |log ratio|
    kl_sum: Tensor  # of k3
    position: Tensor  # of the largest |log ratio|, and both logprobs there
    ours: Tensor
    theirs: Tensor

    @property
    def token(self) -> Tensor:
        """Returns the largest |log ratio| of every sequence, [B]."""
        return (self.ours - self.theirs).abs()

    def worst(self, k: int = 3) -> list[LogpGap]:
        """Returns the worst token of each of the (at most k) worst sequences that differ at all."""
        order = self.token.nan_to_num(nan=math.inf).topk(min(k, len(self.token))).indices.tolist()
        return [
            LogpGap(i, int(self.position[i]), float(self.ours[i]), float(self.theirs[i]))
            for i in order
            if self.token[i] != 0
        ]


def row_gaps(ours: Tensor, theirs: Tensor, loss_mask: Tensor) -> RowGaps:
    """Returns the RowGaps of two [b,S] logprobs of the same tokens."""
    mask = loss_mask.bool()
    ours, theirs = ours.double().where(mask, 0.0), theirs.double().where(mask, 0.0)
    gap = (ours - theirs).abs()
    position = gap.argmax(1, keepdim=True)  # NaN counts as the largest
    return RowGaps(
        tokens=mask.sum(1).double(),
        abs_sum=gap.sum(1),
        kl_sum=kl_estimate(theirs, ours, "k3").sum(1),
        position=position[:, 0].double(),
        ours=ours.gather(1, position)[:, 0],
        theirs=theirs.gather(1, position)[:, 0],
    )


def gaps_of(batch: Batch, ours: Tokens, theirs: Tokens) -> RowGaps:
    """Returns the RowGaps [B] of two logprobs of the batch's tokens, on every rank. Collective."""
    sides = {"ours": ours, "theirs": theirs, "loss_mask": batch["loss_mask"]}
    both = Batch(batch.lengths, {}, sides, home=batch.home, comm=batch.comm)
    parts = [torch.empty(0, len(fields(RowGaps)), dtype=torch.float64)]
    for _, padded in both.chunks():
        gaps = row_gaps(*(padded[name] for name in sides))
        parts.append(torch.stack([getattr(gaps, f.name) for f in fields(gaps)], 1))
    return RowGaps(*batch.gather(torch.cat(parts)).unbind(1))


def same_policy(
    gaps: RowGaps,
    bounds: Bounds,
    batch: Batch,
    *,
    what: str,
    sides: tuple[str, str],
    causes: str,
    decode: Decode = spell_ids,
) -> Finding | None:
    """Returns a finding where `gaps` (of the trained tokens of `batch`) are more than rounding,
    else None.

    Collective where they are: the worst tokens are shown.
    """
    tokens, by_row = gaps.tokens.sum(), gaps.abs_sum / gaps.tokens.clamp(min=1)
    checked = {
        "mean |log ratio|": (gaps.abs_sum.sum() / tokens, bounds.mean),
        "mean of the worst sequence": (by_row.max(), bounds.sequence),
        "approx KL": (gaps.kl_sum.sum() / tokens, bounds.kl),
        "largest |log ratio|": (gaps.token.max(), bounds.token),
    }
    # "not <=" also catches NaN
    broken = [f"{k} = {float(v):.3g} above {b:g}" for k, (v, b) in checked.items() if not v <= b]
    if not broken:
        return None
    off = int((~(by_row <= bounds.sequence)).sum())
    return Finding(
        f"{what}: {', '.join(broken)}",
        (
            f"{off} of {len(by_row)} sequences have a mean above {bounds.sequence:g}; "
            "the worst tokens:",
            *show_gaps(gaps.worst(), batch, decode=decode, sides=sides),
            f"likely causes: {causes}",
        ),
    )


# ---- the loss of single sequences ----------------------------------------------------------------


def row_losses(
    engine: TrainEngine, data: Data, loss_fn: LossFn, weight_fn: LossWeightFn, **how: Any
) -> Tensor:
    """Returns the loss of every sequence by itself, [B], with `whole_groups` that of its group
    (group_ids), from a pass without gradients. how: of eval_batch. Collective."""
    rows = torch.arange(len(data) if isinstance(data, Batch) else len(data["input_ids"]))
    numbered = data.select(rows) if isinstance(data, Batch) else dict(data)
    numbered[ROW] = rows

    def with_single(outputs: Padded, batch: Padded) -> tuple[Tensor, dict[str, Any]]:
        loss, stats = loss_fn(outputs, batch)
        ids = batch["group_ids" if how.get("whole_groups") else ROW]
        single = {}  # a sequence stands in one micro-batch: its sum over all is its own
        with stats_tracker.muted():
            for i, row in enumerate(batch[ROW].tolist()):
                alike = ids == ids[i]
                own = ({k: v[alike] for k, v in part.items()} for part in (outputs, batch))
                single[f"{ROW}/{row}"] = float(loss_fn(*own)[0]), 1.0
        return loss, stats | single

    stats = engine.eval_batch(numbered, with_single, weight_fn, **how)
    return torch.tensor([stats[f"{ROW}/{row}"] for row in rows.tolist()], dtype=torch.float64)


# ---- nothing to learn from ---------------------------------------------------------------------

PATIENCE = 3  # steps in a row


def no_trained_token(trained: Tensor, what: str) -> Finding | None:
    """Finds rows without a token to train on, None if there are none. `trained` [B]: every row's
    trained tokens; `what` names the batch."""
    if not (rows := (trained == 0).nonzero().flatten().tolist()):
        return None
    return Finding(
        f"{what}: loss_mask marks no token in {len(rows)} of {len(trained)} rows ({some(rows)})"
    )


class Streaks:
    """Finds rewards that teach nothing, once they have done so for PATIENCE steps in a row, and
    again only after a step that was different."""

    def __init__(self, *, compares_groups: bool) -> None:
        """Takes whether equal rewards of a group give no gradient (compares_groups), as where
        advantages are differences within a group."""
        self._compares_groups = compares_groups
        self._zero = self._tied = 0

    def step(self, metrics: dict[str, float]) -> Finding | None:
        """Returns a finding if one step's metrics (reward/mean, reward/std,
        reward/groups_all_equal) make a streak, else None."""
        zero = metrics["reward/mean"] == metrics["reward/std"] == 0
        tied = self._compares_groups and metrics["reward/groups_all_equal"] == 1
        self._zero = self._zero + 1 if zero else 0
        self._tied = self._tied + 1 if tied else 0
        if self._zero == PATIENCE:
            return Finding(
                f"every reward was 0 for {PATIENCE} steps in a row, so there is nothing to learn",
                (
                    "read some completions (samples.jsonl, the report): does the answer's format "
                    "fit what the reward looks for (train_dataset.reward)?",
                    "response_len/truncated near 1: raise gconfig.max_new_tokens",
                    "else the task is too hard: easier prompts, partial credit, or SFT first",
                ),
            )
        if self._tied == PATIENCE > self._zero:
            return Finding(
                f"in all groups all rewards were equal for {PATIENCE} steps in a row, so there is "
                f"no gradient (reward/mean is {metrics['reward/mean']:g})",
                (
                    "every answer to a prompt scores alike: the prompts are too easy or too hard, "
                    "or gconfig (temperature, top_p, top_k) makes the answers alike",
                    "raise gconfig.n_samples, take other prompts, or give partial credit; "
                    "actor.dynamic_sampling=true replaces such groups",
                ),
            )
        return None


def some(rows: list[int], show: int = 8) -> str:
    """Returns the first `show` rows as text."""
    return ", ".join(map(str, rows[:show])) + (" ..." if len(rows) > show else "")


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
