"""Says what the actor has to know of a loss and of advantages, and how a configuration names them.

`actor.loss`, `actor.surrogate` and `actor.advantages` each name a function `make(config,
**options)` that gets the actor's section and returns a LossSpec, a function that returns a
Surrogate, or an AdvantageSpec: one of NAMES, or one of the user's by import path. B samples of a
batch, b of them in a part of it, S positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megarl.api.batch import Padded
from megarl.api.engine import LossFn
from megarl.config.algo import PPOActorConfig
from megarl.config.base import SeamConfig
from megarl.utils.importing import is_import_path, load_object

Metrics = dict[str, float]


@dataclass(frozen=True)
class Surrogate:
    """Holds the loss of every token, [b,S] with gradient, the ratio for the figures, [b,S], and by
    name which tokens a bound acted on, [b,S] bool ("low", "high", "dual")."""

    loss: Tensor
    ratio: Tensor
    bounded: dict[str, Tensor] = field(default_factory=dict)


SurrogateFn = Callable[..., Surrogate]


NAMES: Mapping[str, Mapping[str, str]] = {
    "loss": {
        "policy": "megarl.algos.policy_loss:policy",
        "distill": "megarl.algos.distillation:distill",
    },
    "surrogate": {
        name: f"megarl.algos.surrogates:{name}"
        for name in ("clip", "cispo", "sapo", "gmpo", "topr", "unclipped", "log_likelihood")
    },
    "advantages": {
        "group": "megarl.algos.advantages:group",
        "levels": "megarl.algos.advantages:levels",
        "teacher": "megarl.algos.distillation:toward_teacher",
        **{
            name: f"megarl.algos.estimators:{name}"
            for name in (
                "gdpo",
                "rloo",
                "opo",
                "reinforce_pp",
                "pass_at_k",
                "max_at_k",
                "gpg",
                "asymre",
                "remax",
            )
        },
    },
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
    outputs: what the engine computes for it, of api.engine.OUTPUTS.
    needs: fields of the batch beside input_ids, attention_mask and loss_mask; it is an error if one
    is missing. uses: fields that it gets where there are any.
    derive: (mean, first) -> metrics of an update, of the means over its optimizer steps and the
    metrics of the first step: what is no mean, as a root of one, is made here.
    own_prox: where a step makes one update, `fn` may be given the logprobs of its own pass, without
    gradient, as prox_logp (actor.recompute_logprob=auto); `weight` does not read that field.
    """

    fn: LossFn
    weight: Callable[[Padded], float]
    outputs: tuple[str, ...] = ("logprobs",)
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    derive: Callable[[Metrics, Metrics], Metrics] = as_they_are
    own_prox: bool = False


@dataclass(frozen=True, kw_only=True)
class AdvantageSpec:
    """Says how rewards become advantages.

    per_sample: {name: [B]} of the whole batch, with the shaped rewards, group_ids and
    trained_tokens -> one number per sample, [B]. It is the same on every rank.
    per_token: (numbers [b], fields padded [b,S]) -> advantages [b,S], of some samples at a time, or
    of none ([0,0]) on a rank that holds none; None: the number at every trained token. reads: the
    fields that it gets, with loss_mask.
    kl_to_go: with kl_ctl the KL to the reference is taken from each token's advantage, as far as
    the token and those after it add to it; else from the reward, all of it.
    whiten: zero mean and unit std over the trained tokens of the whole batch, at the end.
    needs_groups: it is an error if the batch has no group_ids; else every sample is its own group.
    """

    per_sample: Callable[[dict[str, Tensor]], Tensor]
    per_token: Callable[[Tensor, Padded], Tensor] | None = None
    reads: tuple[str, ...] = ("loss_mask",)
    kl_to_go: bool = False
    whiten: bool = False
    needs_groups: bool = False


def loss_of(config: PPOActorConfig) -> LossSpec:
    """Returns the loss that config.loss names, or raises ValueError."""
    spec: LossSpec = _made("loss", config, LossSpec, "a megarl.algos.LossSpec")
    return spec


def advantages_of(config: PPOActorConfig) -> AdvantageSpec:
    """Returns the advantages that config.advantages names, or raises ValueError."""
    what = "a megarl.algos.AdvantageSpec"
    spec: AdvantageSpec = _made("advantages", config, AdvantageSpec, what)
    return spec


def surrogate_of(config: PPOActorConfig) -> SurrogateFn:
    """Returns the surrogate objective that config.surrogate names, or raises ValueError."""
    what = "a function (log_ratio, advantages, logp, mask) -> megarl.algos.Surrogate"
    surrogate: SurrogateFn = _made("surrogate", config, Callable, what)
    return surrogate


def maker(kind: str, name: str) -> Callable[..., Any]:
    """Returns the function of a name in NAMES[kind] or of an import path, or raises ValueError."""
    target = NAMES[kind].get(name, name)
    if not is_import_path(target):
        raise ValueError(
            f"actor.{kind}={name}: use one of {', '.join(NAMES[kind])}, or pkg.module:function"
        )
    fn: Callable[..., Any] = load_object(target, what=f"actor.{kind}")
    return fn


def _made(kind: str, config: PPOActorConfig, expected: Any, what: str) -> Any:
    """Returns what the function that the section `kind` names makes. Raises ValueError where it is
    not `expected`, in words `what`."""
    seam: SeamConfig = getattr(config, kind)
    spec = maker(kind, seam.type)(config, **seam.options)
    if not isinstance(spec, expected):
        returned = type(spec).__name__
        raise ValueError(f"actor.{kind}={seam.type}: it returned a {returned}, not {what}")
    return spec
