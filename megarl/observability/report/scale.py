"""Scales the axes of a chart: data to pixels, and round numbers to write beside them."""

from __future__ import annotations

import math


class Scale:
    """Maps data to pixels along one axis, linearly or by the base-10 logarithm."""

    def __init__(self, lo: float, hi: float, a: float, b: float, *, log: bool = False) -> None:
        self.log = log
        self.lo, self.hi = (math.log10(lo), math.log10(hi)) if log else (lo, hi)
        self.a, self.b = a, b

    def __call__(self, value: float) -> float:
        v = math.log10(value) if self.log else value
        span = self.hi - self.lo
        return self.a + (self.b - self.a) * ((v - self.lo) / span if span else 0.5)


def nice_ticks(lo: float, hi: float, n: int = 5) -> list[float]:
    """Returns about n round numbers (1, 2, 2.5, 5 times a power of ten) that enclose [lo, hi], but
    for a rounding error: 1.0000001 is no reason for a tick at 1.25."""
    if hi <= lo:
        hi = lo + (abs(lo) * 0.1 or 1.0)
    rough = (hi - lo) / max(1, n - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(lo / step + 1e-5), math.ceil(hi / step - 1e-5)
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(lo: float, hi: float) -> list[float]:
    """Returns powers of ten that enclose [lo, hi], every second or third of them when there are
    many."""
    first, last = math.floor(math.log10(lo)), math.ceil(math.log10(hi))
    last = max(last, first + 1)
    step = max(1, math.ceil((last - first) / 5))
    return [10.0**e for e in range(first, last + step, step)]
