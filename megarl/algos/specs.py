"""Says what the actor has to know of a loss and of advantages, and how a configuration names them.

`actor.loss` and `actor.advantages` each name a function `make(config, **options)` that gets the
actor's section and returns a LossSpec or an AdvantageSpec: one of NAMES, or one of the user's by
import path. B samples of a batch, b of them in a part of it, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megarl.api.batch import Padded
from megarl.api.engine import LossFn
from megarl.config.algo import PPOActorConfig
from megarl.config.base import SeamConfig
from megarl.utils.importing import is_import_path, load_object

Metrics = dict[str, float]

NAMES: Mapping[str, Mapping[str, str]] = {
    "loss": {"grpo": "megarl.algos.losses:grpo"},
    "advantages": {"group": "megarl.algos.advantages:group"},
}


def as_they_are(mean: Metrics, first: Metrics) -> Metrics:
    """Returns `mean`: the metrics of a loss that derives none."""
    return mean


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """Says what an update minimises.

    fn: (outputs, batch) -> (loss_sum, {name: (sum, weight)}), all tensors padded [b,S] of whole
    samples; it sums and divides by nothing of the batch.
    weight: what loss_sum is divided by, of the same batch: it adds up when the batch is cut.
    outputs: what the engine computes for it: "logprobs", "entropy", "values".
    needs: fields of the batch beside input_ids, attention_mask and loss_mask; it is an error if one
    is missing. uses: fields that it gets where there are any.
    derive: (mean, first) -> metrics of an update, of the means over its optimizer steps and the
    metrics of the first step: what is no mean, as a root of one, is made here.
    """

    fn: LossFn
    weight: Callable[[Padded], float]
    outputs: tuple[str, ...] = ("logprobs",)
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    derive: Callable[[Metrics, Metrics], Metrics] = as_they_are


@dataclass(frozen=True, kw_only=True)
class AdvantageSpec:
    """Says how rewards become advantages.

    per_sample: {name: [B]} of the whole batch, with the shaped rewards and group_ids ->
    one number per sample, [B]. It is the same on every rank.
    per_token: (numbers [b], fields padded [b,S]) -> advantages [b,S], of some samples at a time, or
    of none ([0,0]) on a rank that holds none; None: the number at every trained token. reads: the
    fields that it gets, with loss_mask.
    whiten: zero mean and unit std over the trained tokens of the whole batch, at the end.
    needs_groups: it is an error if the batch has no group_ids; else every sample is its own group.
    """

    per_sample: Callable[[dict[str, Tensor]], Tensor]
    per_token: Callable[[Tensor, Padded], Tensor] | None = None
    reads: tuple[str, ...] = ("loss_mask",)
    whiten: bool = False
    needs_groups: bool = False


_KINDS: dict[str, type] = {"loss": LossSpec, "advantages": AdvantageSpec}


def loss_of(config: PPOActorConfig) -> LossSpec:
    """Returns the loss that config.loss names, or raises ValueError."""
    spec: LossSpec = _make("loss", config)
    return spec


def advantages_of(config: PPOActorConfig) -> AdvantageSpec:
    """Returns the advantages that config.advantages names, or raises ValueError."""
    spec: AdvantageSpec = _make("advantages", config)
    return spec


def maker(kind: str, name: str) -> Callable[..., Any]:
    """Returns the function of a name in NAMES[kind] or of an import path, or raises ValueError."""
    target = NAMES[kind].get(name, name)
    if not is_import_path(target):
        raise ValueError(
            f"actor.{kind}={name}: use one of {', '.join(NAMES[kind])}, or pkg.module:function"
        )
    fn: Callable[..., Any] = load_object(target, what=f"actor.{kind}")
    return fn


def _make(kind: str, config: PPOActorConfig) -> Any:
    seam: SeamConfig = getattr(config, kind)
    made = maker(kind, seam.type)(config, **seam.options)
    if not isinstance(made, _KINDS[kind]):
        raise ValueError(
            f"actor.{kind}={seam.type}: it returned a {type(made).__name__}, not a "
            f"megarl.algos.{_KINDS[kind].__name__}"
        )
    return made
