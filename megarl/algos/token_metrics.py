"""Measures what the trained tokens of a batch are: how old, how far from the trainer's view of them
at each age, and how their advantages are spread. A token's age is the number of versions between
the weights that wrote it and those that train on it.

Every function is collective and returns the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from megarl.algos.kl import kl_estimate
from megarl.algos.rows import moments, reduce_rows, total
from megarl.api.batch import Batch, Padded

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
