"""Scatters sums between the ranks of sequence parallelism over gloo.

torch has gloo reduce the whole tensor on every rank and keeps a part, which sends twice as much as
is needed, in steps one after another. Here every rank sends each other one its part directly, and
adds up what it gets.

n ranks; a whole tensor is [n * s, ...], a part [s, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Later:
    """Finishes a collective when it is waited for; until then it keeps the memory it sends from."""

    def __init__(self, work: Any, sent: Tensor, finish: Callable[[], Any]) -> None:
        self._left: tuple[Any, Tensor, Callable[[], Any]] | None = work, sent, finish

    def wait(self) -> None:
        """Waits for the other ranks and completes the result. A second wait does nothing."""
        if self._left is not None:
            work, _, finish = self._left
            work.wait()
            finish()
        self._left = None


def reduce_scatter(
    part: Tensor, whole: Tensor, *, group: Any = None, async_op: bool = False
) -> Later | None:
    """Fills `part` with this rank's part of the sum of `whole` over the group, added in the order
    of the ranks. Returns what to wait for, or None where it is done."""
    n = dist.get_world_size(group)
    whole = whole.contiguous()
    came = torch.empty_like(whole)
    work = dist.all_to_all_single(came, whole, group=group, async_op=True)
    later = Later(work, whole, lambda: torch.sum(came.view(n, *part.shape), 0, out=part))
    if async_op:
        return later
    later.wait()
    return None
