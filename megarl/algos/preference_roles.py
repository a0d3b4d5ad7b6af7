"""Roles that learn from preferences: a policy (DPO, IPO, SimPO), and a reward model.

Their batches are plain padded tensors, the same on every rank, as collate_pairs of
megarl.data makes them. B rows, S positions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megarl.algos.minibatches import skipped_metrics
from megarl.algos.preferences import BradleyTerry, pair_weight, preference_loss
from megarl.algos.ref import Ref
from megarl.algos.role import Role
from megarl.algos.specs import LossSpec
from megarl.api.batch import Padded
from megarl.api.engine import TrainEngine
from megarl.config.algo import PreferenceConfig, ValueModelConfig
from megarl.config.engine import TrainEngineConfig

INPUTS = ("input_ids", "attention_mask", "loss_mask")


class _Learner(Role):
    """Trains on a LossSpec over whole units."""

    def __init__(self, engine: TrainEngine, loss: LossSpec) -> None:
        super().__init__(engine)
        self.loss = loss
        self._how: dict[str, Any] = {"outputs": loss.outputs, "whole_groups": True}

    def _train(self, batch: Padded) -> dict[str, float]:
        """Makes one optimizer step; see PreferencePolicy.train."""
        stats = self.train_batch(batch, self.loss.fn, self.loss.weight, **self._how)
        done = bool(stats["update_successful"])
        trained = batch["loss_mask"].sum(1).double()
        counts = {"skipped_updates": float(not done)}
        counts |= skipped_metrics(trained, torch.full((len(trained),), not done))
        return stats | counts

    def _evaluate(self, batch: Padded) -> dict[str, float]:
        """Returns the loss and its figures, without an update."""
        return self.engine.eval_batch(batch, self.loss.fn, self.loss.weight, **self._how)

    def _needed(self, batch: Padded, needs: tuple[str, ...], verb: str) -> Padded:
        """Returns the fields of the batch that the loss reads. Raises ValueError for a missing
        one."""
        if missing := [name for name in (*INPUTS, *needs) if name not in batch]:
            raise ValueError(f"{verb}: the batch has no {missing[0]!r}; it has {sorted(batch)}")
        return {name: batch[name] for name in (*INPUTS, *needs, *self.loss.uses) if name in batch}


class PreferencePolicy(_Learner):
    """Trains a policy on preferred answers. One training step in verbs:

    policy.compare(batch, ref)     # for a loss that measures against a reference
    stats = policy.train(batch)
    policy.step_lr_scheduler()
    """

    temperature = 1.0  # of all logprobs here

    def __init__(
        self, config: TrainEngineConfig, preference: PreferenceConfig, engine: TrainEngine
    ) -> None:
        """Takes the sections of the model and of the loss, and the model's engine."""
        super().__init__(engine, preference_loss(preference))
        self.config, self.preference = config, preference

    def compare(self, batch: Padded, ref: Ref) -> None:
        """Adds what the loss measures against: batch["ref_logp"] [B,S], where it has none yet."""
        if "ref_logp" not in batch:
            batch["ref_logp"] = ref.compute_logp(batch)

    def train(self, batch: Padded) -> dict[str, float]:
        """Makes one optimizer step; returns the engine's metrics (loss, grad_norm, lr), accuracy,
        margin, the means by side, and skipped_updates (1 if the step was refused because something
        was not finite), with skipped_sequences and skipped_tokens. Raises ValueError for a batch
        that lacks a field of the loss, or whose groups are no pairs."""
        return self._train(self._needed(batch, self.loss.needs, "train"))

    def evaluate(self, batch: Padded) -> dict[str, float]:
        """Returns the loss, accuracy, margin and the means by side of held-out answers."""
        return self._evaluate(self._needed(batch, self.loss.needs, "evaluate"))


class RewardLearner(_Learner):
    """Trains a reward model on pairs (BradleyTerry): a score of the state after the last token, as
    RewardModel and HF's ForSequenceClassification give it."""

    def __init__(
        self, config: ValueModelConfig, engine: TrainEngine, *, center: float = 0.0
    ) -> None:
        """Takes the model's section and its engine. center: see BradleyTerry."""
        loss = LossSpec(
            fn=BradleyTerry(center=center),
            weight=pair_weight,
            outputs=("values",),
            needs=("group_ids", "unit_ids", "chosen"),
            uses=("margin",),
        )
        super().__init__(engine, loss)
        self.config = config

    def train(self, batch: Padded) -> dict[str, float]:
        """Makes one optimizer step; returns metrics as PreferencePolicy.train does."""
        return self._train(one_token_longer(self._needed(batch, self.loss.needs, "train")))

    def evaluate(self, batch: Padded) -> dict[str, float]:
        """Returns the loss, accuracy, margin and the mean scores by side of held-out pairs."""
        return self._evaluate(one_token_longer(self._needed(batch, self.loss.needs, "evaluate")))


def one_token_longer(batch: Padded) -> Padded:
    """Returns the batch with a token 0 after every row, [B,S+1]. The value of a token is read off
    the state before it, so that of the added one is the score of all the others."""
    real = batch["attention_mask"].bool()
    ids = F.pad(torch.where(real, batch["input_ids"], 0), (0, 1))
    longer = torch.arange(ids.shape[1], device=ids.device) <= real.sum(1, keepdim=True)
    mask = F.pad(batch["loss_mask"], (0, 1))
    return batch | {"input_ids": ids, "attention_mask": longer, "loss_mask": mask}
