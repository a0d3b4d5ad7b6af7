"""What becomes of samples: handed out and trained once (or their update was skipped), or failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor


class AccountingError(AssertionError):
    """The books do not balance: a fault in the code, whatever the settings of the run."""


class SampleAccounting:
    """Episodes are handed out in ascending order of their ids, so one mark tells what came before:
    beside it only the episodes of the batch being trained are held. The consumer reports both ends:

        accounting.receive(batch["episode_ids"])   # on getting a batch, [B], one id per sample
        accounting.train(batch["episode_ids"], batch["skipped"])     # after the update
    """

    def __init__(self) -> None:
        self.mark = -1  # the highest id received
        self.episodes = 0  # trained
        self.samples = 0
        self.skipped_episodes = 0  # none of whose samples were trained
        self.skipped_samples = 0
        self._untrained: dict[int, int] = {}  # id -> samples

    def receive(self, episode_ids: Tensor) -> None:
        for episode, count in sorted(Counter(episode_ids.tolist()).items()):
            if episode <= self.mark:
                raise AccountingError(f"episode {episode} was handed out twice")
            self.mark = episode
            self._untrained[episode] = count

    def train(self, episode_ids: Tensor, skipped: Tensor | None = None) -> None:
        """`skipped` [B] bool: samples whose update was skipped."""
        left_out = Counter([] if skipped is None else episode_ids[skipped].tolist())
        for episode, count in Counter(episode_ids.tolist()).items():
            if episode not in self._untrained:
                what = "trained twice" if episode <= self.mark else "trained, but never handed out"
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
        """`episode_ids` [n]: samples that left the batch after they were handed out, because
        something failed for them. An episode that has no others counts as skipped.
        """
        for episode, count in Counter(episode_ids.tolist()).items():
            if count > self._untrained.get(episode, 0):
                raise AccountingError(f"episode {episode}: {count} samples failed, it has fewer")
            self._untrained[episode] -= count
            if not self._untrained[episode]:
                del self._untrained[episode]
                self.skipped_episodes += 1

    def check(self) -> None:
        """Raises unless everything received was trained, or skipped."""
        if self._untrained:
            names = ", ".join(map(str, self._untrained))
            raise AccountingError(f"episodes {names} were handed out, but never trained")

    def state_dict(self) -> dict[str, int]:
        """What was handed out but not trained yet cannot be saved: check() comes first."""
        self.check()
        names = ("mark", "episodes", "samples", "skipped_episodes", "skipped_samples")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.mark, self.episodes, self.samples = (
            state[name] for name in ("mark", "episodes", "samples")
        )
        self.skipped_episodes = state.get("skipped_episodes", 0)
        self.skipped_samples = state.get("skipped_samples", 0)


class FailedSamples:
    """Counts the samples that an environment, a reward, a tool or a server spoilt, by kind, and
    their tokens. They are in no batch: to train on what they stand for (a reward of zero, say)
    would teach the failure.
    """

    def __init__(self) -> None:
        self.samples: Counter[str] = Counter()
        self.tokens = 0

    def add(self, failed: Sequence[tuple[str, int]]) -> None:
        """Adds (kind, length) of every failed sample of an episode."""
        self.samples.update(kind for kind, _ in failed)
        self.tokens += sum(length for _, length in failed)

    def stats(self) -> dict[str, float]:
        """failed_samples, and where there are any those of each kind, and their mean length."""
        count = self.samples.total()
        stats = {"failed_samples": float(count)}
        if count:
            stats |= {f"failed_samples/{kind}": float(n) for kind, n in self.samples.items()}
            stats["failed_samples/len_mean"] = self.tokens / count
        return stats

    def state_dict(self) -> dict[str, Any]:
        return {"samples": dict(self.samples), "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples, self.tokens = Counter(state["samples"]), state["tokens"]
