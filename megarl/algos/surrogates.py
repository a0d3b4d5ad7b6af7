"""Surrogate objectives: what a token's loss is, given its importance ratio and its advantage; and
log importance ratios of the policy that trains to the one that the clip starts from, by level.

A ratio's function takes logp with gradient and old, [b,S], and mask [b,S] bool, the trained tokens;
returns [b,S]. d_t = logp_t - old_t at a trained token, n tokens of a row are trained.

A surrogate is called as `surrogate(log_ratio, advantages, logp, mask)`, all [b,S]; log_ratio and
logp carry gradient, 0 where a token is not trained. It returns a Surrogate, whose loss the policy
minimises. u = exp(log_ratio), A the advantage, sg[] stops the gradient, eps_low and eps_high are
`actor.eps_clip` and `actor.eps_clip_higher`. The examples are of the rows of example.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algos.kl import safe_exp
from megarl.algos.specs import Surrogate
from megarl.config.algo import PPOActorConfig

RatioFn = Callable[[Tensor, Tensor, Tensor], Tensor]


def token_ratio(logp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Returns d_t (PPO, arXiv 1707.06347, eq. 6).

    >>> from megarl.algos.example import mask, new, old
    >>> token_ratio(new, old, mask).exp()
    tensor([[1.0000, 1.0000, 1.5000, 0.7500],
            [1.0000, 2.0000, 0.2500, 1.0000]])
    """
    return torch.where(mask, logp - old, 0.0)


def sequence_ratio(logp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Returns sum_t d_t / n at every token of a row: the geometric mean of its tokens' ratios
    (GSPO, arXiv 2507.18071, eq. 7).

    >>> from megarl.algos.example import mask, new, old
    >>> sequence_ratio(new, old, mask).exp()
    tensor([[1.0000, 1.0400, 1.0400, 1.0400],
            [1.0000, 0.7071, 0.7071, 1.0000]])
    """
    return _everywhere(row_mean(token_ratio(logp, old, mask), mask), mask)


def sequence_token_ratio(logp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Returns the value of sequence_ratio with the gradient of the token's own logp: sg[s] + logp_t
    - sg[logp_t] (GSPO-token, arXiv 2507.18071, eq. 14). Equal to `sequence_ratio` where a row has
    one advantage; it is for advantages that differ by token.

    >>> from megarl.algos.example import mask, new, old
    >>> sequence_token_ratio(new, old, mask).exp()
    tensor([[1.0000, 1.0400, 1.0400, 1.0400],
            [1.0000, 0.7071, 0.7071, 1.0000]])
    """
    own = torch.where(mask, logp - logp.detach(), 0.0)
    return sequence_ratio(logp, old, mask).detach() + own


RATIOS: dict[str, RatioFn] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence-token": sequence_token_ratio,
}


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean of each row's `values` [b,S] over its trained tokens, [b]; 0 without one.
    `values` are 0 at the other tokens."""
    return values.sum(1) / mask.sum(1).clamp(min=1)


def _everywhere(per_row: Tensor, mask: Tensor) -> Tensor:
    """Returns the rows' numbers [b] at their trained tokens, 0 elsewhere: [b,S]."""
    return torch.where(mask, per_row[:, None], 0.0)


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Is -min(u A, clip(u, 1 - eps_low, 1 + eps_high) A) (PPO, arXiv 1707.06347, eq. 7).

    eps_high: asymmetric bounds (DAPO, arXiv 2503.14476); None is eps_low. dual > 1: where
    A < 0 the loss is at most -dual A (dual clip, arXiv 1912.09729, eq. 5); None is off.

    >>> from megarl.algos.example import adv, d, mask, new
    >>> Clip(dual=1.5)(d, adv, new, mask).loss[mask]
    tensor([-1.0000, -1.2000, -0.7500,  3.0000,  1.6000])
    """

    eps_low: float = 0.2
    eps_high: float | None = None
    dual: float | None = None

    def __call__(self, log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor) -> Surrogate:
        """Returns the clipped loss; a bound counts where it removes the gradient."""
        low, high = 1.0 - self.eps_low, 1.0 + upper(self.eps_low, self.eps_high)
        u = safe_exp(log_ratio)
        loss = torch.maximum(-adv * u, -adv * u.clamp(low, high))
        ratio = u.detach()
        bounded = {"low": (adv < 0) & (ratio < low), "high": (adv > 0) & (ratio > high)}
        if self.dual is not None:
            loss = torch.where(adv < 0, torch.minimum(loss, -adv * self.dual), loss)
            bounded["dual"] = (adv < 0) & (ratio > self.dual)
        return Surrogate(loss, ratio, bounded)


@dataclass(frozen=True, kw_only=True)
class CISPO:
    """Is -sg[clip(u, 1 - eps_low, 1 + eps_high)] A logp (MiniMax-M1, arXiv 2506.13585):
    the ratio is a weight of REINFORCE, and no token loses its gradient.

    eps_low = 1 bounds nothing from below, which is the paper's choice.

    >>> from megarl.algos.example import adv, d, mask, new
    >>> CISPO(eps_high=0.2)(d, adv, new, mask).loss[mask]
    tensor([ 0.6931,  0.3452,  0.9030, -2.1991, -1.1513])
    """

    eps_low: float = 1.0
    eps_high: float | None = None

    def __call__(self, log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor) -> Surrogate:
        """Returns the weighted log-likelihood; a bound counts where it changes the weight."""
        low, high = 1.0 - self.eps_low, 1.0 + upper(self.eps_low, self.eps_high)
        u = safe_exp(log_ratio).detach()
        loss = -u.clamp(low, high) * adv * logp
        return Surrogate(loss, u, {"low": u < low, "high": u > high})


@dataclass(frozen=True, kw_only=True)
class SAPO:
    """Is -(4 / tau) sigmoid(tau (u - 1)) A, with tau = tau_positive where A > 0, else tau_negative
    (SAPO, arXiv 2511.20347, eq. 5 and 6): a soft gate, whose slope is 1 at u = 1 and decays to
    both sides, in the place of a hard clip.

    >>> from megarl.algos.example import adv, d, mask, new
    >>> SAPO()(d, adv, new, mask).loss[mask]
    tensor([-2.0000, -2.4898, -1.7513,  5.6440,  2.3825])
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __call__(self, log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor) -> Surrogate:
        """Returns the gated loss; nothing is bounded."""
        u = safe_exp(log_ratio)
        good = (adv > 0).to(u.dtype)
        tau = self.tau_positive * good + self.tau_negative * (1.0 - good)
        return Surrogate(-(4.0 / tau) * torch.sigmoid(tau * (u - 1.0)) * adv, u.detach())


@dataclass(frozen=True, kw_only=True)
class GMPO:
    """Is -A exp(sum_t d'_t / n) at every token of a row, d'_t = min(d_t, eps_high) where A > 0 and
    max(d_t, -eps_low) elsewhere (GMPO, arXiv 2507.20673): the geometric mean of the tokens' ratios,
    each bounded by itself; eps bound the logarithm of the ratio.

    It takes the tokens' log ratios (`actor.ratio=token`) and rows of one advantage.

    >>> from megarl.algos.example import adv, d, mask, new
    >>> GMPO()(d, adv, new, mask).loss[mask]
    tensor([-1.0381, -1.0381, -1.0381,  2.3157,  2.3157])
    """

    eps_low: float = 0.4
    eps_high: float | None = None

    def __call__(self, log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor) -> Surrogate:
        """Returns the loss of rows at their tokens; a bound counts where it removes a gradient."""
        high = upper(self.eps_low, self.eps_high)
        bounded = torch.where(
            adv > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-self.eps_low)
        )
        u = safe_exp(row_mean(bounded, mask))[:, None]
        d = log_ratio.detach()
        hits = {"low": mask & (adv <= 0) & (d < -self.eps_low), "high": (adv > 0) & (d > high)}
        return Surrogate(-adv * u, torch.where(mask, u.detach(), 1.0), hits)


@dataclass(frozen=True, kw_only=True)
class Unclipped:
    """Is -u A, whose gradient at u = 1 is that of REINFORCE (Williams 1992).

    >>> from megarl.algos.example import adv, d, mask, new
    >>> Unclipped()(d, adv, new, mask).loss[mask]
    tensor([-1.0000, -1.5000, -0.7500,  4.0000,  0.5000])
    """

    def __call__(self, log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor) -> Surrogate:
        """Returns the loss; nothing is bounded."""
        u = safe_exp(log_ratio)
        return Surrogate(-u * adv, u.detach())


@dataclass(frozen=True, kw_only=True)
class LogLikelihood:
    """Is -A logp, REINFORCE without importance weights (Williams 1992; GPG, arXiv 2504.02546, eq.
    5; AsymRE, arXiv 2506.20520).

    >>> from megarl.algos.example import adv, d, mask, new
    >>> LogLikelihood()(d, adv, new, mask).loss[mask]
    tensor([ 0.6931,  0.2877,  1.2040, -1.8326, -4.6052])
    """

    def __call__(self, log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor) -> Surrogate:
        """Returns the loss; nothing is bounded."""
        return Surrogate(-adv * logp, safe_exp(log_ratio.detach()))


@dataclass(frozen=True, kw_only=True)
class TOPR:
    """Is -A logp where A > 0, else -sg[min(U, 1)] A logp, U = exp(sum_t d_t) the ratio of the whole
    row (tapered off-policy REINFORCE, arXiv 2503.14286): bad answers lose weight as the policy
    leaves them, good ones do not.

    >>> from megarl.algos.example import adv, d, mask, new
    >>> TOPR()(d, adv, new, mask).loss[mask]
    tensor([ 0.6931,  0.2877,  1.2040, -0.9163, -2.3026])
    """

    def __call__(self, log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor) -> Surrogate:
        """Returns the loss; "high" counts the tokens of bad rows whose weight the 1 bounds."""
        whole = log_ratio.detach().sum(1, keepdim=True)
        weight = torch.where(adv > 0, torch.ones_like(whole), whole.clamp(max=0.0).exp())
        hits = mask & (adv < 0) & (whole > 0)
        return Surrogate(-weight * adv * logp, safe_exp(log_ratio.detach()), {"high": hits})


def upper(low: float, high: float | None) -> float:
    """Returns the upper bound, which is the lower one where none is given."""
    return low if high is None else high


# ---- by the actor's section, as `actor.surrogate` names them -----------------------------------


def clip(config: PPOActorConfig) -> Clip:
    """Returns Clip with the bounds of the section."""
    return Clip(eps_low=config.eps_clip, eps_high=config.eps_clip_higher, dual=config.c_clip)


def cispo(config: PPOActorConfig) -> CISPO:
    """Returns CISPO with the bounds of the section."""
    return CISPO(eps_low=config.eps_clip, eps_high=config.eps_clip_higher)


def gmpo(config: PPOActorConfig) -> GMPO:
    """Returns GMPO with the bounds of the section, of the ratio's logarithm. Raises ValueError for
    a ratio that is not the tokens'."""
    _of_tokens(config, "gmpo", "it makes the mean over a sequence itself")
    return GMPO(eps_low=config.eps_clip, eps_high=config.eps_clip_higher)


def sapo(config: PPOActorConfig, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> SAPO:
    """Returns SAPO; the temperatures are the paper's."""
    return SAPO(tau_positive=tau_positive, tau_negative=tau_negative)


def topr(config: PPOActorConfig) -> TOPR:
    """Returns TOPR, which takes the tokens' ratios. Raises ValueError for others."""
    _of_tokens(config, "topr", "it makes the product over a sequence itself")
    return TOPR()


def _of_tokens(config: PPOActorConfig, name: str, why: str) -> None:
    if config.ratio != "token":
        raise ValueError(
            f"actor.surrogate={name}: {why}; set actor.ratio=token (it is {config.ratio})"
        )


def unclipped(config: PPOActorConfig) -> Unclipped:
    """Returns Unclipped."""
    return Unclipped()


def log_likelihood(config: PPOActorConfig) -> LogLikelihood:
    """Returns LogLikelihood."""
    return LogLikelihood()
