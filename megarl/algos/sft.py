"""SFT: supervised fine-tuning on the tokens under loss_mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.algos.losses import sft_loss, token_weight
from megarl.algos.minibatches import skipped_figures
from megarl.algos.role import Role
from megarl.api.engine import TrainEngine
from megarl.config.engine import TrainEngineConfig

Batch = dict[str, Tensor]


class SFT(Role):
    """Next-token prediction; needs input_ids, attention_mask and loss_mask, all [B,S]."""

    def __init__(self, config: TrainEngineConfig, engine: TrainEngine) -> None:
        super().__init__(engine)
        self.config = config

    def train(self, batch: Batch) -> dict[str, float]:
        """One optimizer step. The engine's figures (loss, grad_norm, lr), ppl and skipped_updates
        (1 if it was refused because something was not finite; then there is no ppl), with
        skipped_sequences and skipped_tokens.
        """
        stats = self.train_batch(_inputs(batch), sft_loss, token_weight)
        done = bool(stats["update_successful"])
        skipped = torch.full((len(batch["input_ids"]),), not done)
        counts = {"skipped_updates": float(not done)} | skipped_figures(batch, skipped)
        return (_with_ppl(stats) if done else stats) | counts

    def evaluate(self, batch: Batch) -> dict[str, float]:
        """loss, ppl, token_accuracy and exact_match (every trained token is the argmax)."""
        return _with_ppl(
            self.engine.eval_batch(
                _inputs(batch), sft_loss, token_weight, outputs=("logprobs", "greedy_match")
            )
        )


def _inputs(batch: Batch) -> Batch:
    if not batch["loss_mask"].any():
        raise ValueError("SFT batch: loss_mask marks no token, there is nothing to train on")
    return {k: batch[k] for k in ("input_ids", "attention_mask", "loss_mask")}


def _with_ppl(stats: dict[str, float]) -> dict[str, float]:
    loss = stats["loss"]
    return stats | {"ppl": math.exp(loss) if loss < 700.0 else math.inf}
