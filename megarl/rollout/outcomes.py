"""Keeps what answers to the rows of the dataloader earned, for whoever chooses the next rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megarl.rollout.episode import Episode


class Outcome(NamedTuple):
    """Holds a row, and the rewards of its rollouts that did not fail, whether they were accepted
    or rejected."""

    row: dict[str, Any]
    rewards: Sequence[float]


class Outcomes:
    """Holds the outcomes of episodes that ended, by their number, until they are told.

    They are told in order of submission, up to the last episode that was handed out: whichever
    ended first, with rollout.order=submission every batch tells the same."""

    def __init__(self) -> None:
        self._untold: dict[int, Outcome] = {}
        self._rejected: set[int] = set()  # a resumed run makes the others again

    def add(self, episode: Episode) -> None:
        """Notes how a drawn episode ended."""
        if episode.drawn:
            self._untold[episode.number] = Outcome(episode.row, episode.rewards)
            if episode.batch is None:
                self._rejected.add(episode.number)

    def tell(self, last: int) -> list[Outcome]:
        """Returns what was not told yet of the episodes up to number `last`."""
        numbers = sorted(n for n in self._untold if n <= last)
        self._rejected.difference_update(numbers)
        return [self._untold.pop(n) for n in numbers]

    def state_dict(self) -> list[Any]:
        """Returns the outcomes of rejected episodes that were not told, as plain data."""
        rejected = (self._untold[number] for number in sorted(self._rejected))
        return [(outcome.row, list(outcome.rewards)) for outcome in rejected]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Continues from what `state_dict` returned, which is told first."""
        # episodes that are made again take numbers from 0 on that these had, too
        self._untold = {i - len(state): Outcome(*outcome) for i, outcome in enumerate(state)}
        self._rejected = set(self._untold)
