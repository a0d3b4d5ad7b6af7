"""Measures how far two sides disagree about the same tokens, and what the trained tokens of a batch
are: how old, how far from the trainer's view of them at each age, and how their advantages are
spread. A token's age is the number of versions between the weights that wrote it and those that
train on it.

B sequences of the batch, T tokens of those that this rank holds. A collective function returns the
same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megarl.algos.kl import kl_estimate
from megarl.algos.rows import moments, reduce_rows, total
from megarl.api.batch import Batch, Padded
from megarl.observability.logging import get_logger, warn_on_rank_zero

log = get_logger(__name__)

Decode = Callable[[Sequence[int]], str]


def spell_ids(ids: Sequence[int]) -> str:
    """Returns token ids as text, in place of a tokenizer's decode where there is no tokenizer."""
    return " ".join(map(str, ids))


def logp_gap_stats(batch: Batch) -> dict[str, float]:
    """Returns how far the trainer's (prox_logp) and the server's logprobs of the same trained
    tokens are apart. Collective.

    mismatch/k1, k3 estimate KL(server || trainer): the tokens were drawn by the server. With fresh
    weights and no bug these are rounding errors. Empty if no token is trained.
    """

    def columns(part: Padded) -> list[Tensor]:
        mask = part["loss_mask"].bool()
        server, trainer = (part[k].double().where(mask, 0.0) for k in ("logprobs", "prox_logp"))
        k1, k3 = (kl_estimate(server, trainer, kind) for kind in ("k1", "k3"))
        return [mask, (trainer - server).abs(), k1, k3]

    sums = reduce_rows(batch, columns, ["loss_mask", "logprobs", "prox_logp"])
    tokens, *totals = (total(column) for column in sums.unbind(1))
    if not tokens:
        return {}
    mean, k1_mean, k3_mean = (value / tokens for value in totals)
    return {
        "train_rollout_logprob_abs_diff/mean": mean,
        "train_rollout_logprob_abs_diff/max": float(_largest_gap(batch, None).max()),
        "mismatch/k1": k1_mean,
        "mismatch/k3": k3_mean,
    }


def watched_gap(
    batch: Batch, *, version: int, above: float, decode: Decode = spell_ids
) -> dict[str, float]:
    """Returns logp_gap_stats, {} of a batch without prox_logp; warns with the worst tokens where a
    gap is `above` that bound and no effect of staleness: older weights wrote tokens that differ
    rightly, so only those of `version`, the current one, warn. Collective."""
    if "prox_logp" not in batch:
        return {}
    if worst := worst_logp_gaps(batch, version=version, above=above):
        warn_on_rank_zero(
            log,
            "trainer and server disagree about tokens of the current weights by more than "
            "logp_gap_warn=%g (wrong temperature, stale weights or a numerical problem):\n  %s",
            above,
            "\n  ".join(show_gaps(worst, batch, decode=decode)),
        )
    return logp_gap_stats(batch)


def explained_variance(batch: Batch) -> float:
    """Returns 1 - Var(returns - values) / Var(returns) over trained tokens: 1 is a perfect critic,
    0 no better than a constant. 0 where the returns are all equal. Collective.
    """
    spread = moments(batch, lambda part: part["returns"], ["returns"])[2]
    if not spread > 0:
        return 0.0

    def error(part: Padded) -> Tensor:
        return part["returns"].double() - part["values"].double()

    return 1 - moments(batch, error, ["returns", "values"])[2] / spread


@dataclass(frozen=True)
class LogpGap:
    """Holds one token about which two sides disagree, and its logprob by each of them."""

    row: int
    position: int
    ours: float
    theirs: float

    def show(self, ids: Sequence[int], decode: Decode, sides: tuple[str, str]) -> str:
        """Shows the token of a row `ids` between its neighbours, as »this« in: one and one is
        »two«."""
        t = self.position
        around = (ids[max(0, t - 12) : t], ids[t : t + 1], ids[t + 1 : t + 5])
        before, token, after = (decode(part) for part in around)
        return (
            f"row {self.row} position {t}: {sides[0]} {self.ours:.6g}, {sides[1]} "
            f"{self.theirs:.6g}, token {ids[t]} {token!r} in {f'{before}»{token}«{after}'!r}"
        )


def show_gaps(
    gaps: Sequence[LogpGap],
    batch: Batch,
    *,
    decode: Decode = spell_ids,
    sides: tuple[str, str] = ("trainer", "server"),
) -> list[str]:
    """Returns a line for each of some gaps of the batch. Collective: fetches the tokens' rows."""
    rows = sorted({gap.row for gap in gaps})
    texts = dict(zip(rows, row_ids(batch, rows), strict=True))
    return [gap.show(texts[gap.row], decode, sides) for gap in gaps]


def row_ids(batch: Batch, rows: Sequence[int]) -> list[list[int]]:
    """Returns the token ids of some rows (ascending), on every rank. Collective."""
    found = batch.fetch(rows, ["input_ids"])
    lengths = batch.lengths[list(rows)].tolist()
    return [ids[:n].tolist() for ids, n in zip(found["input_ids"], lengths, strict=True)]


def worst_logp_gaps(
    batch: Batch, *, version: int | None = None, k: int = 5, above: float = -1.0
) -> list[LogpGap]:
    """Returns the k trained tokens of largest |prox_logp - logprobs|, worst first; NaN is worst of
    all. Empty where not one of them is `above`. Collective.

    version: only tokens that these weights wrote (batch["versions"]) count; None counts all.
    """
    worst = _largest_gap(batch, version)
    if not float(worst.max()) > above:
        return []
    # each of the k worst tokens is in one of the k rows that hold the worst tokens
    rows = worst.topk(min(k, len(worst))).indices.sort().values
    rows = rows[worst[rows] >= 0]
    found = batch.fetch(rows, _gap_fields(batch, version))
    gap = _masked_gap(found, version)
    order = gap.flatten().topk(min(k, int((gap >= 0).sum()))).indices.tolist()
    places = [divmod(i, gap.shape[1]) for i in order]
    return [
        LogpGap(
            row=int(rows[i]),
            position=t,
            ours=float(found["prox_logp"][i, t]),
            theirs=float(found["logprobs"][i, t]),
        )
        for i, t in places
    ]


def _gap_fields(batch: Batch, version: int | None) -> list[str]:
    names = ["prox_logp", "logprobs", "loss_mask"]
    return names + (["versions"] if version is not None and "versions" in batch else [])


def _largest_gap(batch: Batch, version: int | None) -> Tensor:
    """Returns the largest _masked_gap of each row, [B] on every rank. Collective."""
    names = _gap_fields(batch, version)
    return reduce_rows(batch, lambda part: [_masked_gap(part, version)], names, "max")[:, 0]


def _masked_gap(tokens: Padded, version: int | None) -> Tensor:
    """Returns |prox_logp - logprobs| in fp64, infinite for NaN and -1 where it does not count."""
    mask = tokens["loss_mask"].bool()
    if "versions" in tokens:
        mask = mask & (tokens["versions"] == version)
    gap = (tokens["prox_logp"].double() - tokens["logprobs"].double()).abs()
    return gap.nan_to_num(nan=math.inf).masked_fill(~mask, -1.0)


OLDEST = 8  # tokens of this age and older ones are counted together

Columns = Callable[[Padded], Sequence[Tensor]]


def staleness(batch: Batch, *, version: int) -> dict[str, float]:
    """Returns staleness/mean and staleness/max of the trained tokens' ages, and staleness/age_<k>,
    the share of the tokens of age k; {} where the batch does not know its versions, or no token is
    trained. version: the trainer's."""
    if (oldest := _oldest(batch, version)) is None:
        return {}
    count, mean, _ = moments(batch, lambda part: version - part["versions"], ["versions"])
    shares = {
        f"staleness/{name}": float(tokens.sum()) / count
        for name, (tokens,) in _by_age(batch, version, oldest, lambda part: [], []).items()
    }
    return {"staleness/mean": mean, "staleness/max": oldest} | shares


def gap_by_age(batch: Batch, *, version: int) -> dict[str, float]:
    """Returns how far the trainer's and the server's logprobs are apart (logp_gap_stats) on tokens
    of each age k: mismatch/age_<k>/mean, max and k3. {} where all tokens are of one age, or the
    batch lacks prox_logp or versions."""
    oldest = _oldest(batch, version) if "prox_logp" in batch else None
    if not oldest:
        return {}

    def columns(part: Padded) -> list[Tensor]:
        server, trainer = part["logprobs"].double(), part["prox_logp"].double()
        return [(trainer - server).abs(), kl_estimate(server, trainer, "k3")]

    names = ["logprobs", "prox_logp"]
    sums = _by_age(batch, version, oldest, columns, names)
    tops = _by_age(batch, version, oldest, columns, names, how="max")
    found = {}
    for name, (tokens, gap, k3) in sums.items():
        if count := total(tokens):
            found[f"mismatch/{name}/mean"] = total(gap) / count
            found[f"mismatch/{name}/max"] = float(tops[name][1].max())
            found[f"mismatch/{name}/k3"] = total(k3) / count
    return {} if len(found) <= 3 else found


def advantage_spread(batch: Batch) -> dict[str, float]:
    """Returns advantage_std, advantage_min and advantage_max over the trained tokens; {} where
    there are none."""
    count, _, squares = moments(batch, lambda part: part["advantages"], ["advantages"])
    if not count:
        return {}

    def ends(part: Padded) -> list[Tensor]:
        mask, values = part["loss_mask"].bool(), part["advantages"].double()
        return [values.where(mask, -math.inf), (-values).where(mask, -math.inf)]

    high, low = reduce_rows(batch, ends, ["advantages", "loss_mask"], "max").unbind(1)
    return {
        "advantage_std": math.sqrt(squares / count),
        "advantage_min": -float(low.max()),
        "advantage_max": float(high.max()),
    }


def _oldest(batch: Batch, version: int) -> float | None:
    """Returns the largest age of a trained token, None where no age is known."""
    if "versions" not in batch:
        return None

    def age(part: Padded) -> list[Tensor]:
        ages = (version - part["versions"]).double()
        return [ages.where(part["loss_mask"].bool(), -math.inf)]

    oldest = float(reduce_rows(batch, age, ["versions", "loss_mask"], "max").max())
    return oldest if math.isfinite(oldest) else None


def _by_age(
    batch: Batch,
    version: int,
    oldest: float,
    columns: Columns,
    names: Sequence[str],
    how: str = "sum",
) -> dict[str, list[Tensor]]:
    """Returns for every age up to `oldest` reduce_rows of its trained tokens, each [B]: of ones,
    then of `columns`. Tokens of other ages count as 0."""
    ages = range(min(int(oldest), OLDEST) + 1)

    def of_ages(part: Padded) -> list[Tensor]:
        mask = part["loss_mask"].bool()
        age = (version - part["versions"]).clamp(0, OLDEST)
        made = columns(part)
        own = [mask & (age == k) for k in ages]
        return [c for mine in own for c in (mine, *(column.where(mine, 0.0) for column in made))]

    found = reduce_rows(batch, of_ages, [*names, "versions", "loss_mask"], how).unbind(1)
    width = len(found) // len(ages)
    return {
        f"age_{k}" + "_up" * (k == OLDEST): list(found[k * width : (k + 1) * width]) for k in ages
    }
