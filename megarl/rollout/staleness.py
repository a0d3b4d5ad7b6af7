"""Computes admission and consumption bounds of asynchronous rollouts, as plain arithmetic.

AReaL (arXiv 2505.24298, eq. 3) admits the N-th trajectory while floor((N - 1) / B) <= v + eta: with
B trajectories per training batch and one version per batch, trajectory N is consumed at version
floor((N - 1) / B), hence at most eta versions after the weights that began it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.rollout.accounting import AccountingError

COUNTERS = ("submitted", "running", "accepted", "rejected", "failed", "dropped")


@dataclass(kw_only=True)
class StalenessManager:
    """Counts episodes and says how many may begin. At all times submitted = running + accepted +
    rejected + failed + dropped.

    max_concurrent: episodes in flight at once.
    max_head_offpolicyness: eta, in versions.
    consumer_batch: B; None until a consumer is known (then only concurrency bounds admission).
    start_version, start_accepted: version and episodes handed out where admission began to count.
        A resumed run counts from there: earlier versions give it no room, and earlier episodes,
        perhaps of batches of another size, take none.
    batches_left: how many more batches the consumer will take; None where it does not say.
    handed_out: how many of `accepted` the consumer has taken.

    Raises ValueError for bounds out of range.
    """

    max_concurrent: int
    max_head_offpolicyness: int
    consumer_batch: int | None = None
    start_version: int = 0
    start_accepted: int = 0
    batches_left: int | None = None
    submitted: int = 0
    running: int = 0
    accepted: int = 0
    rejected: int = 0
    failed: int = 0
    dropped: int = 0
    handed_out: int = 0

    def __post_init__(self) -> None:
        if self.max_concurrent < 1:
            raise ValueError(f"max_concurrent_rollouts={self.max_concurrent}: use at least 1")
        if self.max_head_offpolicyness < 0:
            raise ValueError(
                f"max_head_offpolicyness={self.max_head_offpolicyness}: use 0 (synchronous) or more"
            )

    def begin(self, version: int) -> None:
        """Has admission count from here, at `version`; what is in flight takes room."""
        self.start_version, self.start_accepted = version, self.handed_out

    def serve(self, batch: int, version: int, *, bounded: bool) -> None:
        """Notes that the consumer takes `batch` episodes at a time from `version` on. Unless
        `bounded`, so many may be in flight, until max_concurrent is set to something else."""
        if self.consumer_batch is None:
            self.begin(version)
        if self.consumer_batch != batch and not bounded:
            self.max_concurrent = batch
        self.consumer_batch = batch

    def check_version(self, version: int) -> None:
        """Raises ValueError for a `version` that came without a batch: admission takes each version
        for one batch that was handed out."""
        if self.consumer_batch is None:
            return
        versions = version - self.start_version
        batches = (self.handed_out - self.start_accepted) // self.consumer_batch
        if versions > batches:
            raise ValueError(
                f"version {version} has no batch of its own: {versions} versions since "
                f"{self.start_version}, but {batches} batches of {self.consumer_batch} episodes "
                "were handed out; call update_weights or set_version once for each batch of "
                "prepare_batch, however many updates are made with it"
            )

    def room(self, version: int) -> int:
        """Returns how many episodes may still begin under `version`, by the staleness bound and by
        what the consumer will still take; may be negative."""
        if self.consumer_batch is None:
            return self.max_concurrent
        batches = self.max_head_offpolicyness + version - self.start_version + 1
        room = batches * self.consumer_batch - (self.accepted - self.start_accepted + self.running)
        needed = self.needed()
        return room if needed is None else min(room, needed)

    def needed(self) -> int | None:
        """Returns how many episodes the batches left still need; None for no end of batches."""
        if self.consumer_batch is None or self.batches_left is None:
            return None
        in_flight = self.running + self.accepted - self.handed_out
        return self.batches_left * self.consumer_batch - in_flight

    def capacity(self, version: int) -> int:
        """Returns how many episodes may begin now: the smaller of free slots and staleness room."""
        return min(self.max_concurrent - self.running, self.room(version))

    def is_stale(self, oldest: int | None, version: int) -> bool:
        """Returns whether a sample whose oldest trained token was written by weights `oldest`
        (None: it has no trained token) is too old to be trained on at `version`."""
        return oldest is not None and version - oldest > self.max_head_offpolicyness

    def start(self) -> None:
        """Counts an episode that begins."""
        self.submitted += 1
        self.running += 1

    def accept(self) -> None:
        """Counts a running episode as accepted."""
        self._settle()
        self.accepted += 1

    def reject(self) -> None:
        """Counts a running episode as rejected."""
        self._settle()
        self.rejected += 1

    def fail(self) -> None:
        """Counts a running episode as failed."""
        self._settle()
        self.failed += 1

    def drop(self) -> None:
        """Counts an accepted episode as dropped: it turned out too stale at consumption."""
        assert self.accepted > self.handed_out, "drop without an accepted episode"
        self.accepted -= 1
        self.dropped += 1

    def turn_down(self) -> None:
        """Counts an accepted episode as rejected: the consumer does not want it."""
        assert self.accepted > self.handed_out, "turn_down without an accepted episode"
        self.accepted -= 1
        self.rejected += 1

    def hand_out(self, count: int) -> None:
        """Counts one batch of `count` episodes as handed out."""
        self.handed_out += count
        if self.batches_left is not None:
            self.batches_left -= 1

    def _settle(self) -> None:
        assert self.running > 0, "an episode settled that was not running"
        self.running -= 1

    def counters(self) -> dict[str, int]:
        """Returns the counts of episodes, by name."""
        return {name: getattr(self, name) for name in COUNTERS}

    def check(self, *, in_flight: int) -> None:
        """Raises AccountingError where the counts do not add up. in_flight: the episodes that the
        caller holds, running or accepted and not handed out."""
        ended = self.accepted + self.rejected + self.failed + self.dropped
        if (
            self.submitted != self.running + ended
            or in_flight != self.running + self.accepted - self.handed_out
        ):
            counters = ", ".join(f"{v} {k}" for k, v in self.counters().items())
            raise AccountingError(
                "rollout accounting is wrong, please report it: submitted is not running + "
                "accepted + rejected + failed + dropped, or an episode was lost: "
                f"{counters}, {self.handed_out} handed out, {in_flight} in flight"
            )

    def state_dict(self, *, untold: int) -> dict[str, int]:
        """Returns the counters as if episodes in flight and `untold` failures were still to
        come."""
        in_flight = self.running + self.accepted - self.handed_out
        return self.counters() | {
            "submitted": self.submitted - in_flight - untold,
            "running": 0,
            "accepted": self.handed_out,
            "failed": self.failed - untold,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores the counters of `state_dict`: nothing is in flight then."""
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.handed_out = self.accepted
