"""Holds the two rows of four tokens that the examples of the docstrings here compute with.

                   row 0                      row 1
                   prompt  a    b    c        prompt  x    y    padding
    new                    0.5  0.75 0.3              0.4  0.1         probabilities by the policy
    old                    0.5  0.5  0.4              0.2  0.4         before the update
    new / old              1    1.5  0.75             2    0.25
    behaviour              0.5  0.25 0.5              0.4  0.4         as the server reported them
    old / behaviour        1    2    0.8              0.5  1
    ref                    0.5  0.3  0.6              0.4  0.4         by the reference
    adv                    1    1    1                -2   -2
    values                 0.5  0.5  1                1    0           before the token

What policies give a token is held as a logarithm; d is that of new / old.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _rows(first: tuple[float, ...], second: tuple[float, ...], rest: float = 1.0) -> Tensor:
    """Returns [2,4] of a, b, c and of x, y; the prompts and the padding hold `rest`."""
    return torch.tensor([[rest, *first], [rest, *second, rest]])


mask = _rows((1, 1, 1), (1, 1), 0).bool()
new = _rows((0.5, 0.75, 0.3), (0.4, 0.1)).log()
old = _rows((0.5, 0.5, 0.4), (0.2, 0.4)).log()
behaviour = _rows((0.5, 0.25, 0.5), (0.4, 0.4)).log()
ref = _rows((0.5, 0.3, 0.6), (0.4, 0.4)).log()
d = new - old
adv = _rows((1, 1, 1), (-2, -2), 0)
values = _rows((0.5, 0.5, 1), (1, 0), 0)
batch = {
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool(),
    "loss_mask": mask,
    "logprobs": behaviour,
    "prox_logp": old,
    "ref_logp": ref,
    "advantages": adv,
    "values": values,
    "returns": _rows((1, 1, 1), (-1, -1), 0),
    "group_ids": torch.tensor([0, 0]),
    "chosen": torch.tensor([True, False]),
    "rollout_tokens": torch.tensor([3, 2]),
    "batch_share": torch.tensor([0.5, 0.5]),
}
