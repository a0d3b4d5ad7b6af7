"""Role plays an algorithm's part (actor, reference, ...) on an injected TrainEngine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from megarl.algos.rows import Data, as_batch, only
from megarl.api.batch import Batch, Tokens
from megarl.api.engine import PARTS, LossFn, LossWeightFn, PendingSave, TrainEngine
from megarl.api.records import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta

P = ParamSpec("P")
R = TypeVar("R", bound="Role")
T = TypeVar("T")


class UpdateCheck(Protocol):
    """Looks at every update of a role, see trainer/self_check.py."""

    def train_batch(
        self, engine: Any, data: Data, loss_fn: LossFn, weight_fn: LossWeightFn, **kw: Any
    ) -> dict[str, float]:
        """Makes one optimizer step of `engine`, or refuses it."""


def among_its_ranks(verb: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
    """Has a role's verb know of no other ranks than those of the role's engine. Verbs need it that
    make a Batch of a plain dict: else it would be of all ranks, whose agreement is waited for."""

    @wraps(verb)
    def run(self: R, *args: P.args, **kw: P.kwargs) -> T:
        with self.engine.scope():
            return verb(self, *args, **kw)

    return run


class Role:
    """Passes the engine's verbs through, so that a training script speaks of roles only."""

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine
        self.update_check: UpdateCheck | None = None

    def train_batch(
        self, data: Data, loss_fn: LossFn, weight_fn: LossWeightFn, **kw: Any
    ) -> dict[str, float]:
        """Makes one optimizer step (TrainEngine.train_batch), under `update_check` if it is set."""
        if self.update_check is None:
            return self.engine.train_batch(data, loss_fn, weight_fn, **kw)
        return self.update_check.train_batch(self.engine, data, loss_fn, weight_fn, **kw)

    def forward_logp(self, data: Data, temperature: float) -> Tokens | Tensor:
        """Returns log-probabilities of the batch's tokens, 0 at t=0: Tokens, or [B,S] of a plain
        dict."""
        return self.forward(data, ("logprobs",), temperature)

    def forward(
        self,
        data: Data,
        outputs: Sequence[str],
        temperature: float = 1.0,
        *,
        also: Sequence[str] = (),
    ) -> Any:
        """Returns engine.forward's outputs. It is given the tokens, and the fields `also`: routes
        that the batch holds are for the actor's passes, not for another model's.
        """
        if isinstance(data, Batch):
            self.engine.place(data)
        names = ("input_ids", "attention_mask", *also)
        data = only(data, [name for name in names if name in data])
        return self.engine.forward(data, outputs=outputs, temperature=temperature)

    @among_its_ranks
    def forward_values(self, data: Data) -> tuple[Tokens, Tensor]:
        """Returns a value model's v(state before x_t), 0 at t=0, and v(state after the last token)
        [B], 0 for empty sequences.

        The model says about x_t what it reads off the token before. So one more token after every
        sequence, any id, makes the last state the one before it.
        """
        batch = as_batch(data)
        if isinstance(data, Batch):
            self.engine.place(batch)
        longer = _one_token_longer(batch)
        inputs = longer if isinstance(data, Batch) else longer.padded()
        values = self.engine.forward(inputs, outputs=("values",))
        if not isinstance(values, Tokens):
            values = Tokens.from_padded(values, longer.lengths)
        ends = values.lengths.cumsum(0) - 1
        inside = torch.ones(len(values.values), dtype=torch.bool)
        inside[ends] = False
        return Tokens(values.values[inside], values.lengths - 1), batch.gather(values.values[ends])

    @property
    def device(self) -> torch.device:
        """Returns the device of this rank's part of the model."""
        return self.engine.device

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Initializes the engine; `ft_spec` gives the length of its learning-rate schedule.
        Collective."""
        self.engine.initialize(addr, ft_spec)

    def destroy(self) -> None:
        """Destroys the engine. Collective."""
        self.engine.destroy()

    def step_lr_scheduler(self) -> None:
        """Moves the learning-rate schedule on, once per training step (not per mini-batch)."""
        self.engine.step_lr_scheduler()

    def set_version(self, version: int) -> None:
        """Sets the version of the engine's weights."""
        self.engine.set_version(version)

    def get_version(self) -> int:
        """Returns the version of the engine's weights."""
        return self.engine.get_version()

    def onload(self, parts: Sequence[str] = PARTS, *, behind: bool = False) -> dict[str, int]:
        """Brings `parts` of the engine's memory back to the device, with `behind` while the next
        pass runs; returns bytes by part, and in use before and after."""
        return self.engine.onload(parts, behind=behind)

    def offload(self, parts: Sequence[str] = PARTS) -> dict[str, int]:
        """Gives up the device memory of `parts`; returns bytes by part, and in use before and
        after."""
        return self.engine.offload(parts)

    def occupied(self) -> dict[str, int]:
        """Returns the bytes of each part of the engine's memory that are on the device now."""
        return self.engine.occupied()

    def upload_weights(self, meta: WeightUpdateMeta) -> dict[str, float]:
        """Sends the weights to the servers of `meta`; returns phases (s) and bytes. Collective."""
        return self.engine.upload_weights(meta)

    def save(self, meta: SaveLoadMeta) -> None:
        """Writes weights or training state to meta.path. Collective."""
        self.engine.save(meta)

    def begin_save(self, meta: SaveLoadMeta) -> PendingSave:
        """Begins a save; nothing is at meta.path before the result's `finish`. Collective."""
        return self.engine.begin_save(meta)

    def load(self, meta: SaveLoadMeta) -> None:
        """Loads what was saved at meta.path. Collective."""
        self.engine.load(meta)

    def get_scheduling_config(self) -> dict[str, Any]:
        """Returns what a launcher needs to place the engine's processes."""
        return self.engine.get_scheduling_config()


def _one_token_longer(batch: Batch) -> Batch:
    """Returns the ids of the batch with a token 0 more after every row, held by the same ranks."""
    ids = batch["input_ids"]
    ends = (ids.lengths + 1).cumsum(0) - 1
    longer = torch.zeros(len(ids.values) + len(ids.lengths), dtype=ids.values.dtype)
    inside = torch.ones(len(longer), dtype=torch.bool)
    inside[ends] = False
    longer[inside] = ids.values
    tokens = {"input_ids": Tokens(longer, ids.lengths + 1)}
    out = Batch(batch.lengths + 1, {}, tokens, home=batch.home, comm=batch.comm)
    out.placed = batch.placed
    return out
