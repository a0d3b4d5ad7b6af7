"""Bootstrap confidence intervals of a mean (percentile method; Efron 1979). No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_CHUNK = 1 << 22  # drawn indices at a time: 32 MiB


def bootstrap_ci(
    successes: Sequence[float] | Sequence[bool],
    n_boot: int = 2000,
    seed: int = 0,
    *,
    level: float = 0.95,
) -> tuple[float, float]:
    """(low, high) of the mean of `successes` (0/1, or any score), deterministic in `seed`."""
    values = np.asarray(successes, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"bootstrap_ci: needs a list of at least one score, got {values.shape}")
    if not 0.0 < level < 1.0:
        raise ValueError(f"bootstrap_ci: level={level} must lie between 0 and 1")
    rng = np.random.default_rng(seed)
    means = np.empty(n_boot)
    rows = max(1, _CHUNK // len(values))
    for start in range(0, n_boot, rows):
        stop = min(n_boot, start + rows)
        index = rng.integers(0, len(values), size=(stop - start, len(values)))
        means[start:stop] = values[index].mean(axis=1)
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(means, [tail, 100.0 - tail])
    return float(low), float(high)


def bootstrap_gain_ci(
    before: Sequence[float] | Sequence[bool],
    after: Sequence[float] | Sequence[bool],
    n_boot: int = 2000,
    seed: int = 0,
    *,
    level: float = 0.95,
) -> tuple[float, float]:
    """(low, high) of mean(after) - mean(before), the two being scores of the same problems."""
    if len(before) != len(after):
        raise ValueError(
            f"bootstrap_gain_ci: {len(before)} scores before, {len(after)} after; pair them by "
            "problem"
        )
    gains = [float(b) - float(a) for a, b in zip(before, after, strict=True)]
    return bootstrap_ci(gains, n_boot, seed, level=level)
