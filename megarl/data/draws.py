"""Draws rows from the parts of a mixture by their weights, and in each part in turn or by the pass
rates of the latest answers. It imports no torch of itself, as `sources` does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from megarl.config.dataset import DatasetConfig
from megarl.data.rows import Shares, stable_hash

if TYPE_CHECKING:
    from megarl.data.dataset import RowDataset

NEWEST = 0.5  # weight of the newest answers in a row's pass rate


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Says which rows are drawn, by the pass rates of the latest answers to them.

    low, high: rows with a pass rate from one to the other are preferred.
    explore: share of rows drawn in turn whatever their pass rate, so that none is given up; until
        some row's pass rate is known, every row is drawn this way.
    passes_at: an answer passes with a reward of at least this.
    """

    low: Annotated[float, Field(ge=0, le=1)] = 0.1
    high: Annotated[float, Field(ge=0, le=1)] = 0.9
    explore: Annotated[float, Field(gt=0, le=1)] = 0.25
    passes_at: Annotated[float, Field(allow_inf_nan=False)] = 1.0

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(
                f"low={self.low} > high={self.high}: lower the first, or raise the second"
            )


class InTurn:
    """Picks every row once in each pass; `order` gives the rows of pass 0, 1, ..."""

    def __init__(self, size: int, order: Callable[[int], list[int]]) -> None:
        self._size, self._order = size, order
        self._picks = 0  # picks so far
        self._pass: tuple[int, list[int]] = (-1, [])  # its number, its rows

    def pick(self) -> int:
        """Returns the index of the next row."""
        number, place = divmod(self._picks, self._size)
        if self._pass[0] != number:
            self._pass = number, self._order(number)
        self._picks += 1
        return self._pass[1][place]

    def observe(self, row: int, rate: float | None) -> None:
        """Ignores the pass rate."""

    def state_dict(self) -> dict[str, Any]:
        """Returns how many picks were made."""
        return {"made": self._picks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after as many picks."""
        self._picks = state["made"]


class ByPassRate:
    """Picks rows whose pass rate is in a band, those first that wait longest; among these, an exact
    share of `config.explore` (all, while the band is empty) are the rows `in_turn`, whatever their
    rate.

    A row that was picked is not picked again before its answers are observed, unless every row is
    out like that. Picks depend only on the picks and observations before, so their order decides
    alone."""

    def __init__(self, config: Curriculum, size: int, in_turn: InTurn) -> None:
        self._config, self._size, self._in_turn = config, size, in_turn
        self._picks = 0
        self.explored = 0
        self.rates: dict[int, float] = {}  # of rows that have been answered
        self._band: dict[int, None] = {}  # preferred rows, longest waiting first
        self._out: set[int] = set()  # picked, and not observed since

    @property
    def in_band(self) -> int:
        """Returns how many rows have a pass rate in the band."""
        return sum(map(self._prefers, self.rates.values()))

    def pick(self) -> int:
        """Returns the index of the next row."""
        share, self._picks = self._config.explore, self._picks + 1
        if not self._band or int(self._picks * share) > int((self._picks - 1) * share):
            self.explored += 1
            row = self._next_in_turn()
        else:
            row = next(iter(self._band))
        self._band.pop(row, None)
        self._out.add(row)
        return row

    def _next_in_turn(self) -> int:
        for _ in range(self._size):
            if (row := self._in_turn.pick()) not in self._out:
                return row
        return self._in_turn.pick()

    def observe(self, row: int, rate: float | None) -> None:
        """Notes the pass rate of the answers to a row that was picked; None where all failed."""
        self._out.discard(row)
        if rate is not None:
            old = self.rates.get(row, rate)
            self.rates[row] = (1 - NEWEST) * old + NEWEST * rate
        if row in self.rates and self._prefers(self.rates[row]):
            self._band[row] = None
        else:
            self._band.pop(row, None)

    def _prefers(self, rate: float) -> bool:
        return self._config.low <= rate <= self._config.high

    def state_dict(self) -> dict[str, Any]:
        """Returns the pass rates, the order of the band and the counts."""
        return {
            "made": self._picks,
            "explored": self.explored,
            "in_turn": self._in_turn.state_dict(),
            "rates": list(self.rates.items()),
            "band": list(self._band),
            "out": sorted(self._out),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned."""
        self._picks, self.explored = state["made"], state["explored"]
        self._in_turn.load_state_dict(state["in_turn"])
        self.rates = dict(state["rates"])
        self._band = dict.fromkeys(state["band"])
        self._out = set(state["out"])


def pass_rate(rewards: Iterable[float], passes_at: float) -> float | None:
    """Returns the share of answers with a reward of at least `passes_at`; None for no answer."""
    passed = [reward >= passes_at for reward in rewards]
    return sum(passed) / len(passed) if passed else None


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
        by_rate = [p for p in self._pickers.values() if isinstance(p, ByPassRate)]
        if not by_rate:
            return {}
        return {
            "curriculum/in_band": float(sum(p.in_band for p in by_rate)),
            "curriculum/answered": float(sum(len(p.rates) for p in by_rate)),
            "curriculum/explored": float(sum(p.explored for p in by_rate)),
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


def _picker(name: str, cfg: DatasetConfig, seed: int, rows: range) -> InTurn | ByPassRate:
    """Returns what picks the rows of the part `name`: in turn, or by pass rate."""

    def order(number: int) -> list[int]:
        """Returns the rows of pass `number`."""
        if not cfg.shuffle:
            return list(range(len(rows)))
        import torch

        key = stable_hash(f"{seed} {name} {number}") % (1 << 63)
        return torch.randperm(len(rows), generator=torch.Generator().manual_seed(key)).tolist()

    in_turn = InTurn(len(rows), order)
    if cfg.curriculum is None:
        return in_turn
    return ByPassRate(Curriculum(**cfg.curriculum), len(rows), in_turn)
