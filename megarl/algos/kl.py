"""Monte-Carlo estimators of the KL divergence from per-token log-probabilities.

J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import torch
from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")

# exp(20) = 4.9e8. Beyond it a ratio says nothing more, and exp must not overflow: an infinite value
# in a branch that min/max/where does not take still turns the gradient into NaN (0 * inf).
MAX_LOG_RATIO = 20.0


def safe_exp(log_ratio: Tensor) -> Tensor:
    """Returns exp(log_ratio) with log_ratio bounded above by MAX_LOG_RATIO, any shape."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def kl_estimate(logp_q: Tensor, logp_p: Tensor, kind: str = "k3") -> Tensor:
    """Estimates KL(q || p) per token, at tokens drawn from q, any shape. Raises ValueError for an
    unknown `kind`.

    With log r = log p(x) - log q(x):
      k1 = -log r           unbiased, high variance, may be negative
      k2 = (log r)^2 / 2    biased, always positive
      k3 = r - 1 - log r    unbiased, always positive

    As terms of a loss, differentiated through q, they are different things: the expected gradient
    of k1 is zero, that of k2 is the gradient of KL(q || p), and that of k3 is the gradient of
    KL(p || q).

    >>> from megarl.algos.example import mask, new, ref
    >>> kl_estimate(new, ref, "k1")[mask]
    tensor([-0.0000,  0.9163, -0.6931, -0.0000, -1.3863])
    >>> kl_estimate(new, ref, "k2")[mask]
    tensor([0.0000, 0.4198, 0.2402, 0.0000, 0.9609])
    >>> kl_estimate(new, ref, "k3")[mask]
    tensor([0.0000, 0.3163, 0.3069, 0.0000, 1.6137])
    """
    log_r = logp_p - logp_q
    if kind == "k1":
        return -log_r
    if kind == "k2":
        return 0.5 * torch.square(log_r)
    if kind == "k3":
        # expm1: near r = 1 the plain form loses all its digits, and its sign
        return log_r.clamp(max=MAX_LOG_RATIO).expm1() - log_r
    raise ValueError(f"KL estimator {kind!r}: use one of {', '.join(KL_ESTIMATORS)}")


KL_TERMS = (*KL_ESTIMATORS, "k1+", "k3+", "k3-weighted")


def kl_term(logp: Tensor, ref: Tensor, old: Tensor, kind: str = "k3") -> Tensor:
    """Returns KL(policy || reference) per token as a term of a loss over logp, which has gradient,
    any shape; tokens were drawn from the policy of `old`. Raises ValueError for an unknown `kind`.

    k1, k2, k3    kl_estimate, differentiated as it is
    k1+, k3+      the value of k1 or k3 with the gradient of k2, which is unbiased on policy
    k3-weighted   u k3 with u = exp(logp - old): value and gradient are unbiased where the
                  tokens come from `old` (DeepSeek-V3.2, arXiv 2512.02556, sec. 3.1)

    >>> from megarl.algos.example import mask, new, old, ref
    >>> kl_term(new, ref, old, "k3-weighted")[mask]
    tensor([0.0000, 0.4744, 0.2301, 0.0000, 0.4034])
    """
    if kind not in KL_TERMS:
        raise ValueError(f"KL estimator {kind!r}: use one of {', '.join(KL_TERMS)}")
    if kind == "k3-weighted":
        return safe_exp(logp - old) * kl_estimate(logp, ref, "k3")
    if not kind.endswith("+"):
        return kl_estimate(logp, ref, kind)
    slope = kl_estimate(logp, ref, "k2")
    return slope - slope.detach() + kl_estimate(logp.detach(), ref, kind[:-1])
