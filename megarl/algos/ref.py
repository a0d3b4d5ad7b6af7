"""Ref: the frozen policy that the KL term measures against."""

from __future__ import annotations

from torch import Tensor

from megarl.algos.role import Role
from megarl.api.engine import TrainEngine
from megarl.config.engine import TrainEngineConfig

Batch = dict[str, Tensor]


class Ref(Role):
    def __init__(
        self, config: TrainEngineConfig, engine: TrainEngine, *, temperature: float = 1.0
    ) -> None:
        super().__init__(engine)
        self.config = config
        self.temperature = temperature

    def compute_logp(self, batch: Batch) -> Tensor:
        """[B,S] log-probabilities at the actor's sampling temperature, 0 at t=0."""
        return self.forward_logp(batch, self.temperature)
