"""Decides which episodes may begin and which make the next batch, as plain arithmetic.

AReaL (arXiv 2505.24298, eq. 3) admits the N-th trajectory while floor((N - 1) / B) <= v + eta: with
B trajectories per training batch and one version per batch, trajectory N is consumed at version
floor((N - 1) / B), hence at most eta versions after the weights that began it.

`rollout.order` says which episodes make a batch. `submission`: the first ones in their order, so
the trainer waits for the head of the queue. `completion`: those that finished first, as far as
nothing that is in flight grows too stale by it.

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
trained within eta versions of its start, so the lengths that are trained are those that are sampled
(but for the last eta * B, which at any moment lean to long ones).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from megarl.rollout.episodes import Episode, State

Counts = Mapping[State, int]  # of episodes; 0 for a state that is not there


@dataclass(kw_only=True)
class Admission:
    """Says how many episodes may begin, by the counts of all that there were.

    max_concurrent: episodes in flight at once.
    max_head_offpolicyness: eta, in versions.
    batch: B; None until a consumer is known (then only concurrency bounds admission).
    start_version, start_taken: the version, and the episodes that batches had taken, where the
        count began. A resumed run counts from there: earlier versions give it no room, and earlier
        episodes, perhaps of batches of another size, take none.
    batches_left: how many more batches the consumer will take; None where it does not say.

    Raises ValueError for bounds out of range.
    """

    max_concurrent: int
    max_head_offpolicyness: int
    batch: int | None = None
    start_version: int = 0
    start_taken: int = 0
    batches_left: int | None = None

    def __post_init__(self) -> None:
        if self.max_concurrent < 1:
            raise ValueError(f"max_concurrent_rollouts={self.max_concurrent}: use at least 1")
        if self.max_head_offpolicyness < 0:
            raise ValueError(
                f"max_head_offpolicyness={self.max_head_offpolicyness}: use 0 (synchronous) or more"
            )

    def serve(self, batch: int, version: int, counts: Counts) -> None:
        """Begins to count at `version` for a consumer that takes `batch` episodes at a time."""
        self.batch, self.start_version = batch, version
        self.start_taken = counts[State.TAKEN]

    def check_version(self, version: int, counts: Counts) -> None:
        """Raises ValueError for a `version` that came without a batch: admission takes each version
        for one batch that was handed out."""
        if self.batch is None:
            return
        versions = version - self.start_version
        batches = (counts[State.TAKEN] - self.start_taken) // self.batch
        if versions > batches:
            raise ValueError(
                f"version {version} has no batch of its own: {versions} versions since "
                f"{self.start_version}, but {batches} batches of {self.batch} episodes "
                "were handed out; call update_weights or set_version once for each batch of "
                "prepare_batch, however many updates are made with it"
            )

    def room(self, version: int, counts: Counts) -> int:
        """Returns how many episodes may still begin under `version`, by the staleness bound and by
        what the consumer will still take; may be negative."""
        if self.batch is None:
            return self.max_concurrent
        batches = self.max_head_offpolicyness + version - self.start_version + 1
        used = counts[State.TAKEN] - self.start_taken + _in_flight(counts)
        room = batches * self.batch - used
        needed = self.needed(counts)
        return room if needed is None else min(room, needed)

    def needed(self, counts: Counts) -> int | None:
        """Returns how many episodes the batches left still need; None for no end of batches."""
        if self.batch is None or self.batches_left is None:
            return None
        return self.batches_left * self.batch - _in_flight(counts)

    def capacity(self, version: int, counts: Counts) -> int:
        """Returns how many episodes may begin now: the smaller of free slots and staleness room."""
        free = self.max_concurrent - counts[State.RUNNING]
        return min(free, self.room(version, counts))

    def wanted(self, version: int, counts: Counts) -> int:
        """Returns how many episodes to submit: the room, plus one batch in waiting when
        asynchronous, so that generation goes on while the trainer trains; none that no batch will
        take. May be negative."""
        room = self.room(version, counts)
        if self.max_head_offpolicyness > 0:
            room += self.batch or 0
        needed = self.needed(counts)
        return (room if needed is None else min(room, needed)) - counts[State.WAITING]

    def check_room(self, version: int, counts: Counts) -> None:
        """Raises RuntimeError where no episode may begin before the weights change."""
        if self.batches_left == 0:
            raise RuntimeError("no episode may start: all batches that expect() allows were taken")
        if self.capacity(version, counts) <= 0:
            raise RuntimeError(
                f"no episode may start: the batches that version {version} allows under "
                f"rollout.max_head_offpolicyness={self.max_head_offpolicyness} are handed out; "
                "call update_weights or set_version after every training step"
            )

    def first_come(
        self, live: Sequence[Episode], count: int, version: int, counts: Counts
    ) -> list[Episode]:
        """Returns those of `live` that make a batch in order of completion, see `first_come`; no
        room is kept for those that cannot begin before there is a batch."""
        blocked = counts[State.WAITING] if self.room(version, counts) <= 0 else 0
        bound = self.max_head_offpolicyness
        return first_come(live, count, version=version, bound=bound, blocked=blocked)

    def is_stale(self, oldest: int | None, version: int) -> bool:
        """Returns whether a sample whose oldest trained token was written by weights `oldest`
        (None: it has no trained token) is too old to be trained on at `version`."""
        return oldest is not None and version - oldest > self.max_head_offpolicyness


def _in_flight(counts: Counts) -> int:
    return counts[State.RUNNING] + counts[State.READY]


def head(live: Iterable[Episode], count: int) -> list[Episode]:
    """Returns the first `count` of `live`, which are in order of submission, up to the first that
    is not accepted yet."""
    return list(islice(takewhile(lambda e: e.place is not None, live), count))


def first_come(
    live: Sequence[Episode], count: int, *, version: int, bound: int, blocked: int = 0
) -> list[Episode]:
    """Returns those accepted episodes of `live` that the batch of `version` takes, in order of
    completion: fewer than `count` while it has to wait. bound: eta, in versions.

    Room in the batch is kept for episodes that later batches could not take in time, whether they
    have finished or not. The last `blocked` episodes cannot begin before there is a batch, so no
    room is kept for them.
    """
    begun = (e.began for e in live[: len(live) - blocked] if e.began is not None)
    due = dues(begun, count, version=version, bound=bound)
    taken: list[Episode] = []
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
