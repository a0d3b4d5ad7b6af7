"""Defines TrainEngine: what an algorithm may ask of the engine that trains the model.

Shapes: B sequences of the batch, b of a micro-batch, S positions (right-padded).
`input_` is the whole batch: a `Batch`, whose tokens the first verb that gets it places on the
ranks for the rest of the step, or a plain dict of CPU tensors that is the same on every rank:
input_ids [B,S], attention_mask [B,S] bool, and whatever the loss needs ([B,S,...] or [B]
tensors). Position t of a per-token tensor belongs to input_ids[:, t]. A dict that is not the same
on every rank, or an id outside of the model's vocabulary, is a ValueError on every rank before the
pass begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from megarl.api.batch import Batch, Padded
from megarl.api.records import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta
from megarl.utils.files import Fingerprint

# (outputs, batch) of one micro-batch, padded [b,S] -> (loss_sum, {name: (sum, weight)})
LossFn = Callable[[Padded, Padded], tuple[torch.Tensor, dict[str, tuple[Any, Any]]]]
# additive: it is given one sequence at a time, [1,n], and the numbers of all are added up
LossWeightFn = Callable[[Padded], float]


class Output(NamedTuple):
    """Says which `head` computes an output ("": none, routers do), how many numbers a token has (as
    many as "topk", "given" or "vocab" are; "": one), and whether updates may ask for it."""

    head: str = "lm"
    width: str = ""
    trains: bool = True


OUTPUTS = {
    "logprobs": Output(),
    "entropy": Output(),
    "greedy_match": Output(),
    "topk_logprobs": Output(width="topk", trains=False),
    "topk_ids": Output(width="topk", trains=False),
    "topk_tail": Output(trains=False),
    "given_logprobs": Output(width="given"),
    "given_tail": Output(),
    "logits": Output(width="vocab", trains=False),
    "values": Output(head="value"),
    "routed_experts": Output(head=""),
}
GIVEN = ("given_logprobs", "given_tail")  # about batch["given_ids"], for losses

# parts of an engine's memory; main weights in fp32, which several of them name, count for the first
PARTS = ("params", "optimizer", "grads")


class Metrics(dict[str, float]):
    """Holds the metrics of a pass by name. `weights` has the weights of those that are weighted
    means; such a mean is NaN where its weight is 0. `kept` has the outputs that `train_batch` was
    told to keep, as `forward` returns them."""

    def __init__(
        self,
        values: Mapping[str, float],
        weights: Mapping[str, float],
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(values)
        self.weights, self.kept = dict(weights), dict(kept or {})


class NoGradient(ValueError):
    """Says that an update's loss depends on no weight: it has no gradient anywhere."""


class PendingSave(Protocol):
    """Stands for a save under way. Both methods are collective, as are their errors."""

    def is_done(self) -> bool:
        """Returns whether `finish` would return without waiting."""

    def finish(self) -> None:
        """Waits until the save is written, and puts it in place."""


class Saved:
    """Is the PendingSave of a save that has already been written."""

    def is_done(self) -> bool:
        """Returns True."""
        return True

    def finish(self) -> None:
        """Does nothing: the save is in place."""


class TrainEngine(ABC):
    """Defines an engine: one model in one layout with its optimizer. The verbs that compute, move
    or save are collective over the engine's ranks."""

    @property
    def device(self) -> torch.device:
        """Returns the device on which this rank computes."""
        return torch.device("cpu")

    @abstractmethod
    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        """Builds process groups, model, weights, optimizer and learning-rate schedule, which ends
        where `ft_spec` does."""

    @abstractmethod
    def destroy(self) -> None:
        """Frees the model, its optimizer and its process groups. Collective."""

    def place(self, batch: Batch) -> None:
        """Moves the batch's tokens to the ranks that will work on them in this step, as the first
        verb does by itself; a batch that has been placed stays where it is. Collective. Call it
        before deriving another Batch whose results belong to this one."""
        batch.placed = True

    @abstractmethod
    def train_batch(
        self,
        input_: Batch | Padded,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        *,
        outputs: Sequence[str] = ("logprobs",),
        temperature: float = 1.0,
        whole_groups: bool = False,
        keep: Sequence[str] = (),
    ) -> dict[str, float]:
        """Makes one optimizer step with the gradient of sum(loss_sum) / W, where W is the sum of
        loss_weight_fn over the rows, which it is given one at a time ([1,n] tensors). Returns loss,
        grad_norm, lr, update_successful and the weighted means of the loss's stats (`Metrics`), the
        same on every rank. Where loss or gradient are not finite, weights and optimizer state stay
        as they are and update_successful is 0. Where a function raises on one rank, all ranks raise
        an error that names it; where the loss of no micro-batch on no rank requires grad, all raise
        NoGradient, and weights and optimizer state stay as they are.

        The outputs "given_logprobs" [b,S,n] and "given_tail" [b,S] are the logprobs of the tokens
        batch["given_ids"] [B,S,n], and the log of the probability of all others: -inf where there
        is none. The ids of a position are distinct; one outside of the vocabulary has probability
        0, and -1 stands for none.

        loss_fn gets some sequences at a time, each of them whole. With `whole_groups` all rows with
        the same batch["unit_ids"] [B] (without the field: "group_ids") come together, as a loss
        over pairs needs them. `keep` names outputs that stand in `Metrics.kept` afterwards: of the
        pass, so of the weights before the step.
        """

    @abstractmethod
    def eval_batch(
        self,
        input_: Batch | Padded,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        *,
        outputs: Sequence[str] = ("logprobs",),
        temperature: float = 1.0,
        whole_groups: bool = False,
    ) -> dict[str, float]:
        """Returns the loss and stats of train_batch, without computing gradients."""

    @abstractmethod
    def forward(
        self,
        input_: Batch | Padded,
        output_seqlens: Sequence[int] | None = None,
        post_hook: Callable[[Padded, Padded], Any] | None = None,
        aggregate_fn: Callable[[list[Any]], Any] = torch.cat,
        *,
        outputs: Sequence[str] = ("logprobs",),
        temperature: float = 1.0,
    ) -> Any:
        """Returns outputs [B,S] in the order of `input_`, on every rank; for a Batch, Tokens of the
        rows that this rank holds after the call. One name in `outputs` gives one result, several
        give a dict.

        "routed_experts" is [B,S,L,k], for k experts in each of L layers (see
        TrainEngineConfig.moe). "topk_logprobs" and "topk_ids" [B,S,k] are the likeliest tokens of
        the distribution that x_t was drawn from, k = TrainEngineConfig.lm_head_topk, the likeliest
        first and of equals the lowest id, and "topk_tail" [B,S] is the log of the probability of
        all others; training refuses them and "logits": they have no gradient. `post_hook(outputs,
        batch)` maps one sequence's outputs before `aggregate_fn` joins the list over sequences.
        """

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Has forward and the like run the model without its adapters inside. Saves, uploads and
        the adapters themselves are not affected. Raises ValueError where the engine has no
        adapters."""
        raise ValueError("this engine has no adapters to disable: set its `lora`")

    @abstractmethod
    def step_lr_scheduler(self) -> None:
        """Moves the learning-rate schedule on by one step. Raises ValueError where it has none."""

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Returns a hash and a norm of every trained weight by name, the same on every rank and,
        but for the last bits of norms, in every layout; none where the engine cannot tell.
        Collective."""
        return {}

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Sets the version of the weights; checkpoints keep it, and an upload without a number
        takes the next."""

    @abstractmethod
    def get_version(self) -> int:
        """Returns the version of the weights."""

    @abstractmethod
    def train(self, mode: bool = True) -> TrainEngine:
        """Puts the model into training mode (`mode` False: evaluation); returns the engine."""

    def eval(self) -> TrainEngine:
        """Puts the model into evaluation mode and returns the engine."""
        return self.train(False)

    def scope(self) -> AbstractContextManager[None]:
        """Returns a context in which the engine's ranks are all ranks there are. Verbs enter it by
        themselves; what is beside them and talks to other ranks has to be inside. Raises
        RuntimeError on a rank that is not the engine's."""
        return nullcontext()

    @abstractmethod
    def offload(self, parts: Sequence[str] = PARTS) -> dict[str, int]:
        """Gives up the device memory of `parts`: weights ("params") and optimizer state
        ("optimizer") go to host memory, gradients ("grads") are dropped. Returns the bytes of each
        part, and the bytes in use before and after. A part that is away cannot be used before
        onload()."""

    @abstractmethod
    def onload(self, parts: Sequence[str] = PARTS, *, behind: bool = False) -> dict[str, int]:
        """Undoes offload, and returns the same metrics. With `behind` it returns before the bytes
        are there: they arrive while the next pass runs, whose layers wait for their own weights
        alone; whatever else needs them waits for all."""

    def occupied(self) -> dict[str, int]:
        """Returns the bytes of each part that are on this rank's device now; {} where the engine
        cannot tell."""
        return {}

    @abstractmethod
    def upload_weights(self, meta: WeightUpdateMeta) -> dict[str, float]:
        """Sends this engine's weights to the servers, and returns seconds of its phases and bytes
        as metrics. Collective.

        The servers get `meta.version`; for None, the version after the engine's own and after that
        of the last upload. A version that is not above the last upload's is a ValueError, except
        where set_version or load went back in between.
        """

    def copy_weights(self, source: Any, *, keep: float = 0.0) -> dict[str, float]:
        """Takes over the weights of `source`, an engine of the same model, but for the share `keep`
        of its own. Raises ValueError for an engine that cannot. Collective."""
        raise ValueError(f"{type(self).__name__} cannot take over another engine's weights")

    @abstractmethod
    def save(self, meta: SaveLoadMeta) -> None:
        """Writes the model to meta.path in `meta.weight_format` and returns when it is in place.
        Collective."""

    def begin_save(self, meta: SaveLoadMeta) -> PendingSave:
        """Begins a `save`, and returns when the state it needs is copied; nothing is at meta.path
        before the result's `finish`. An engine that cannot do so saves at once."""
        self.save(meta)
        return Saved()

    @abstractmethod
    def load(self, meta: SaveLoadMeta) -> None:
        """Loads what `save` wrote to meta.path. Collective."""

    @abstractmethod
    def get_scheduling_config(self) -> dict[str, Any]:
        """Returns what a scheduler needs to place the engine's processes: gpus_per_process,
        cpus_per_process, and memory_per_process (bytes of host memory) where it is known."""
