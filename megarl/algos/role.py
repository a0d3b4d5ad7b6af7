"""Role: an algorithm's part (actor, reference, ...) played on an injected TrainEngine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from megarl.api.engine import PARTS, LossFn, LossWeightFn, PendingSave, TrainEngine
from megarl.api.records import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta

Batch = dict[str, Tensor]


class UpdateCheck(Protocol):
    """Looks at every update of a role, see trainer/self_check.py."""

    def train_batch(
        self, engine: Any, batch: Batch, loss_fn: LossFn, weight_fn: LossWeightFn, **kw: Any
    ) -> dict[str, float]:
        """Makes one optimizer step of `engine`, or refuses it."""


class Role:
    """Passes the engine's verbs through, so that a training script speaks of roles only."""

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine
        self.update_check: UpdateCheck | None = None

    def train_batch(
        self, batch: Batch, loss_fn: LossFn, weight_fn: LossWeightFn, **kw: Any
    ) -> dict[str, float]:
        """Makes one optimizer step (TrainEngine.train_batch), under `update_check` if it is set."""
        if self.update_check is None:
            return self.engine.train_batch(batch, loss_fn, weight_fn, **kw)
        return self.update_check.train_batch(self.engine, batch, loss_fn, weight_fn, **kw)

    def forward_logp(self, batch: Batch, temperature: float) -> Tensor:
        """[B,S] log-probabilities of the batch's tokens, 0 at t=0; sends what it needs only."""
        inputs = {k: batch[k] for k in ("input_ids", "attention_mask")}
        return self.engine.forward(inputs, outputs=("logprobs",), temperature=temperature)

    def forward_values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of a value model: v(state before x_t) [B,S], 0 at t=0, and v(state after the last token)
        [B], both 0 at padding and for empty sequences.

        What is said about x_t is read off the token before it. So one more token after every
        sequence, whichever, makes the last state the one before it.
        """
        mask = batch["attention_mask"].bool()
        inputs = {
            "input_ids": F.pad(batch["input_ids"] * mask, (0, 1)),
            "attention_mask": F.pad(mask, (1, 0), value=True),
        }
        values = self.engine.forward(inputs, outputs=("values",))
        last = values.gather(1, mask.sum(1, keepdim=True))[:, 0]
        return values[:, :-1].where(mask, 0.0), last

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        self.engine.initialize(addr, ft_spec)

    def destroy(self) -> None:
        self.engine.destroy()

    def step_lr_scheduler(self) -> None:
        """Once per training step (not per mini-batch): the schedule counts steps."""
        self.engine.step_lr_scheduler()

    def set_version(self, version: int) -> None:
        self.engine.set_version(version)

    def get_version(self) -> int:
        return self.engine.get_version()

    def onload(self, parts: Sequence[str] = PARTS) -> dict[str, int]:
        return self.engine.onload(parts)

    def offload(self, parts: Sequence[str] = PARTS) -> dict[str, int]:
        return self.engine.offload(parts)

    def upload_weights(self, meta: WeightUpdateMeta) -> dict[str, float]:
        return self.engine.upload_weights(meta)

    def save(self, meta: SaveLoadMeta) -> None:
        self.engine.save(meta)

    def begin_save(self, meta: SaveLoadMeta) -> PendingSave:
        return self.engine.begin_save(meta)

    def load(self, meta: SaveLoadMeta) -> None:
        self.engine.load(meta)

    def get_scheduling_config(self) -> dict[str, Any]:
        return self.engine.get_scheduling_config()
