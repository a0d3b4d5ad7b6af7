"""Logprobs of a prompt's own tokens, and of the likeliest at each position, as SGLang answers them.

n tokens of a prompt, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK = 512  # positions whose logits [_CHUNK,V] are in memory at once


@dataclass(frozen=True)
class PromptLogprobs:
    """Holds SGLang's entries [logprob, token id, null] of each of n tokens, null for the logprob of
    the first; and of each the `top` likeliest, null for the first."""

    tokens: list[list[Any]]
    top: list[list[list[Any]] | None]


def prompt_logprobs(
    head: Callable[[Tensor], Tensor], hidden: Tensor, ids: list[int], top: int
) -> PromptLogprobs:
    """Returns those of a prompt by its hidden states [n,H]: log_softmax of what `head` makes of
    them, without a temperature, as SGLang's of a prompt."""
    tokens: list[list[Any]] = [[None, ids[0], None]]
    likeliest: list[list[list[Any]] | None] = [None]
    rest = torch.tensor(ids[1:], dtype=torch.long)
    for states, said in zip(hidden[:-1].split(_CHUNK), rest.split(_CHUNK), strict=True):
        logprobs = head(states).float().log_softmax(-1)
        own = logprobs.gather(-1, said.to(logprobs.device)[:, None])[:, 0].tolist()
        tokens += [[lp, token, None] for lp, token in zip(own, said.tolist(), strict=True)]
        values, which = (x.tolist() for x in logprobs.topk(top))
        pairs = zip(values, which, strict=True)
        likeliest += [[[lp, i, None] for lp, i in zip(*pair, strict=True)] for pair in pairs]
    return PromptLogprobs(tokens, likeliest)
