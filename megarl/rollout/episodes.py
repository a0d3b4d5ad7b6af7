"""Holds a run's episodes: the rows they are of, where each one is, what was trained, what failed.

Every episode is in one state, and every count is a count of states, so they cannot disagree.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from megarl.api.batch import Padded
from megarl.api.inference import RolloutWorkflow
from megarl.rollout.episode_context import AnswerLog, Kept, take_log

MAX_DROPS = 8  # of one row in a row, as too stale: more is a workflow that returns old tokens
LATEST = 256  # rollouts that a rate of failures is measured on
ENOUGH = 64  # rollouts before it says anything
MAX_REJECTED_BATCHES = 64  # batches' worth of groups in a row, then a wait for a batch gives up

Row = dict[str, Any]
ShouldAccept = Callable[[Padded], bool]
Failed = tuple[str, int]  # kind and length in tokens of a rollout that failed


class State(Enum):
    """Says where an episode is: from TAKEN on, at its end.

    ready: accepted, for a batch to come; broken: it ended with an error that nobody was told of;
    taken: a batch has it; failed: its error was raised; dropped: it was too stale. A value that is
    the name of a metric is that of its count.
    """

    WAITING, RUNNING, READY, BROKEN = "pending", "running", "ready", "broken"
    TAKEN, REJECTED, FAILED, DROPPED = "accepted", "rejected", "failed", "dropped"


@dataclass(kw_only=True, eq=False)
class Episode:
    """Describes an episode, which ends with `batch` (accepted), `error` (failed) or neither
    (rejected).

    number: place in the order of submission, unique in a run, also over resumes; episodes.Episodes
        gives it.
    state: where it is, which Episodes alone changes.
    drawn: the row came from prepare_batch's dataloader.
    drops: how often in a row its samples were too stale.
    may_fail: whether it may overrun its time: another row takes its place, or the batch goes
        without it. Else that is an error.
    failed: kind and length of rollouts that are not in `batch` because something failed.
    lost: their samples, as far as the workflow returned them; but for the ids, of any content.
    good: how many rollouts did not fail, whether they are in `batch` or were rejected.
    retried: how many of these were made anew in place of failed ones.
    missing: how many rollouts it ended without, because they failed and were not made anew.
    notes: {"rollout": its number in `batch`, name: text} of every reward that came with texts, such
        as a judge's, in the order of scoring; -1 where it is not in the batch.
    rewards: of these, once the episode has ended, one for each rollout.
    began: the oldest version that its tokens may be of: that of its start, or of answers that are
        kept; None before it begins.
    admitted: the version at its start, before a resume too, which keys its seeds.
    place: place in the order of completion, None until it is counted as accepted.
    answers: of its requests, where they are kept for a resume.
    vocab_size: the model's, where it is known; no sample may have a token beyond it.
    wanted_by: the function of a consumer that accepted it, too.
    latency: seconds from start to end.
    oldest: the version of the oldest trained token of `batch`; None where there is none.
    routes: whether its answers carry routes, where the client asks servers for them.
    """

    row: dict[str, Any]
    workflow: RolloutWorkflow
    number: int = -1
    state: State = State.WAITING
    should_accept: ShouldAccept | None = None
    drawn: bool = False
    drops: int = 0
    may_fail: bool = False
    batch: Padded | None = None
    failed: Sequence[Failed] = ()
    lost: Sequence[Padded] = ()
    good: int = 0
    retried: int = 0
    missing: int = 0
    notes: list[dict[str, Any]] = field(default_factory=list)
    rewards: Sequence[float] = ()
    began: int | None = None
    admitted: int | None = None
    place: int | None = None
    wanted_by: ShouldAccept | None = None
    vocab_size: int | None = None
    error: BaseException | None = None
    latency: float = 0.0
    oldest: int | None = None
    routes: bool = True
    answers: AnswerLog | None = None

    @property
    def name(self) -> str:
        """Returns how messages name the episode: by its row's id."""
        return f"row {self.row.get('row_id', '?')}"

    def begin(self, version: int) -> None:
        """Notes the version of the weights under which it begins."""
        self.began = version if self.began is None else min(self.began, version)
        if self.admitted is None:
            self.admitted = version
        if self.answers is not None:
            self.answers.admitted = self.admitted

    def again(self, version: int, bound: int) -> Episode:
        """Returns an episode of the same row, for one that was too stale at `version` under the
        staleness bound. Raises RuntimeError where that was MAX_DROPS times in a row."""
        if self.drops + 1 == MAX_DROPS:  # begun anew under newer weights every time
            raise RuntimeError(
                f"{self.name} was dropped {MAX_DROPS} times in a row: at version {version} "
                f"{type(self.workflow).__name__} returned trained tokens of version {self.oldest}, "
                f"which rollout.max_head_offpolicyness={bound} is too low for; give tokens the "
                "output_versions of the response that brought them, or raise the bound"
            )
        return Episode(
            row=self.row,
            workflow=self.workflow,
            should_accept=self.should_accept,
            drawn=self.drawn,
            drops=self.drops + 1,
            may_fail=self.drawn,
        )


# brings an episode to its end, in this process or another
Runner = Callable[[Episode], Awaitable[None]]

NEXT = {
    State.WAITING: (State.RUNNING,),
    State.RUNNING: (State.READY, State.REJECTED, State.BROKEN),
    State.READY: (State.TAKEN, State.REJECTED, State.DROPPED),
    State.BROKEN: (State.FAILED,),
}
ENDED = tuple(state for state in State if state not in NEXT)
# metric -> the name of its count in checkpoints
_TRAINED = {
    "trained": "episodes",
    "trained_samples": "samples",
    "skipped": "skipped_episodes",
    "skipped_samples": "skipped_samples",
}


class AccountingError(AssertionError):
    """Says that the books do not balance, which is a fault in the code."""


class Outcome(NamedTuple):
    """Holds a row, and the rewards of its rollouts that did not fail, whether they were accepted
    or rejected."""

    row: Row
    rewards: Sequence[float]


class Episodes:
    """Holds the episodes that no batch has taken, in order of submission, and counts all others.

    changed: guards everything; whoever calls has it, but for `cut` and `answers`.
    live: by number, in order of submission. waiting: those of them that have not begun.
    counts: of all episodes, by their states.
    reserved: numbers, which seeds are keyed by, of rows that a resumed run submits again.
    keeps_answers: whether drawn rows keep their answers, for a resume.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.live: dict[int, Episode] = {}
        self.waiting: deque[Episode] = deque()
        self.counts: Counter[State] = Counter()
        self.reserved: deque[int] = deque()
        self.keeps_answers = False
        self._kept: Kept = []  # of before a resume
        self._ended: list[Episode] = []  # with answers, under these weights
        self._next_number = 0
        self._places = itertools.count()
        self._outcomes: dict[int, Outcome] = {}  # of drawn rows that ended, until they are told
        self._rejected: set[int] = set()  # of these; a resumed run makes the others again
        self._untrained: dict[int, int] = {}  # of the last batch -> samples that did not fail
        self._trained = dict.fromkeys(_TRAINED, 0)

    # -- states

    def add(self, episode: Episode) -> None:
        """Numbers an episode and adds it at the end of the order of submission."""
        again = episode.drawn and not episode.drops and self.reserved
        episode.number = self.reserved.popleft() if again else self._next_number
        self._next_number = max(self._next_number, episode.number + 1)
        if episode.drawn and self.keeps_answers:
            episode.answers = AnswerLog() if episode.drops else take_log(self._kept, episode.row)
            episode.began = episode.answers.oldest_kept()
            episode.admitted = episode.answers.admitted
        self.live[episode.number] = episode
        self.waiting.append(episode)
        self.counts[episode.state] += 1

    def move(self, episode: Episode, to: State) -> None:
        """Moves an episode on. Raises AccountingError where it cannot go there."""
        if to not in NEXT.get(episode.state, ()) or episode.number not in self.live:
            raise AccountingError(
                f"rollout accounting is wrong, please report it: episode {episode.number} is "
                f"{episode.state.value} and cannot become {to.value}"
            )
        if episode.state is State.RUNNING and episode.drawn:
            self._outcomes[episode.number] = Outcome(episode.row, episode.rewards)
        if to is State.REJECTED and episode.number in self._outcomes:
            self._rejected.add(episode.number)
        if episode.state is State.WAITING:
            self.waiting.remove(episode)
        self.counts[episode.state] -= 1
        self.counts[to] += 1
        episode.state = to
        if to is State.READY:
            episode.place = next(self._places)
        if to in NEXT:
            return
        del self.live[episode.number]
        if to in (State.TAKEN, State.REJECTED) and episode.answers is not None:
            self._ended.append(replace(episode, batch=None, lost=()))

    def take(self, batch: Sequence[Episode]) -> None:
        """Moves the episodes of a batch to the consumer."""
        for episode in batch:
            self.move(episode, State.TAKEN)
        self._untrained = {e.number: len(e.batch["input_ids"]) for e in batch if e.batch}

    def counters(self) -> dict[str, int]:
        """Returns the counts of episodes that have begun, by the names of metrics."""
        begun = {"running": self.counts[State.RUNNING]} | self._ended_counts()
        begun["accepted"] += self.counts[State.READY]
        begun["failed"] += self.counts[State.BROKEN]
        return {"submitted": sum(begun.values())} | begun

    def _ended_counts(self) -> dict[str, int]:
        return {state.value: self.counts[state] for state in ENDED}

    def stats(self) -> dict[str, int]:
        """Returns `counters`, and what became of the episodes that batches took."""
        taken, waiting = self.counts[State.TAKEN], self.counts[State.WAITING]
        return self.counters() | self._trained | {"handed_out": taken, "pending": waiting}

    # -- samples of the last batch

    def train(self, samples: Mapping[int, int], skipped: Mapping[int, int]) -> None:
        """Books samples as trained, but those `skipped`, by episode. Raises AccountingError unless
        they are all of the last batch that did not fail, and all batches before were booked."""
        if dict(samples) != self._untrained:
            wrong = sorted(set(samples.items()) ^ set(self._untrained.items()))
            raise AccountingError(f"other samples were trained: (episode, samples) {wrong}")
        for number, count in samples.items():
            left_out = skipped.get(number, 0)
            self._trained["skipped_samples"] += left_out
            self._trained["trained_samples"] += count - left_out
            self._trained["skipped" if left_out == count else "trained"] += 1
        self._untrained = {}
        self._check_trained()

    def _check_trained(self) -> None:
        taken = self.counts[State.TAKEN]
        trained, skipped = self._trained["trained"], self._trained["skipped"]
        if trained + skipped not in (0, taken):  # 0: the consumer does not report
            raise AccountingError(
                f"{taken} episodes were handed out, but {trained} trained and {skipped} skipped"
            )

    def lose(self, samples: Mapping[int, int]) -> None:
        """Books samples that left the batch because something failed for them, by episode. One that
        has no others counts as skipped. Raises AccountingError for more than an episode has."""
        for number, count in samples.items():
            left = self._untrained.get(number, 0) - count
            if left < 0:
                raise AccountingError(f"episode {number}: {count} samples failed, it has fewer")
            self._untrained[number] = left
            if not left:
                del self._untrained[number]
                self._trained["skipped"] += 1

    # -- outcomes

    def tell(self, last: int) -> list[Outcome]:
        """Returns what was not told yet of the episodes up to number `last`, in order of
        submission: with rollout.order=submission every batch tells the same, whichever ended
        first."""
        numbers = sorted(n for n in self._outcomes if n <= last)
        self._rejected.difference_update(numbers)
        return [self._outcomes.pop(n) for n in numbers]

    # -- resumes

    def version_changed(self) -> None:
        """Forgets the answers of episodes that ended under earlier weights."""
        self._ended.clear()

    def cut(self) -> None:
        """Notes all answers as they are. Generation is paused and no answer is on its way."""
        with self.changed:
            for episode in self._answering():
                assert episode.answers is not None
                episode.answers.cut()

    def answers(self) -> Kept:
        """Returns the answers as of the last cut of every episode that was in flight since the last
        change of the weights, in order: a run that starts again from those weights makes these
        episodes again."""
        with self.changed:
            return _answers(self._answering())

    def _answering(self) -> list[Episode]:
        both = [*self._ended, *self.live.values()]
        return sorted((e for e in both if e.answers is not None), key=number_of)

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts and, in `rows`, the drawn rows in flight in their order. They are
        submitted again after a resume, so they count as not submitted yet; so do failures that
        nobody has been told of. numbers: those they keep. It is plain data."""
        self._check_trained()
        again = sorted((e for e in self.live.values() if e.drawn), key=number_of)
        rejected = (self._outcomes[number] for number in sorted(self._rejected))
        counts = self._ended_counts()
        return {
            "rows": [e.row for e in again],
            "numbers": [*map(number_of, again), *self.reserved],
            "answers": _answers(again),
            "next_number": self._next_number,
            "outcomes": [(outcome.row, list(outcome.rewards)) for outcome in rejected],
            "counters": counts | {"submitted": sum(counts.values())},
            "accounting": {name: self._trained[key] for key, name in _TRAINED.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; its `rows` are for the caller to submit."""
        self.counts = Counter({ended: state["counters"][ended.value] for ended in ENDED})
        self._trained = {key: state["accounting"][name] for key, name in _TRAINED.items()}
        self._next_number = state["next_number"]
        self.reserved = deque(state["numbers"][: len(state["rows"])])  # no rows of other data
        self._kept = list(state["answers"])
        # they are told first; episodes that are made again take numbers that these had, too
        earlier = state.get("outcomes", ())
        self._outcomes = {i - len(earlier): Outcome(*one) for i, one in enumerate(earlier)}
        self._rejected = set(self._outcomes)


def number_of(episode: Episode) -> int:
    """Returns the episode's place in the order of submission."""
    return episode.number


def _answers(episodes: Iterable[Episode]) -> Kept:
    return [(e.row.get("row_id"), e.answers.state()) for e in episodes if e.answers is not None]


def by_kind(failed: Sequence[Failed]) -> str:
    """Returns how many rollouts failed of each kind, in words, the most frequent first."""
    return ", ".join(f"{n} {kind}" for kind, n in Counter(k for k, _ in failed).most_common())


class Failures:
    """Counts the rollouts that an environment, a reward, a tool or a server spoilt, by kind, and
    watches which part of the latest failed; one with several rows counts once. No batch has them:
    to train on a substitute (a reward of zero, say) would teach the failure.

    kinds: of rollouts whose episodes batches took, or that were rejected. rejected_in_a_row: groups
        since the last that was accepted.
    """

    def __init__(self, bound: float) -> None:
        """Takes rollout.max_failure_rate."""
        self.kinds: Counter[str] = Counter()
        self._tokens = self._retried = self.rejected_in_a_row = 0
        self._bound = bound
        self._latest: deque[Failed | None] = deque(maxlen=LATEST)  # None did not fail

    def add(self, failed: Sequence[Failed], retried: int = 0) -> None:
        """Counts (kind, length in tokens) of every failed rollout of an episode, and how many were
        made anew."""
        self.kinds.update(kind for kind, _ in failed)
        self._tokens += sum(length for _, length in failed)
        self._retried += retried

    def watch(self, episode: Episode) -> None:
        """Takes an episode that has ended into the rate, and into the groups rejected in a row."""
        self._latest.extend(episode.failed)
        self._latest.extend([None] * episode.good)
        if episode.batch is not None:
            self.rejected_in_a_row = 0
        elif episode.error is None:
            self.rejected_in_a_row += 1

    def check(self) -> None:
        """Raises RuntimeError where more than the bound failed; the first few are no measure."""
        failed, seen = [f for f in self._latest if f is not None], len(self._latest)
        if seen < ENOUGH or len(failed) <= self._bound * seen:
            return
        raise RuntimeError(
            f"{len(failed)} of the latest {seen} rollouts failed ({by_kind(failed)}), more than "
            f"rollout.max_failure_rate={self._bound:g}: fix what fails (the log shows it), or "
            "raise the bound"
        )

    def check_signal(self, batch_size: int) -> None:
        """Raises RuntimeError where MAX_REJECTED_BATCHES batches in a row were rejected."""
        if self.rejected_in_a_row >= MAX_REJECTED_BATCHES * batch_size:
            kinds = ", ".join(f"{n} {kind}" for kind, n in self.kinds.items())
            raise RuntimeError(
                f"{self.rejected_in_a_row} groups in a row were rejected: nothing to train on; "
                "check the reward and should_accept (actor.dynamic_sampling)"
                + (f"; samples that failed in this run: {kinds}" if kinds else "")
            )

    def stats(self) -> dict[str, float]:
        """Returns failed_samples, retried_samples, and where there are any failed_samples/<kind>
        and failed_samples/len_mean, in tokens."""
        count = self.kinds.total()
        stats = {"failed_samples": float(count), "retried_samples": float(self._retried)}
        if count:
            stats |= {f"failed_samples/{kind}": float(n) for kind, n in self.kinds.items()}
            stats["failed_samples/len_mean"] = self._tokens / count
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts for a checkpoint."""
        return {"samples": dict(self.kinds), "tokens": self._tokens, "retried": self._retried}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the counts of `state_dict`."""
        self.kinds, self._tokens = Counter(state["samples"]), state["tokens"]
        self._retried = state.get("retried", 0)  # an earlier checkpoint has none


class RowStream:
    """Feeds rows to prepare_batch: one endless stream over the epochs of a dataloader.

    first: rows to hand out before any is drawn (those a resumed run had not consumed).
    """

    def __init__(self, *, first: Sequence[Row] = ()) -> None:
        self._rows: deque[Row] = deque(first)
        self._loader: Iterable[list[Row]] | None = None
        self._epoch: Iterator[list[Row]] = iter(())
        self._drawn = False  # whether the dataloader has yielded a batch
        self.batch_size = 0

    @property
    def buffered(self) -> list[Row]:
        """Returns the rows that were drawn but not handed out."""
        return list(self._rows)

    def attach(self, loader: Iterable[list[Row]]) -> None:
        """Sets the dataloader; `batch_size` is its own, or its first batch's. Raises ValueError
        for another dataloader after the first one has yielded a batch."""
        if loader is self._loader:
            return
        if self._drawn:
            raise ValueError(
                "prepare_batch was called with another dataloader: its rows in flight would mix; "
                "use one client per dataloader, and rollout_batch for evaluation"
            )
        self._loader, self._epoch = loader, iter(())
        size = getattr(loader, "batch_size", None)
        if size is None:
            rows = self._next_batch()
            self._rows.extend(rows)
            size = len(rows)
        self.batch_size = int(size)

    def next_row(self) -> Row:
        """Returns the next row. Raises ValueError where the dataloader yields no batch, or no lists
        of rows."""
        if not self._rows:
            self._rows.extend(self._next_batch())
        return self._rows.popleft()

    def _next_batch(self) -> list[Row]:
        """Returns the dataloader's next batch, epoch after epoch. After an error of the dataloader
        it goes on where that does."""
        assert self._loader is not None, "next_row comes after attach"
        for _ in range(3):  # what is left of an epoch, then two whole ones
            for rows in self._epoch:
                if isinstance(rows, Mapping):
                    raise ValueError(
                        "prepare_batch: the dataloader yields single rows, and a batch of rows is "
                        "needed: give it batch_size and collate_fn=list; a list of rows is for "
                        "rollout_batch"
                    )
                if rows:
                    self._drawn = True
                    return rows
            self._epoch = iter(self._loader)
        raise ValueError("the dataloader yields no batch: fewer rows than batch_size?")
