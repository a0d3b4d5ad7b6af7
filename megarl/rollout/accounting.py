"""Accounts for samples: each is trained once (or its update is skipped), or it failed."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megarl.rollout.retries import Failed, by_kind

LATEST = 256  # rollouts that a rate of failures is measured on
ENOUGH = 64  # rollouts before it says anything
_COUNTS = ("mark", "episodes", "samples", "skipped_episodes", "skipped_samples")


class AccountingError(AssertionError):
    """Says that the counts do not balance, which is a fault in the code."""


class SampleAccounting:
    """Checks that every episode is handed out once and trained once.

    All up to a mark have been handed out or never will be; beside it are held the ids of those
    beyond it that came early (with rollout.order=completion) and the episodes of the batch being
    trained. The consumer reports both ends:

        accounting.receive(batch["episode_ids"])   # on getting a batch, [B], one id per sample
        accounting.train(batch["episode_ids"], batch["skipped"])     # after the update
    """

    def __init__(self) -> None:
        self.mark = -1  # no id up to it will be received any more
        self.early: set[int] = set()  # ids received beyond the mark
        self.episodes = 0  # trained
        self.samples = 0
        self.skipped_episodes = 0  # none of whose samples were trained
        self.skipped_samples = 0
        self._untrained: dict[int, int] = {}  # id -> samples

    def receive(self, episode_ids: Tensor, first_due: int | None = None) -> None:
        """Books the samples [B] of these episodes as handed out. Raises AccountingError for an
        episode that was handed out before. first_due: no episode below it comes any more; None: nor
        does one below the highest of these."""
        for episode, count in sorted(Counter(episode_ids.tolist()).items()):
            if self._received(episode):
                raise AccountingError(f"episode {episode} was handed out twice")
            self.early.add(episode)
            self._untrained[episode] = count
        self.mark = max(self.early, default=self.mark) if first_due is None else first_due - 1
        self.early = {e for e in self.early if e > self.mark}

    def _received(self, episode: int) -> bool:
        return episode <= self.mark or episode in self.early

    def train(self, episode_ids: Tensor, skipped: Tensor | None = None) -> None:
        """Books the samples [B] of these episodes as trained, or as skipped under `skipped` [B]
        bool. Raises AccountingError for an episode that was not handed out, or not with as many
        samples."""
        left_out = Counter([] if skipped is None else episode_ids[skipped].tolist())
        for episode, count in Counter(episode_ids.tolist()).items():
            if episode not in self._untrained:
                known = self._received(episode)
                what = "trained twice" if known else "trained, but never handed out"
                raise AccountingError(f"episode {episode} was {what}")
            due = self._untrained.pop(episode)
            if count != due:
                raise AccountingError(f"episode {episode}: {count} samples trained, it has {due}")
            self.skipped_samples += left_out[episode]
            self.samples += count - left_out[episode]
            if left_out[episode] == count:
                self.skipped_episodes += 1
            else:
                self.episodes += 1

    def fail(self, episode_ids: Tensor) -> None:
        """Books samples that left the batch after they were handed out, because something failed
        for them; `episode_ids` [n]. An episode that has no others counts as skipped. Raises
        AccountingError for more samples than the episode has."""
        for episode, count in Counter(episode_ids.tolist()).items():
            if count > self._untrained.get(episode, 0):
                raise AccountingError(f"episode {episode}: {count} samples failed, it has fewer")
            self._untrained[episode] -= count
            if not self._untrained[episode]:
                del self._untrained[episode]
                self.skipped_episodes += 1

    def check(self) -> None:
        """Raises AccountingError unless everything received was trained, or skipped."""
        if self._untrained:
            names = ", ".join(map(str, self._untrained))
            raise AccountingError(f"episodes {names} were handed out, but never trained")

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts for a checkpoint. Episodes that were handed out but not trained yet
        cannot be saved: check() comes first."""
        self.check()
        counts = {name: getattr(self, name) for name in _COUNTS}
        return counts | {"early": sorted(self.early)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the counts of `state_dict`."""
        for name in _COUNTS:
            setattr(self, name, state[name])
        self.early = set(state["early"])


class FailedSamples:
    """Counts the rollouts that an environment, a reward, a tool or a server spoilt, by kind, and
    their tokens; one with several rows counts once. No batch has them: to train on a substitute (a
    reward of zero, say) would teach the failure."""

    def __init__(self) -> None:
        self.samples: Counter[str] = Counter()
        self.tokens = 0
        self.retried = 0  # that were made anew

    def add(self, failed: Sequence[Failed], retried: int = 0) -> None:
        """Adds (kind, length) of every failed rollout of an episode, and how many were made
        anew."""
        self.samples.update(kind for kind, _ in failed)
        self.tokens += sum(length for _, length in failed)
        self.retried += retried

    def stats(self) -> dict[str, float]:
        """Returns failed_samples, retried_samples, and where there are any failed_samples/<kind>
        and failed_samples/len_mean, in tokens."""
        count = self.samples.total()
        stats = {"failed_samples": float(count), "retried_samples": float(self.retried)}
        if count:
            stats |= {f"failed_samples/{kind}": float(n) for kind, n in self.samples.items()}
            stats["failed_samples/len_mean"] = self.tokens / count
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts for a checkpoint."""
        return {"samples": dict(self.samples), "tokens": self.tokens, "retried": self.retried}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the counts of `state_dict`."""
        self.samples, self.tokens = Counter(state["samples"]), state["tokens"]
        self.retried = state.get("retried", 0)  # an earlier checkpoint has none


class FailureRate:
    """Watches which part of the latest rollouts failed, retries among them."""

    def __init__(self, bound: float) -> None:
        """Takes rollout.max_failure_rate."""
        self._bound = bound
        self._latest: deque[Failed | None] = deque(maxlen=LATEST)  # None did not fail

    def add(self, failed: Sequence[Failed], good: int) -> None:
        """Adds the rollouts of an episode: those that failed, and how many did not."""
        self._latest.extend(failed)
        self._latest.extend([None] * good)

    def check(self) -> None:
        """Raises RuntimeError where more than the bound failed; the first few are no measure."""
        failed, seen = [f for f in self._latest if f is not None], len(self._latest)
        if seen < ENOUGH or len(failed) <= self._bound * seen:
            return
        raise RuntimeError(
            f"{len(failed)} of the latest {seen} rollouts failed ({by_kind(failed)}), more than "
            f"rollout.max_failure_rate={self._bound:g}: mend what fails (the log names rows), or "
            "raise the bound"
        )
