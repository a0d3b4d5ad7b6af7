"""Decides which rank gathers and sends which tensors, which go together, and how much at once.
Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TypeVar

from megarl.models.piece_table import Place
from megarl.parallel.layout import Layout

Parts = tuple[tuple[Place, int], ...]  # where the pieces of a tensor are, and numbers in each
T = TypeVar("T")

# SGLang's loader of latent attention (deepseek_weight_loader.py) makes one parameter of the two. It
# keeps the first until the second comes, and forgets it at the end of the request.
_FUSED = re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\.")


def load_unit(name: str) -> str:
    """Returns a name that HF tensors share which a server has to get in one request."""
    return _FUSED.sub(".", name)


def units(tensors: Iterable[T], name: Callable[[T], str]) -> list[list[T]]:
    """Returns the tensors by load unit, in the order of the units' first members."""
    found: dict[str, list[T]] = {}
    for tensor in tensors:
        found.setdefault(load_unit(name(tensor)), []).append(tensor)
    return list(found.values())


def spread_senders(layout: Layout, count: int, first: int = 0) -> tuple[int, ...]:
    """Returns `count` ranks evenly apart, so that they sit on different stages and nodes. Raises
    ValueError for fewer than one, or more than the layout has."""
    size = layout.world_size
    if not 1 <= count <= size:
        raise ValueError(
            f"weight_sync.options.senders={count}: use 1 to {size}, the trainer's ranks"
        )
    return tuple((first + i * size // count) % size for i in range(count))


def assign(
    tensors: Iterable[tuple[Parts, int]], layout: Layout, senders: Sequence[int]
) -> list[int]:
    """Returns the sender of each tensor, given as its parts and bytes: the one for which least
    comes from other stages, then from other ranks, then the one that has least to send."""
    coords = {sender: layout.coords(sender) for sender in senders}
    load = dict.fromkeys(senders, 0)

    @cache
    def absent(parts: Parts, sender: int) -> tuple[int, int]:
        """Numbers that come from another stage, and from any other rank."""
        c = coords[sender]
        far = sum(n for place, n in parts if place.pp != c.pp)
        return far, sum(n for place, n in parts if not place.holds(c))

    chosen = []
    for parts, nbytes in tensors:
        best = (
            min(senders, key=lambda s: (*absent(parts, s), load[s])) if senders[1:] else senders[0]
        )
        load[best] += nbytes
        chosen.append(best)
    return chosen


def by_turns(counts: Mapping[int, int]) -> list[int]:
    """Returns the senders in turn, each as often as it has buckets, evenly spread."""
    turns = [((i + 0.5) / n, sender) for sender, n in counts.items() for i in range(n)]
    return [sender for _, sender in sorted(turns)]


def split_budget(bucket_bytes: int) -> tuple[int, int]:
    """Returns the bytes of a bucket, and of the messages on their way into one: a sender has two of
    the first and one of the second, 2 * `bucket_bytes` in all."""
    staging = bucket_bytes // 8
    return bucket_bytes - staging // 2, staging


def first_bytes(bucket_bytes: int) -> int:
    """Returns the bytes of a sender's first bucket; each of the next has twice as many as the one
    before, which may be one large tensor, up to `bucket_bytes`. Nothing is sent while the first is
    gathered, so it is a small one; and to gather twice as much takes less than to send what was
    gathered before."""
    return -(-bucket_bytes // 16)
