"""Moves parts of an engine's memory (api/engine.py's PARTS) off the device and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megarl.api.engine import PARTS
from megarl.engine import optimizer
from megarl.engine.offload import (
    ParkedStorages,
    check_parts,
    gradient_tensors,
    memory_in_use,
    optimizer_tensors,
)
from megarl.engine.setup import EngineState
from megarl.observability.logging import get_logger

log = get_logger(__name__)


class Memory:
    """Keeps which parts of an engine are on the device and which are away. With `offload` in the
    engine's config the weights rest in host memory."""

    def __init__(self, state: EngineState) -> None:
        self._built = state
        self._parked = ParkedStorages()

    def require(self, what: str, parts: Sequence[str]) -> None:
        """Raises RuntimeError if `what` would meet a part that is away."""
        if away := tuple(part for part in parts if part in self._parked):
            raise RuntimeError(f"{what} needs {away}, which are offloaded; call onload({away})")

    def offload(self, parts: Sequence[str]) -> dict[str, int]:
        """Gives up the device memory of `parts`; returns bytes by part, and in use before and
        after. Collective: weights that the last step has not gathered are made whole first. Raises
        ValueError for a part that does not exist."""
        parts = tuple(p for p in check_parts(parts) if p not in self._parked)
        before, freed = memory_in_use(), {}
        if "params" in parts:
            optimizer.gather_params(self._built.chunks)
        for part in parts:
            owned = [t for p in PARTS[: PARTS.index(part)] for t in self._tensors(p)]
            freed[part] = self._parked.park(
                part, self._tensors(part), keep=part != "grads", but_not=owned
            )
        return self._moved("offload", freed, before)

    def onload(self, parts: Sequence[str]) -> dict[str, int]:
        """Brings back those of `parts` that are away; returns bytes by part, and in use before and
        after."""
        before = memory_in_use()
        taken = {p: self._parked.restore(p) for p in check_parts(parts) if p in self._parked}
        return self._moved("onload", taken, before)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Brings weights that rest in host memory (`offload` of the config) to the device for one
        pass."""
        resting = self._built.config.offload and "params" in self._parked
        if resting:
            self.onload(("params",))
        try:
            yield
        finally:
            if resting:
                self.offload(("params",))

    def _moved(self, verb: str, moved: dict[str, int], before: int) -> dict[str, int]:
        after = memory_in_use()
        each = ", ".join(f"{part} {n / 1e6:.1f} MB" for part, n in moved.items()) or "nothing"
        # at_hand moves twice a pass; others when they are asked to
        say = log.debug if self._built.config.offload else log.info
        say("%s: %s; in use %.1f -> %.1f MB", verb, each, before / 1e6, after / 1e6)
        return {**moved, "in_use_before": before, "in_use_after": after}

    def _tensors(self, part: str) -> list[torch.Tensor]:
        b = self._built
        if part == "params":
            return list(b.params.values())
        if b.optimizer is None:
            return []
        if part == "grads":
            return list(gradient_tensors(b.chunks))
        return list(optimizer_tensors(b.optimizer))
