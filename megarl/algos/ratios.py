"""Log importance ratios of the policy that trains to the one that the clip starts from, by level.

Each function takes logp with gradient and old, [b,S], and mask [b,S] bool, the trained tokens;
returns [b,S]. d_t = logp_t - old_t at a trained token, n tokens of a row are trained.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
