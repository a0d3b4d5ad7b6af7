"""Says which episodes make the next batch (`rollout.order`), as plain arithmetic.

`submission`: the first ones in their order, so the trainer waits for the head of the queue.
`completion`: those that finished first, as far as nothing that is in flight grows too stale by it.

An episode that began under version s may be trained at version s + eta at the latest: it is *due*
then. Batch k is taken at version k and later ones take B episodes each, so everything can still be
trained in time just if, after batch k, at most j * B live episodes are due by version k + j, for
every j >= 0. Batch k takes finished episodes first come, as long as that holds afterwards.

Why this never breaks the bound. By j = 0, no live episode is past its time after any batch.

Why it never gets stuck. After batch k - 1 at most (j + 1) * B live episodes were due by version
k + j. What began since is due at k + eta or later, and admission leaves at most (eta + 1) * B alive
in all. So the B episodes that are due first always make a batch that keeps the rule, and each of
them ends: at the latest by `episode_timeout`. One that is rejected or fails is due no more, and
another starts in its place. Admission also leaves at most eta * B alive after batch k, so j >= eta
always holds, and only j = 0 .. eta - 1 are looked at. For eta = 0 there is nothing to look at:
exactly B episodes are alive, and both orders make the same batch.

Why nothing is dropped. Nothing grows too stale; a batch only changes who waits. Every episode is
trained within eta versions of its begin, so the lengths that are trained are those that are sampled
(but for the last eta * B, which at any moment lean to long ones).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from typing import Protocol, TypeVar


class Live(Protocol):
    """Describes an episode that is submitted and in no batch yet.

    began: the oldest version that its tokens may be of; None before it begins.
    place: its place in the order of completion; None before it is accepted.
    """

    began: int | None
    place: int | None


E = TypeVar("E", bound=Live)


def head(live: Iterable[E], count: int) -> list[E]:
    """Returns the first `count` of `live`, which are in order of submission, up to the first that
    is not accepted yet."""
    return list(islice(takewhile(lambda e: e.place is not None, live), count))


def first_come(
    live: Sequence[E], count: int, *, version: int, bound: int, blocked: int = 0
) -> list[E]:
    """Returns those accepted episodes of `live` that the batch of `version` takes, in order of
    completion: fewer than `count` while it has to wait. bound: eta, in versions.

    Room in the batch is kept for episodes that later batches could not take in time, whether they
    have finished or not. The last `blocked` episodes cannot begin before there is a batch, so no
    room is kept for them.
    """
    begun = (e.began for e in live[: len(live) - blocked] if e.began is not None)
    due = dues(begun, count, version=version, bound=bound)
    taken: list[E] = []
    finished = sorted(((e.place, i) for i, e in enumerate(live) if e.place is not None))
    for _, i in finished:
        began = live[i].began
        left = [n - (began is not None and began <= version + j - bound) for j, n in enumerate(due)]
        # whoever is due by version + j is due by any later one, so these take the same places
        if len(taken) + 1 + max([0, *left]) <= count:
            due = left
            taken.append(live[i])
    return taken


def dues(begun: Iterable[int], count: int, *, version: int, bound: int) -> list[int]:
    """Returns, for j = 0, 1, ..., how many of the live episodes that are due by `version` + j the
    batch of `version` has to take; j later batches take `count` each. Where the list ends it is
    none. begun: the versions under which live episodes began.

    None of the numbers exceeds `count`, which it could only where the batch or the bound was made
    smaller in mid-run."""
    ordered = sorted(begun)
    alive = [
        bisect_right(ordered, version + j - bound)
        for j in range(min(bound, -(-len(ordered) // count)))
    ]
    return [min(count, max(0, n - j * count)) for j, n in enumerate(alive)]
