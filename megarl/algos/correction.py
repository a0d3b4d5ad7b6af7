"""Weighs tokens that another policy wrote: an older one, or the same one as a server rounds it.

w_t = exp(old_t - behaviour_t), where `old` is the proximal policy, which the trainer computed, and
`behaviour` what the server reported. [b,S], n trained tokens in a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from megarl.algos.kl import safe_exp
from megarl.algos.ratios import row_mean

Level = Literal["token", "sequence", "geometric", "none"]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Multiplies the loss of a token by a bounded weight, and drops tokens or rows that are too far
    from the policy that trains.

    weight: "token", w_t (decoupled PPO, AReaL, arXiv 2505.24298); "sequence", the product of w over
    the row, which is unbiased and of high variance; "geometric", their geometric mean; "none", 1.
    weight_cap: the weight is at most this (truncated importance sampling, arXiv 1802.01561).
    mask: what is dropped below `mask_low` or above `mask_high`: "token", by w_t; a whole row by
    the product of its w ("sequence") or by their geometric mean ("geometric"); "none".
    veto: drops a row of which one token has w_t below it.

    A dropped token gives no gradient. It stays in the mean's denominator, which must not depend on
    the model.

    >>> from megarl.algos.example import behaviour, mask, old
    >>> weight, _ = Correction(weight="token", weight_cap=1.5).of_tokens(old, behaviour, mask)
    >>> weight[mask]
    tensor([1.0000, 1.5000, 0.8000, 0.5000, 1.0000])
    >>> _, dropped = Correction(mask="geometric", mask_low=0.9).of_tokens(old, behaviour, mask)
    >>> dropped[mask]
    tensor([False, False, False,  True,  True])
    >>> _, dropped = Correction(veto=0.6).of_tokens(old, behaviour, mask)
    >>> dropped[mask]
    tensor([False, False, False,  True,  True])
    """

    weight: Level = "token"
    weight_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    mask: Level = "none"
    mask_low: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    mask_high: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    veto: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        if self.mask == "none" and (self.mask_low or self.mask_high is not None):
            raise ValueError("mask_low and mask_high bound nothing with mask=none; set mask")
        if self.weight == "none" and self.weight_cap is not None:
            raise ValueError(f"weight_cap={self.weight_cap}: caps nothing with weight=none")

    def of_tokens(self, old: Tensor, behaviour: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights [b,S], without gradient, and which tokens are dropped, [b,S] bool."""
        log_w = torch.where(mask, old - behaviour, 0.0).detach()
        weight = self._at(self.weight, log_w, mask)
        if self.weight_cap is not None:
            weight = weight.clamp(max=self.weight_cap)
        far = torch.zeros_like(mask)
        if self.mask != "none":
            by = self._at(self.mask, log_w, mask)
            high = math.inf if self.mask_high is None else self.mask_high
            far = (by < self.mask_low) | (by > high)
        if self.veto:
            far = far | (log_w < math.log(self.veto)).any(1, keepdim=True)
        return weight, far & mask

    def _at(self, level: str, log_w: Tensor, mask: Tensor) -> Tensor:
        """Returns exp of `log_w` [b,S] at a level, [b,S] or [b,1]."""
        if level == "token":
            return safe_exp(log_w)
        if level == "none":
            return torch.ones_like(log_w)
        of_row = log_w.sum(1) if level == "sequence" else row_mean(log_w, mask)
        return safe_exp(of_row)[:, None].expand_as(log_w)
