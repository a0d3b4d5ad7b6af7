"""Learns from pairs of a chosen and a rejected answer: DPO, its relatives and reward models. The
losses come first, then the roles that train on them.

A loss is called as `loss(outputs, batch) -> (loss_sum, stats)`, see losses.py, with b rows of whole
pairs (`whole_groups` of the engine): group_ids [b] says which two rows are a pair, chosen [b] bool
which of them is preferred. The weight of all is `pair_weight`. S positions, p pairs. Below,
logp(y) is the sum over the trained tokens of y, h the difference of logp(y) - logref(y) between the
chosen and the rejected answer, s the sigmoid.

The roles' batches are plain padded tensors, the same on every rank, as collate_pairs of megarl.data
makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from megarl.algos.batches import counts_of_one
from megarl.algos.losses import Stats
from megarl.algos.roles import Ref, Role
from megarl.algos.specs import LossSpec
from megarl.api.batch import Padded
from megarl.api.engine import TrainEngine
from megarl.config.algo import PreferenceConfig, ValueModelConfig
from megarl.config.engine import TrainEngineConfig


def sums(per_token: Tensor, batch: Padded) -> Tensor:
    """Returns the sum of [b,S] over each row's trained tokens, [b]."""
    return torch.where(batch["loss_mask"].bool(), per_token, 0.0).sum(1)


def means(per_token: Tensor, batch: Padded) -> Tensor:
    """Returns the mean of [b,S] over each row's trained tokens, [b]; 0 without one."""
    return sums(per_token, batch) / batch["loss_mask"].sum(1).clamp(min=1)


Beta = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_PAIR = ("group_ids", "unit_ids", "chosen")


def pair_weight(batch: Padded) -> float:
    """Counts pairs: half a pair a row, so that it adds up when the engine asks row by row."""
    return len(batch["chosen"]) / 2


def in_pairs(values: Tensor, batch: Padded) -> tuple[Tensor, Tensor]:
    """Returns the `values` [b] of the chosen and of the rejected rows, [p] each, pair by pair.
    Raises ValueError where a group is not one chosen and one rejected row."""
    chosen, ids = batch["chosen"].bool(), batch["group_ids"]
    best, rest = chosen.nonzero().flatten(), (~chosen).nonzero().flatten()
    best, rest = best[ids[best].argsort()], rest[ids[rest].argsort()]
    if not torch.equal(ids[best], ids[rest]) or len(ids[best].unique()) < len(best):
        raise ValueError(
            f"pairs: group_ids {ids.tolist()} with chosen {chosen.int().tolist()}: every group "
            "must be one chosen and one rejected row"
        )
    return values[best], values[rest]


class DPOOptions(TypedDict, total=False):
    """Holds the options that all of DPO's relatives have; see DPO."""

    beta: Beta
    length_normalized: bool
    sft_coef: NotNegative


@dataclass(frozen=True, kw_only=True)
class DPO:
    """Fits the implicit reward beta (logp - logref) to preferences; batch: ref_logp [b,S].

    -log s(beta h) (DPO, arXiv 2305.18290, eq. 7); ipo: (h - 1 / (2 beta))^2 (IPO, arXiv 2310.12036,
    eq. 17).
    length_normalized: h of means over tokens instead of sums (TRL's convention for ipo).
    sft_coef: adds sft_coef times the mean cross entropy of the chosen answer (arXiv 2404.19733).

    >>> from megarl.algos.example import batch, new
    >>> DPO()({"logprobs": new}, batch)[0]
    tensor(0.6159)
    >>> DPO(ipo=True)({"logprobs": new}, batch)[0]
    tensor(11.4959)
    """

    beta: float = 0.1
    ipo: bool = False
    length_normalized: bool = False
    sft_coef: float = 0.0

    def __call__(self, outputs: Padded, batch: Padded) -> tuple[Tensor, Stats]:
        """Returns the summed loss of the pairs, and their figures."""
        reduce = means if self.length_normalized else sums
        log_ratio = outputs["logprobs"] - batch["ref_logp"]
        chosen, rejected = in_pairs(reduce(log_ratio, batch), batch)
        loss = self._of(chosen - rejected)
        if self.sft_coef:
            loss = loss - self.sft_coef * in_pairs(means(outputs["logprobs"], batch), batch)[0]
        rewards = self.beta * chosen.detach(), self.beta * rejected.detach()
        return loss.sum(), _margins(*rewards) | _logp(outputs, batch)

    def _of(self, h: Tensor) -> Tensor:
        """Returns the loss [p] of the differences h [p]."""
        if self.ipo:
            return (h - 1.0 / (2.0 * self.beta)).square()
        return -F.logsigmoid(self.beta * h)


@dataclass(frozen=True, kw_only=True)
class SimPO:
    """Is -log s(beta (m(chosen) - m(rejected)) - gamma), m the mean logp of an answer's tokens; no
    reference (SimPO, arXiv 2405.14734, eq. 6).

    >>> from megarl.algos.example import batch, new
    >>> SimPO()({"logprobs": new}, batch)[0]
    tensor(0.3829)
    """

    beta: float = 2.0
    gamma: float = 1.0

    def __call__(self, outputs: Padded, batch: Padded) -> tuple[Tensor, Stats]:
        """Returns the summed loss of the pairs, and their figures."""
        chosen, rejected = in_pairs(self.beta * means(outputs["logprobs"], batch), batch)
        loss = -F.logsigmoid(chosen - rejected - self.gamma)
        return loss.sum(), _margins(chosen.detach(), rejected.detach()) | _logp(outputs, batch)


@dataclass(frozen=True, kw_only=True)
class BradleyTerry:
    """Is -log s(r(chosen) - r(rejected) - margin), r the value of a row's last token (InstructGPT,
    arXiv 2203.02155, eq. 1; with batch["margin"] [b], Llama 2, arXiv 2307.09288, eq. 2).

    center: adds center (r(chosen) + r(rejected))^2, which keeps scores near 0 (arXiv 2312.09244,
    eq. 2). outputs: values [b,S].

    >>> from megarl.algos.example import batch, values
    >>> BradleyTerry()({"values": values}, batch)[0]
    tensor(0.3133)
    """

    center: float = 0.0

    def __call__(self, outputs: Padded, batch: Padded) -> tuple[Tensor, Stats]:
        """Returns the summed loss of the pairs, and their figures."""
        last = batch["attention_mask"].long().sum(1, keepdim=True) - 1
        chosen, rejected = in_pairs(outputs["values"].gather(1, last)[:, 0], batch)
        gap = chosen - rejected
        if "margin" in batch:
            gap = gap - in_pairs(batch["margin"].to(gap.dtype), batch)[0]
        loss = -F.logsigmoid(gap) + self.center * (chosen + rejected).square()
        return loss.sum(), _margins(chosen.detach(), rejected.detach())


def _margins(chosen: Tensor, rejected: Tensor) -> Stats:
    """Returns figures of pairs by their (implicit) rewards, [p] each."""
    n = torch.tensor(float(len(chosen)))
    return {
        # a tie, as before the first update, is right by chance
        "accuracy": ((chosen > rejected).sum() + 0.5 * (chosen == rejected).sum(), n),
        "margin": ((chosen - rejected).sum(), n),
        "reward_chosen": (chosen.sum(), n),
        "reward_rejected": (rejected.sum(), n),
    }


def _logp(outputs: Padded, batch: Padded) -> Stats:
    """Returns the mean log-probability of a token of the chosen and of the rejected answers."""
    chosen, rejected = in_pairs(means(outputs["logprobs"].detach(), batch), batch)
    n = torch.tensor(float(len(chosen)))
    return {"logp_chosen": (chosen.sum(), n), "logp_rejected": (rejected.sum(), n)}


def preference_loss(config: PreferenceConfig) -> LossSpec:
    """Returns the loss that the section `preference` names, with its options."""
    return LOSSES[config.loss](**config.options)


def dpo(**options: Unpack[DPOOptions]) -> LossSpec:
    """Returns DPO."""
    return _of_pairs(DPO(**options))


def ipo(**options: Unpack[DPOOptions]) -> LossSpec:
    """Returns IPO."""
    return _of_pairs(DPO(ipo=True, **options))


def simpo(*, beta: Beta = 2.0, gamma: NotNegative = 1.0) -> LossSpec:
    """Returns SimPO. gamma: the margin that is asked for."""
    return LossSpec(fn=SimPO(beta=beta, gamma=gamma), weight=pair_weight, needs=_PAIR)


def _of_pairs(loss: DPO) -> LossSpec:
    return LossSpec(fn=loss, weight=pair_weight, needs=(*_PAIR, "ref_logp"))


LOSSES: Mapping[str, Callable[..., LossSpec]] = {
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
}


INPUTS = ("input_ids", "attention_mask", "loss_mask")


class _Learner(Role):
    """Trains on a LossSpec over whole units."""

    def __init__(self, engine: TrainEngine, loss: LossSpec) -> None:
        super().__init__(engine)
        self.loss = loss
        self._how: dict[str, Any] = {"outputs": loss.outputs, "whole_groups": True}

    def train(self, batch: Padded) -> dict[str, float]:
        """Makes one optimizer step; returns the engine's metrics (loss, grad_norm, lr), accuracy,
        margin, the means by side, and skipped_updates (1 if the step was refused because something
        was not finite), with skipped_sequences and skipped_tokens. Raises ValueError for a batch
        that lacks a field of the loss, or whose groups are no pairs."""
        inputs = self._inputs(batch, "train")
        stats = self.train_batch(inputs, self.loss.fn, self.loss.weight, **self._how)
        return stats | counts_of_one(stats, batch["loss_mask"].sum(1).double())

    def evaluate(self, batch: Padded) -> dict[str, float]:
        """Returns the loss, accuracy, margin and the means by side of held-out answers."""
        inputs = self._inputs(batch, "evaluate")
        return self.engine.eval_batch(inputs, self.loss.fn, self.loss.weight, **self._how)

    def _inputs(self, batch: Padded, verb: str) -> Padded:
        """Returns the fields of the batch that the loss reads. Raises ValueError for a missing
        one."""
        needs = (*INPUTS, *self.loss.needs)
        if missing := [name for name in needs if name not in batch]:
            raise ValueError(f"{verb}: the batch has no {missing[0]!r}; it has {sorted(batch)}")
        return {name: batch[name] for name in (*needs, *self.loss.uses) if name in batch}


class PreferencePolicy(_Learner):
    """Trains a policy on preferred answers. One training step in verbs:

    policy.compare(batch, ref)     # for a loss that measures against a reference
    stats = policy.train(batch)
    policy.step_lr_scheduler()

    `train` makes one optimizer step and returns loss, grad_norm, lr, accuracy, margin, the means by
    side, and whether the step was refused (skipped_updates, skipped_sequences, skipped_tokens);
    `evaluate` returns the loss's figures of held-out answers.
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


class RewardLearner(_Learner):
    """Trains a reward model on pairs (BradleyTerry): a score of the state after the last token, as
    RewardModel and HF's ForSequenceClassification give it. `train` and `evaluate` are those of
    PreferencePolicy, with scores as the means by side."""

    def __init__(
        self, config: ValueModelConfig, engine: TrainEngine, *, center: float = 0.0
    ) -> None:
        """Takes the model's section and its engine. center: see BradleyTerry."""
        loss = LossSpec(
            fn=BradleyTerry(center=center),
            weight=pair_weight,
            outputs=("values",),
            needs=_PAIR,
            uses=("margin",),
        )
        super().__init__(engine, loss)
        self.config = config

    def _inputs(self, batch: Padded, verb: str) -> Padded:
        return one_token_longer(super()._inputs(batch, verb))


def one_token_longer(batch: Padded) -> Padded:
    """Returns the batch with a token 0 after every row, [B,S+1]. The value of a token is read off
    the state before it, so that of the added one is the score of all the others."""
    real = batch["attention_mask"].bool()
    ids = F.pad(torch.where(real, batch["input_ids"], 0), (0, 1))
    longer = torch.arange(ids.shape[1], device=ids.device) <= real.sum(1, keepdim=True)
    mask = F.pad(batch["loss_mask"], (0, 1))
    return batch | {"input_ids": ids, "attention_mask": longer, "loss_mask": mask}
