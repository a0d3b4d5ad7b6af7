"""Looks at what the answers of each batch earned: by part of a mixture, by difficulty, and for the
curriculum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.config.dataset import DatasetConfig
from megarl.data.curriculum import Curriculum, pass_rate
from megarl.data.draws import Draws
from megarl.rollout.outcomes import Outcome
from megarl.trainer.rollout_metrics import PASSES

MOST = 16  # difficulties that have figures of their own; those that come later are "other"


class Results:
    """Tells the sampler of the training data the pass rates of every batch, and keeps its figures:
    dataset/<part>/prompts and dataset/<part>/reward, of rows with a column `difficulty`
    difficulty/<value>/prompts and difficulty/<value>/pass_rate, and what the curriculum knows.

    sampler: the loader's; one of the user's own hears nothing."""

    def __init__(self, config: DatasetConfig, sampler: object) -> None:
        self._parts, self._curriculum = list(config.parts), config.curriculum is not None
        self._draws = sampler if isinstance(sampler, Draws) else None
        bound = (
            Curriculum(**config.curriculum).passes_at if config.curriculum is not None else PASSES
        )
        self._passes_at = bound
        self._difficulties: set[str] = set()
        self.figures: dict[str, float] = {}

    def take(self, outcomes: Sequence[Outcome]) -> None:
        """Takes the outcomes that came with a batch, rejected ones among them."""
        self.figures = self._by_difficulty(outcomes)
        if self._draws is None:
            return
        self.figures |= self._by_part(outcomes)
        if self._curriculum:
            bound = self._passes_at
            self._draws.observe((o.row["row_id"], pass_rate(o.rewards, bound)) for o in outcomes)
            self.figures |= self._draws.stats()

    def _by_part(self, outcomes: Sequence[Outcome]) -> dict[str, float]:
        figures = {}
        for name in self._parts:
            mine = [o.rewards for o in outcomes if o.row["dataset"] == name]
            figures[f"dataset/{name}/prompts"] = float(len(mine))
            if rewards := [reward for of_row in mine for reward in of_row]:
                figures[f"dataset/{name}/reward"] = sum(rewards) / len(rewards)
        return figures

    def _by_difficulty(self, outcomes: Sequence[Outcome]) -> dict[str, float]:
        found: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            if (value := outcome.row.get("difficulty")) is not None:
                found.setdefault(self._named(value), []).append(outcome)
        figures = {}
        for name, mine in sorted(found.items()):
            figures[f"difficulty/{name}/prompts"] = float(len(mine))
            rate = pass_rate([reward for o in mine for reward in o.rewards], self._passes_at)
            if rate is not None:
                figures[f"difficulty/{name}/pass_rate"] = rate
        return figures

    def _named(self, difficulty: Any) -> str:
        """Returns a difficulty as part of a metric's name: a number with one decimal at most."""
        number = isinstance(difficulty, float)
        name = f"{difficulty:.1f}".removesuffix(".0") if number else str(difficulty)
        name = name.replace("/", "_")
        if len(self._difficulties) < MOST:
            self._difficulties.add(name)
        return name if name in self._difficulties else "other"
