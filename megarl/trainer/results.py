"""Looks at what the answers of each batch earned: by part of a mixture, and for the curriculum."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.dataset import DatasetConfig
from megarl.data.curriculum import pass_rate
from megarl.data.draws import Draws
from megarl.rollout.outcomes import Outcome


class Results:
    """Tells the sampler of the training data the pass rates of every batch, and keeps its figures:
    dataset/<part>/prompts, dataset/<part>/reward, and what the curriculum knows.

    sampler: the loader's; one of the user's own hears nothing."""

    def __init__(self, config: DatasetConfig, sampler: object) -> None:
        self._parts, self._curriculum = list(config.parts), config.curriculum
        self._draws = sampler if isinstance(sampler, Draws) else None
        self.figures: dict[str, float] = {}

    def take(self, outcomes: Sequence[Outcome]) -> None:
        """Takes the outcomes that came with a batch, rejected ones among them."""
        if self._draws is None:
            return
        self.figures = self._by_part(outcomes)
        if self._curriculum is not None:
            bound = self._curriculum.passes_at
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
