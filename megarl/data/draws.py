"""Draws rows from the parts of a mixture by their weights, and in each part in turn or by pass
rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megarl.config.dataset import DatasetConfig
from megarl.data.curriculum import ByPassRate, Curriculum, InTurn, Picker
from megarl.data.dataset import RowDataset
from megarl.data.problem import stable_hash
from megarl.data.shares import Shares


class Draws:
    """Is a sampler: gives the indices of an epoch, which has as many rows as the data set (whole
    batches of them, with drop_last). A part that is used up begins again, in another order.

    state_dict and load_state_dict continue in the middle of an epoch; shares are exact and pass
    rates are kept over epochs and resumes."""

    def __init__(self, dataset: RowDataset, cfg: DatasetConfig, *, seed: int) -> None:
        weights = {name: part.weight for name, part in cfg.parts.items()} or {"": 1.0}
        size, rest = len(dataset), len(dataset) % cfg.batch_size
        self._length = size - rest if cfg.drop_last else size
        self._shares = Shares(weights)
        self._parts: dict[str, range] = {name: dataset.parts[name] for name in weights}
        self._pickers = {
            name: _picker(name, cfg, seed, rows) for name, rows in dataset.parts.items()
        }
        self._index = {dataset[i]["row_id"]: i for i in range(size)}
        self._drawn = 0  # in this epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        while self._drawn < self._length:
            self._drawn += 1
            part = self._shares.next()
            yield self._parts[part][self._pickers[part].pick()]
        self._drawn = 0

    def observe(self, rates: Iterable[tuple[int, float | None]]) -> None:
        """Notes (row_id, pass rate) of rows that were answered, in this order; None where all
        answers failed."""
        for row_id, rate in rates:
            index = self._index[row_id]
            name = next(name for name, rows in self._parts.items() if index in rows)
            self._pickers[name].observe(index - self._parts[name].start, rate)

    def stats(self) -> dict[str, float]:
        """Returns, of a curriculum, curriculum/in_band and curriculum/answered (rows) and
        curriculum/explored (draws so far); {} without one."""
        found = [p for p in self._pickers.values() if isinstance(p, ByPassRate)]
        if not found:
            return {}
        return {
            "curriculum/in_band": float(sum(p.in_band for p in found)),
            "curriculum/answered": float(sum(len(p.rates) for p in found)),
            "curriculum/explored": float(sum(p.explored for p in found)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain data."""
        return {
            "drawn": self._drawn,
            "counts": dict(self._shares.counts),
            "pickers": {name: p.state_dict() for name, p in self._pickers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned."""
        self._drawn, self._shares.counts = state["drawn"], dict(state["counts"])
        for name, picker in self._pickers.items():
            picker.load_state_dict(state["pickers"][name])


def _picker(name: str, cfg: DatasetConfig, seed: int, rows: range) -> Picker:
    """Returns what picks the rows of the part `name`: in turn, or by pass rate."""

    def order(number: int) -> list[int]:
        """Returns the rows of pass `number`."""
        if not cfg.shuffle:
            return list(range(len(rows)))
        key = stable_hash(f"{seed} {name} {number}") % (1 << 63)
        return torch.randperm(len(rows), generator=torch.Generator().manual_seed(key)).tolist()

    in_turn = InTurn(len(rows), order)
    if cfg.curriculum is None:
        return in_turn
    return ByPassRate(Curriculum(**cfg.curriculum), len(rows), in_turn)
