"""Configures learning from preferences: which loss, and its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from megarl.config.base import NOT_NEGATIVE, POSITIVE, Bounds, Choices

# by loss: beta where none is set, as its paper or its authors' code has it
BETAS: Mapping[str, float] = {
    "dpo": 0.1,
    "cdpo": 0.1,
    "robust": 0.1,
    "ipo": 0.1,
    "hinge": 0.1,
    "simpo": 2.0,
    "orpo": 0.1,
    "kto": 0.1,
}
PREFERENCE_LOSSES = tuple(BETAS)
WITHOUT_REFERENCE = ("simpo", "orpo")  # losses that measure against no frozen model
UNPAIRED = ("kto",)  # losses of single answers, each with a label


@dataclass(kw_only=True)
class PreferenceConfig:
    """Configures what a policy learns of preferred answers."""

    loss: Annotated[str, Choices(*PREFERENCE_LOSSES)] = "dpo"
    """dpo; cdpo and robust: DPO where some preferences are flipped; ipo; hinge; simpo and orpo,
    without a reference; kto, of answers with a label (docs/algorithms.md)"""
    beta: Annotated[float, POSITIVE] | None = None
    """scale of the implicit reward, in orpo weight of the odds ratio; null is 0.1, for simpo 2"""
    label_smoothing: Annotated[float, Bounds(ge=0, lt=0.5)] = 0.0
    """cdpo, robust: probability that a preference is flipped"""
    gamma: Annotated[float, NOT_NEGATIVE] | None = None
    """simpo: the margin; null is 1"""
    length_normalized: bool = False
    """dpo, cdpo, robust, ipo, hinge: mean logprob of an answer's tokens, not sum"""
    sft_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """dpo, cdpo, robust, ipo, hinge: weight of the chosen answer's cross entropy"""
    desirable_weight: Annotated[float, POSITIVE] = 1.0
    """kto: weight of desirable answers"""
    undesirable_weight: Annotated[float, POSITIVE] = 1.0
    """kto: weight of undesirable ones"""

    @property
    def needs_reference(self) -> bool:
        """Returns whether the loss measures against a frozen model."""
        return self.loss not in WITHOUT_REFERENCE

    @property
    def paired(self) -> bool:
        """Returns whether the loss compares two answers to a prompt."""
        return self.loss not in UNPAIRED

    @property
    def scale(self) -> float:
        """Returns beta, or what the loss has where none is set."""
        return BETAS[self.loss] if self.beta is None else self.beta
