"""SFT fine-tunes a model on the tokens under loss_mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.algos.aggregation import token_weight
from megarl.algos.checks import no_trained_token
from megarl.algos.losses import sft_loss
from megarl.algos.minibatches import skipped_metrics
from megarl.algos.role import Role, among_its_ranks
from megarl.algos.rows import Data, as_batch, only, trained_tokens
from megarl.api.engine import TrainEngine
from megarl.config.engine import TrainEngineConfig
from megarl.observability.logging import get_logger, warn_on_rank_zero

INPUTS = ("input_ids", "attention_mask", "loss_mask")

log = get_logger(__name__)


class SFT(Role):
    """Trains next-token prediction; needs input_ids, attention_mask and loss_mask, all [B,S]."""

    def __init__(self, config: TrainEngineConfig, engine: TrainEngine) -> None:
        super().__init__(engine)
        self.config = config
        self._told_of_untrained = False

    def train(self, batch: Data) -> dict[str, float]:
        """Makes one optimizer step; returns the engine's metrics (loss, grad_norm, lr), ppl and
        skipped_updates (1 if the step was refused because something was not finite; then there is
        no ppl), with skipped_sequences and skipped_tokens. Raises ValueError for a batch without a
        trained token."""
        inputs, trained = self._inputs(batch)
        stats = self.train_batch(inputs, sft_loss, token_weight)
        done = bool(stats["update_successful"])
        skipped = torch.full((len(trained),), not done)
        counts = {"skipped_updates": float(not done)} | skipped_metrics(trained, skipped)
        return (_with_ppl(stats) if done else stats) | counts

    def evaluate(self, batch: Data) -> dict[str, float]:
        """Returns loss, ppl, token_accuracy and exact_match: the share of sequences whose every
        trained token is the argmax. Raises ValueError for a batch without a trained token."""
        return _with_ppl(
            self.engine.eval_batch(
                self._inputs(batch)[0], sft_loss, token_weight, outputs=("logprobs", "greedy_match")
            )
        )

    @among_its_ranks
    def _inputs(self, batch: Data) -> tuple[Data, Tensor]:
        """Returns what the loss needs, and the trained tokens of every row [B]. Raises ValueError
        for a batch without a trained token; warns, once, of single rows without."""
        trained = trained_tokens(as_batch(batch))
        if finding := no_trained_token(trained, "SFT batch"):
            if not trained.any():
                raise ValueError(f"{finding}: there is nothing to train on")
            if not self._told_of_untrained:
                self._told_of_untrained = True
                warn_on_rank_zero(log, "%s: nothing is learned from them", finding)
        return only(batch, INPUTS), trained


def _with_ppl(stats: dict[str, float]) -> dict[str, float]:
    loss = stats["loss"]
    return stats | {"ppl": math.exp(loss) if loss < 700.0 else math.inf}
