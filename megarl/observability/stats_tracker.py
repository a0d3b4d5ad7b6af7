"""StatsTracker: figures recorded anywhere in a step, exported once per step.

    tracker = StatsTracker()
    with tracker.scope("actor"):
        tracker.scalar(lr=1e-5)
        tracker.denominator(tokens=loss_mask)                       # [B,S] bool
        tracker.stat("tokens", entropy=entropy, logp=logp)          # means over the mask
        tracker.stat("tokens", reduce=("avg", "max"), gap=gap)
        with tracker.record_timing("train"):
            ...
    stats = tracker.export(group)   # {"actor/lr": ..., "actor/entropy": ..., "actor/gap/max": ...}

Tensors are reduced when they are recorded (a handful of numbers are kept, no tensor but the
denominator's mask), and ranks are merged when they are exported. Averages are weighted by count
throughout: over calls, and over ranks with unequal numbers of tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

REDUCTIONS = ("avg", "min", "max", "sum")


@dataclass
class _Moments:
    """What any reduction needs, mergeable in any order."""

    reduce: tuple[str, ...]
    total: float = 0.0
    count: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def merge(self, other: _Moments) -> None:
        self.total += other.total
        self.count += other.count
        # Python's min and max keep or lose a NaN by its position: keep it always
        self.low = min(self.low, other.low, key=_nan_first)
        self.high = max(self.high, other.high, key=_nan_last)

    def value(self, reduction: str) -> float:
        if reduction == "avg":
            return self.total / self.count
        return {"sum": self.total, "min": self.low, "max": self.high}[reduction]


def _nan_first(value: float) -> tuple[bool, float]:
    return (not math.isnan(value), value)


def _nan_last(value: float) -> tuple[bool, float]:
    return (math.isnan(value), value)


class StatsTracker:
    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._scope: list[str] = []
        self._figures: dict[str, _Moments] = {}
        self._masks: dict[str, Tensor] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefixes every name recorded inside with `name/`."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    def scalar(self, *, reduce: str | Sequence[str] = "avg", **values: float) -> None:
        """Plain numbers; repeated calls and ranks combine by `reduce`."""
        for name, value in values.items():
            v = float(value)
            self._record(name, reduce, _Moments((), v, 1.0, v, v))

    def denominator(self, **masks: Tensor) -> None:
        """Masks, any shape, that `stat` divides by; exported as the number of true elements."""
        for name, mask in masks.items():
            mask = mask.detach().bool()
            self._masks[self._key(name)] = mask
            count = float(mask.sum())
            self._record(name, "sum", _Moments((), count, 1.0, count, count))

    def stat(
        self, denominator: str, *, reduce: str | Sequence[str] = "avg", **values: Tensor
    ) -> None:
        """Tensors shaped like the denominator's mask; masked-out elements never count."""
        key = self._key(denominator)
        if key not in self._masks:
            raise ValueError(f"stat: no denominator {key!r}; call denominator({denominator}=...)")
        mask = self._masks[key]
        for name, value in values.items():
            if value.shape != mask.shape:
                raise ValueError(
                    f"stat {name!r} has shape {tuple(value.shape)}, its denominator {key!r} has "
                    f"{tuple(mask.shape)}"
                )
            x = value.detach()[mask.to(value.device)].double()
            if x.numel():
                low, high = (float(v) for v in torch.aminmax(x))
                self._record(name, reduce, _Moments((), float(x.sum()), x.numel(), low, high))
            else:
                self._record(name, reduce, _Moments(()))

    @contextmanager
    def record_timing(self, name: str) -> Iterator[None]:
        """Seconds inside, as `timing/<scope>/<name>_s`: summed in a step, the slowest rank's."""
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            key = f"timing/{self._key(name)}_s"
            have = self._figures.setdefault(key, _Moments(("timing",), high=0.0))
            have.high += seconds

    def export(
        self, reduce_group: dist.ProcessGroup | None = None, *, reset: bool = True
    ) -> dict[str, float]:
        """Figures merged over `reduce_group` (None: this rank alone), then starts afresh.

        Collective over the group; skipped when it has one member. Ranks may have recorded
        different names. An average or extreme over no element at all is left out.
        """
        merged = self._figures
        if reduce_group is not None and dist.get_world_size(reduce_group) > 1:
            parts: list[dict[str, _Moments]] = [{}] * dist.get_world_size(reduce_group)
            dist.all_gather_object(parts, self._figures, group=reduce_group)
            merged = {}
            for part in parts:
                for key, figure in part.items():
                    _merge_into(merged, key, figure)
        if reset:
            self._figures, self._masks = {}, {}
        return _flatten(merged)

    def _key(self, name: str) -> str:
        return "/".join([*self._scope, name])

    def _record(self, name: str, reduce: str | Sequence[str], figure: _Moments) -> None:
        figure.reduce = (reduce,) if isinstance(reduce, str) else tuple(reduce)
        for r in figure.reduce:
            if r not in REDUCTIONS:
                raise ValueError(f"reduce={r!r}: use {', '.join(REDUCTIONS)}")
        _merge_into(self._figures, self._key(name), figure)


def _merge_into(figures: dict[str, _Moments], key: str, figure: _Moments) -> None:
    if key not in figures:
        # a copy: the caller may keep adding to its own
        figures[key] = _Moments(**vars(figure))
        return
    have = figures[key]
    if have.reduce != figure.reduce:
        raise ValueError(
            f"{key!r} was recorded with reduce={have.reduce} and now with {figure.reduce}"
        )
    have.merge(figure)


def _flatten(figures: dict[str, _Moments]) -> dict[str, float]:
    out = {}
    for key, figure in figures.items():
        if figure.reduce == ("timing",):
            out[key] = figure.high
            continue
        for reduction in figure.reduce:
            name = key if len(figure.reduce) == 1 else f"{key}/{reduction}"
            if figure.count or reduction == "sum":
                out[name] = figure.value(reduction)
    return out
