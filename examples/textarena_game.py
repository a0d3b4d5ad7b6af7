"""A game of TextArena (extra `textarena`) as an environment, and its rows of data.

    megarl launch --config configs/textarena_grpo.yaml actor.path=MODEL

A row is a seed: all samples of a row play the same game.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import textarena as ta

from megarl.config.dataset import DatasetConfig

_seeding = threading.Lock()  # games draw from the one random state of the process


class Game:
    """One player's game. The reward of the last move is the game's, in [-1, 1] or [0, 1]."""

    def __init__(self, *, name: str = "GuessTheNumber-v0") -> None:
        self.env = ta.make(name)
        self._seen = ""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        with _seeding:
            self.env.reset(num_players=1, seed=seed)
        return self._news(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with _seeding:
            done, info = self.env.step(action)
        if done:
            rewards, info = self.env.close()
            return "", float(rewards[0]), True, False, info
        return self._news(), 0.0, False, False, info

    def _news(self) -> str:
        """Returns what the game says that it has not said before; it repeats its history."""
        _, text = self.env.get_observation()
        new = text.removeprefix(self._seen)
        self._seen = text
        return new.strip()


def games(cfg: DatasetConfig, *, seed: int, count: int = 1000) -> Iterator[dict[str, Any]]:
    """Yields a row for each of `count` games."""
    for i in range(cfg.size or count):
        yield {
            "messages": [{"role": "system", "content": "You play a game."}],
            "seed": 1_000_000 * seed + i,
        }
