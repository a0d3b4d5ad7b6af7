"""Chooses which of the trainer ranks that hold the same numbers sends them to a receiver."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from megarl.weight_sync.slices.geometry import Geometry, Ints


def choose_sources(
    sources: Sequence[Sequence[int]],
    geometries: Sequence[Geometry],
    trainer_nodes: Sequence[Hashable] | None,
    receiver_nodes: Sequence[Hashable],
) -> Ints:
    """Returns the trainer rank that sends to each receiver what each source has, -1 where the
    receiver needs nothing of it, [receivers, sources].

    sources: the ranks of each. A receiver takes from ranks of its own node where they are among
    them. The largest share goes first, each to the rank that has least to send so far (Graham's
    longest processing time first, 1969), so that no rank sends more than another by more than one
    share, where sources leave the choice.
    """
    load = np.zeros(1 + max((max(ranks) for ranks in sources), default=0), dtype=np.int64)
    senders = np.full((len(geometries), len(sources)), -1, dtype=np.int64)
    shares = {id(g): g.bytes_of_sources(len(sources)) for g in geometries}
    tasks = [
        (nbytes, source, receiver)
        for receiver, g in enumerate(geometries)
        for source, nbytes in enumerate(shares[id(g)].tolist())
        if nbytes
    ]
    near: dict[tuple[int, Hashable], Ints] = {}
    for nbytes, source, receiver in sorted(tasks, key=lambda t: (-t[0], *t[1:])):
        node = receiver_nodes[receiver]
        if (source, node) not in near:
            near[source, node] = _nearest(sources[source], trainer_nodes, node)
        ranks = near[source, node]
        sender = ranks[np.argmin(load[ranks])]
        senders[receiver, source] = sender
        load[sender] += nbytes
    return senders


def _nearest(ranks: Sequence[int], nodes: Sequence[Hashable] | None, node: Hashable) -> Ints:
    found = [] if nodes is None or node is None else [r for r in ranks if nodes[r] == node]
    return np.array(found or ranks, dtype=np.int64)
