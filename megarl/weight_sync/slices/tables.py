"""Says where the HF tensors lie in a server rank's parameters: a table made by the server itself.

Its entries are to a server what pieces are to a trainer: boxes of HF tensors, and strided views of
parameters that equal them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.models.ops import Shape
from megarl.models.piece_table import View
from megarl.weight_sync.boxes import Box, numel


class Entry(NamedTuple):
    """Says that box [start, stop) of an HF tensor, in row-major order, is a strided view of a
    server rank's parameter. `offset`: in elements, from the beginning of its storage."""

    tensor: str
    start: Shape
    stop: Shape
    param: str
    offset: int
    shape: Shape
    strides: Shape

    @property
    def box(self) -> Box:
        """Returns (start, stop)."""
        return self.start, self.stop

    @property
    def view(self) -> View:
        """Returns the view of the parameter's storage."""
        return View(self.offset, self.shape, self.strides)

    @property
    def numel(self) -> int:
        """Returns how many numbers the box has."""
        return numel(self.box)


@dataclass(frozen=True)
class ServerTable:
    """Holds the entries of one rank of a server. `digest` names them: tables of one digest are
    planned once, so it covers the entries, and not the parameters' shapes alone."""

    entries: Sequence[Entry]
    digest: str

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[Any]], digest: str) -> ServerTable:
        """Makes a table of JSON's rows, each the fields of an Entry in order."""
        return cls(
            [
                Entry(t, tuple(a), tuple(b), param, offset, tuple(shape), tuple(strides))
                for t, a, b, param, offset, shape, strides in rows
            ],
            digest,
        )
