"""Knows which weights a rank holds, whoever has brought others since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from .messages import BITS

_STEP = -7046029254386353131  # between the weights of rows, which are odd


@dataclass
class Holding:
    """Says what weights a rank holds. id: the trainers' name for them. marks: of the parameters
    when they had arrived, which other weights do not have, whoever brings them."""

    id: str | None = None
    marks: Mapping[str, int] | None = None

    def note(self, id_: str, params: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
        """Notes that these parameters hold the weights of this name."""
        self.id, self.marks = id_, {n: mark(params[n]) for n in sorted(set(names))}

    def look(self, params: Mapping[str, torch.Tensor]) -> str | None:
        """Returns the name of the weights that the parameters still hold, None for others."""
        for name, known in (self.marks or {}).items():
            if name not in params or mark(params[name]) != known:
                self.forget()
                break
        return self.id

    def forget(self) -> None:
        """Knows nothing of the weights any more."""
        self.id = self.marks = None


def mark(values: torch.Tensor) -> int:
    """Returns the sum of the bits of each row, times a weight by the row's number, modulo 2^64, in
    one pass over memory. One number that differs alters it for certain, other weights but by a
    chance in billions."""
    kind = BITS[values.element_size()]
    rows = (values if values.dim() else values[None]).view(kind).sum(-1, dtype=torch.int64)
    weights = torch.arange(rows.numel(), device=rows.device).mul_(_STEP).bitwise_or_(1)
    return int(rows.flatten().mul_(weights).sum())
