"""SFT: supervised fine-tuning on the tokens under loss_mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.algos.checks import no_trained_token
from megarl.algos.losses import sft_loss, token_weight
from megarl.algos.minibatches import skipped_metrics
from megarl.algos.role import Role
from megarl.api.engine import TrainEngine
from megarl.config.engine import TrainEngineConfig
from megarl.observability.logging import get_logger, warn_once_per_world

Batch = dict[str, Tensor]

log = get_logger(__name__)


class SFT(Role):
    """Next-token prediction; needs input_ids, attention_mask and loss_mask, all [B,S]."""

    def __init__(self, config: TrainEngineConfig, engine: TrainEngine) -> None:
        super().__init__(engine)
        self.config = config
        self._told_of_untrained = False

    def train(self, batch: Batch) -> dict[str, float]:
        """One optimizer step. The engine's metrics (loss, grad_norm, lr), ppl and skipped_updates
        (1 if it was refused because something was not finite; then there is no ppl), with
        skipped_sequences and skipped_tokens.
        """
        stats = self.train_batch(self._inputs(batch), sft_loss, token_weight)
        done = bool(stats["update_successful"])
        skipped = torch.full((len(batch["input_ids"]),), not done)
        counts = {"skipped_updates": float(not done)} | skipped_metrics(batch, skipped)
        return (_with_ppl(stats) if done else stats) | counts

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """loss, ppl, token_accuracy and exact_match (every trained token is the argmax)."""
        return _with_ppl(
            self.engine.eval_batch(
                self._inputs(batch), sft_loss, token_weight, outputs=("logprobs", "greedy_match")
            )
        )

    def _inputs(self, batch: Batch) -> Batch:
        """ValueError for a batch without a trained token; single rows without warn, once."""
        if finding := no_trained_token(batch["loss_mask"], "SFT batch"):
            if not batch["loss_mask"].any():
                raise ValueError(f"{finding}: there is nothing to train on")
            if not self._told_of_untrained:
                self._told_of_untrained = True
                warn_once_per_world(log, "%s: nothing is learned from them", finding)
        return {k: batch[k] for k in ("input_ids", "attention_mask", "loss_mask")}


def _with_ppl(stats: dict[str, float]) -> dict[str, float]:
    loss = stats["loss"]
    return stats | {"ppl": math.exp(loss) if loss < 700.0 else math.inf}
