"""Picks rows by the pass rates of the latest answers to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import Field

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
    passes_at: float = 1.0

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(
                f"low={self.low} > high={self.high}: lower the first, or raise the second"
            )


class Picker(Protocol):
    """Picks the rows of one data set, one after another, without end."""

    def pick(self) -> int:
        """Returns the index of the next row."""

    def observe(self, row: int, rate: float | None) -> None:
        """Notes the pass rate of the answers to a row that was picked; None where all failed."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as plain data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned."""


class InTurn:
    """Picks every row once in each pass; `order` gives the rows of pass 0, 1, ..."""

    def __init__(self, size: int, order: Callable[[int], list[int]]) -> None:
        self._size, self._order = size, order
        self._made = 0  # picks so far
        self._pass: tuple[int, list[int]] = (-1, [])  # its number, its rows

    def pick(self) -> int:
        """Returns the index of the next row."""
        number, place = divmod(self._made, self._size)
        if self._pass[0] != number:
            self._pass = number, self._order(number)
        self._made += 1
        return self._pass[1][place]

    def observe(self, row: int, rate: float | None) -> None:
        """Ignores the pass rate."""

    def state_dict(self) -> dict[str, Any]:
        """Returns how many picks were made."""
        return {"made": self._made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after as many picks."""
        self._made = state["made"]


class ByPassRate:
    """Picks rows whose pass rate is in a band, those first that wait longest; among these, an exact
    share of `config.explore` (all, while the band is empty) are the rows `in_turn`, whatever their
    rate.

    A row that was picked is not picked again before its answers are observed, unless every row is
    out like that. Picks depend only on the picks and observations before, so their order decides
    alone."""

    def __init__(self, config: Curriculum, size: int, in_turn: InTurn) -> None:
        self._config, self._size, self._in_turn = config, size, in_turn
        self._made = 0
        self.explored = 0
        self.rates: dict[int, float] = {}  # of rows that have been answered
        self._band: dict[int, None] = {}  # rows to prefer, those that wait longest first
        self._out: set[int] = set()  # picked, and not observed since

    @property
    def in_band(self) -> int:
        """Returns how many rows have a pass rate in the band."""
        return sum(map(self._prefers, self.rates.values()))

    def pick(self) -> int:
        """Returns the index of the next row."""
        share, self._made = self._config.explore, self._made + 1
        if not self._band or int(self._made * share) > int((self._made - 1) * share):
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
            "made": self._made,
            "explored": self.explored,
            "in_turn": self._in_turn.state_dict(),
            "rates": list(self.rates.items()),
            "band": list(self._band),
            "out": sorted(self._out),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned."""
        self._made, self.explored = state["made"], state["explored"]
        self._in_turn.load_state_dict(state["in_turn"])
        self.rates = dict(state["rates"])
        self._band = dict.fromkeys(state["band"])
        self._out = set(state["out"])


def pass_rate(rewards: Iterable[float], passes_at: float) -> float | None:
    """Returns the share of answers with a reward of at least `passes_at`; None for no answer."""
    passed = [reward >= passes_at for reward in rewards]
    return sum(passed) / len(passed) if passed else None
