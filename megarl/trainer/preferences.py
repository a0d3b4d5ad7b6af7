"""The recipes dpo and rm: a policy that learns from preferred answers, and a reward model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megarl.api.tokens import Padded
from megarl.config.recipes import DPOConfig, RMConfig
from megarl.data.dataset import RowDataset
from megarl.data.loader import collate_pairs, collate_unpaired
from megarl.data.problem import Row
from megarl.observability.intervals import wilson
from megarl.observability.stats_tracker import record_timing
from megarl.trainer.offline import OfflineTrainer
from megarl.trainer.roles import (
    MegatronLoRARef,
    MegatronPreferencePolicy,
    MegatronRef,
    MegatronRewardLearner,
    make_ref,
)
from megarl.trainer.self_check import same_weights

_JOINED = ("loss", "accuracy", "margin")


class DPOTrainer(OfflineTrainer):
    """Trains a policy on pairs of answers, or on answers with a label (preference.loss=kto)."""

    cfg: DPOConfig
    model: MegatronPreferencePolicy
    joined = _JOINED

    def make_model(self) -> MegatronPreferencePolicy:
        """Returns the policy that trains."""
        cfg = self.cfg
        make = self.ctx.trainers.make
        return make(MegatronPreferencePolicy, cfg.model, cfg.preference, seed=cfg.seed)

    def collate(self) -> Callable[[list[Row]], Any]:
        """Returns what makes a batch of pairs, or of single answers."""
        return collate_pairs if self.cfg.preference.paired else collate_unpaired

    def set_up_others(self, data: RowDataset) -> None:
        """Makes the reference, where the loss has one; at a run's first update the policy has to
        agree with it, if it begins as the same weights. Collective."""
        self.ref: MegatronRef | MegatronLoRARef | None = None
        if not self.cfg.preference.needs_reference:
            return
        self.ref = self.ctx.trainers.make(make_ref, self.cfg, self.model)
        if not self.steps_done and same_weights(self.model.config, self.ref.config):
            self.check.watch(self.model, first_ratio_to="ref_logp")

    def train(self, batch: Padded) -> dict[str, float]:
        """Makes one update; returns its metrics. Collective."""
        self._compare(batch)
        with record_timing("train"):
            return self.model.train(batch)

    def by_loss(self, held_out: Padded) -> dict[str, float]:
        """Returns loss, accuracy with its interval, margin and the means by side. Collective."""
        self._compare(held_out)  # keeps what the reference said, which does not change
        return with_interval(self.model.evaluate(held_out), held_out)

    def destroy(self) -> None:
        """Destroys the reference, then the policy. Collective."""
        if self.ref is not None:
            self.ref.destroy()
        super().destroy()

    def _compare(self, batch: Padded) -> None:
        if self.ref is not None:
            with record_timing("ref"):
                self.model.compare(batch, self.ref)


class RMTrainer(OfflineTrainer):
    """Trains a reward model on pairs of answers."""

    cfg: RMConfig
    model: MegatronRewardLearner
    joined = _JOINED

    def make_model(self) -> MegatronRewardLearner:
        """Returns the reward model that trains."""
        cfg = self.cfg
        make = self.ctx.trainers.make
        return make(MegatronRewardLearner, cfg.model, center=cfg.center, seed=cfg.seed)

    def collate(self) -> Callable[[list[Row]], Any]:
        """Returns what makes a batch of pairs, with their margins where these count."""
        return partial(collate_pairs, margin=self.cfg.margin)

    def train(self, batch: Padded) -> dict[str, float]:
        """Makes one update; returns its metrics. Collective."""
        with record_timing("train"):
            return self.model.train(batch)

    def by_loss(self, held_out: Padded) -> dict[str, float]:
        """Returns loss, accuracy with its interval, margin and the mean scores. Collective."""
        return with_interval(self.model.evaluate(held_out), held_out)


def with_interval(stats: dict[str, float], batch: Padded) -> dict[str, float]:
    """Returns the figures with a 95 % interval of the accuracy: of pairs, or of single answers."""
    n = len(batch["input_ids"]) // (2 if "chosen" in batch else 1)
    low, high = wilson(stats["accuracy"], n)
    return stats | {"accuracy_lo": low, "accuracy_hi": high}
