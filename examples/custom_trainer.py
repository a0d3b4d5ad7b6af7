"""A training loop of one's own: the KL's weight falls to zero over the run, and a step whose batch
has nothing to compare is told in the log.

    megarl launch --config configs/quickstart_grpo.yaml \\
        trainer=examples.custom_trainer:Annealed kl_start=0.05 ref.path=
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.recipes import GRPOConfig
from megarl.observability.logging import get_logger
from megarl.trainer.rl import RLTrainer

log = get_logger(__name__)


@dataclass(kw_only=True)
class AnnealedConfig(GRPOConfig):
    """Adds a key to the recipe's: it has a type, a default and a line in --help like the others."""

    kl_start: float = 0.05
    """kl_ctl of the first step; 0 after the last"""


class Annealed(RLTrainer):
    """Makes GRPO's steps with a KL weight that depends on the step alone, so that a run that is
    continued from a checkpoint goes on as if nothing had been."""

    config_class = AnnealedConfig
    cfg: AnnealedConfig

    def step(self, step: int) -> dict[str, float]:
        """Makes step `step` (from 0); returns its metrics, with kl_ctl."""
        left = 1.0 - step / max(1, self.spec.total_train_steps)
        self.cfg.kl_ctl = self.cfg.kl_start * left if self.ref is not None else 0.0
        stats = super().step(step)
        if stats["reward/groups_all_equal"] == 1.0:
            log.warning("step %d: in every group all rewards are equal", step + 1)
        return stats | {"kl_ctl": self.cfg.kl_ctl}
