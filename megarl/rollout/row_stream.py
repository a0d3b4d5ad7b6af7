"""Feeds rows to prepare_batch: one endless stream over the epochs of a dataloader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


class RowStream:
    """Holds its own iterator over the dataloader and begins a new epoch when it ends.

    `first`: rows to hand out before any is drawn (those a resumed run had not consumed).
    """

    def __init__(self, *, first: Sequence[Row] = ()) -> None:
        self._rows: deque[Row] = deque(first)
        self._loader: Iterable[list[Row]] | None = None
        self._batches: Iterator[list[Row]] | None = None
        self.batch_size = 0

    @property
    def buffered(self) -> list[Row]:
        """Returns the rows that were drawn but not handed out."""
        return list(self._rows)

    def attach(self, loader: Iterable[list[Row]]) -> None:
        """Fixes the dataloader at the first call; `batch_size` is its own, or its first batch's.
        Raises ValueError for another dataloader later."""
        if loader is self._loader:
            return
        if self._loader is not None:
            raise ValueError(
                "prepare_batch was called with another dataloader: its rows in flight would mix; "
                "use one client per dataloader, and rollout_batch for evaluation"
            )
        self._loader = loader
        size = getattr(loader, "batch_size", None)
        if size is None:
            before = len(self._rows)
            self._draw()
            size = len(self._rows) - before
        self.batch_size = int(size)

    def next_row(self) -> Row:
        """Returns the next row. Raises ValueError where the dataloader yields no batch, or no lists
        of rows."""
        if not self._rows:
            self._draw()
        return self._rows.popleft()

    def _draw(self) -> None:
        assert self._loader is not None
        for _ in range(2):  # the second time from a new epoch
            if self._batches is None:
                self._batches = iter(self._loader)
            rows = next(self._batches, None)
            if isinstance(rows, Mapping):
                raise ValueError(
                    "prepare_batch: the dataloader yields single rows, and a batch of rows is "
                    "needed: give it batch_size and collate_fn=list; a list of rows is for "
                    "rollout_batch"
                )
            if rows:
                self._rows.extend(rows)
                return
            self._batches = None
        raise ValueError("the dataloader yields no batch: fewer rows than batch_size?")
