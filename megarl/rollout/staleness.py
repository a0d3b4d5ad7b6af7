"""Admission and consumption bounds of asynchronous rollouts, as plain arithmetic.

AReaL (arXiv 2505.24298, eq. 3) admits the N-th trajectory while floor((N - 1) / B) <= v + eta: with
B trajectories per training batch and one version per batch, trajectory N is consumed at version
floor((N - 1) / B), hence at most eta versions after the weights that began it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class StalenessManager:
    """Counts episodes. At all times
    submitted = running + accepted + rejected + failed + dropped.

    max_concurrent: episodes in flight at once. max_head_offpolicyness: eta. consumer_batch: B, None
    until a consumer is known (then only concurrency bounds admission). start_version: the version
    at which counting began, so a resumed run does not get the whole past as capacity.
    """

    max_concurrent: int
    max_head_offpolicyness: int
    consumer_batch: int | None = None
    start_version: int = 0
    submitted: int = 0
    running: int = 0
    accepted: int = 0
    rejected: int = 0
    failed: int = 0
    dropped: int = 0

    def __post_init__(self) -> None:
        if self.max_concurrent < 1:
            raise ValueError(f"max_concurrent_rollouts={self.max_concurrent}: use at least 1")
        if self.max_head_offpolicyness < 0:
            raise ValueError(
                f"max_head_offpolicyness={self.max_head_offpolicyness}: use 0 (synchronous) or more"
            )

    def room(self, version: int) -> int:
        """Episodes that may still begin under `version` by the staleness bound; may be negative."""
        if self.consumer_batch is None:
            return self.max_concurrent
        batches = self.max_head_offpolicyness + version - self.start_version + 1
        return batches * self.consumer_batch - (self.accepted + self.running)

    def capacity(self, version: int) -> int:
        """Episodes that may begin now: the smaller of free slots and staleness room."""
        return min(self.max_concurrent - self.running, self.room(version))

    def is_stale(self, oldest: int | None, version: int) -> bool:
        """Whether a sample whose oldest trained token was written by weights `oldest` may no longer
        be trained on at `version`. None: it has no trained token.
        """
        return oldest is not None and version - oldest > self.max_head_offpolicyness

    def start(self) -> None:
        self.submitted += 1
        self.running += 1

    def accept(self) -> None:
        self._settle()
        self.accepted += 1

    def reject(self) -> None:
        self._settle()
        self.rejected += 1

    def fail(self) -> None:
        self._settle()
        self.failed += 1

    def drop(self) -> None:
        """An accepted episode turned out too stale at consumption."""
        assert self.accepted > 0, "drop without an accepted episode"
        self.accepted -= 1
        self.dropped += 1

    def _settle(self) -> None:
        assert self.running > 0, "an episode settled that was not running"
        self.running -= 1

    def counters(self) -> dict[str, int]:
        names = ("submitted", "running", "accepted", "rejected", "failed", "dropped")
        return {name: getattr(self, name) for name in names}
