"""Simulates asynchronous runs with long-tailed answers, by rollout.order and staleness bound.

Time is simulated; who may begin and which episodes make a batch (staleness.py) is megarl's own
code. An episode writes its tokens at a fixed rate in one of `slots` slots, and the
trainer trains at another. "dropping" is what other systems do: batches are first come, as many
episodes are in flight as the bound allows, and what has grown too stale is discarded, running or
finished, its prompt put at the end of the queue.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megarl.rollout.episodes import NEXT, State
from megarl.rollout.staleness import Admission, first_come, head

RATE = 50.0  # tokens per second of one episode
PROMPT, LUCK = 0.9, 0.6  # of the logarithm of a length: spread of prompts, and of their answers
MEDIAN, LONGEST = 1500, 16_000  # tokens


@dataclass(kw_only=True, eq=False)
class Episode:
    """Describes a simulated episode: `hard` is its prompt's median length, `length` its own, in
    tokens; `outcome` is ready, rejected or broken."""

    number: int
    hard: float
    length: int
    outcome: State = State.READY
    began: int | None = None
    place: int | None = None


@dataclass(kw_only=True)
class Prompts:
    """Draws episodes without end; prompts that were put back come after `ahead` new ones."""

    rng: random.Random
    outcome: Callable[[random.Random], State] = lambda _: State.READY
    ahead: int = 256
    back: deque[tuple[int, float]] = field(default_factory=deque)
    drawn: int = 0

    def draw(self) -> Episode:
        """Returns an episode of the prompt that is due again, else of a new one."""
        if self.back and self.back[0][0] <= self.drawn:
            hard = self.back.popleft()[1]
        else:
            hard = MEDIAN * self.rng.lognormvariate(0, PROMPT)
        length = min(LONGEST, max(1, round(hard * self.rng.lognormvariate(0, LUCK))))
        self.drawn += 1
        outcome = self.outcome(self.rng)
        return Episode(number=self.drawn, hard=hard, length=length, outcome=outcome)

    def put_back(self, episode: Episode) -> None:
        """Queues the episode's prompt again."""
        self.back.append((self.drawn + self.ahead, episode.hard))


@dataclass(kw_only=True)
class Result:
    """Holds what a simulated run did: the lengths that were trained, in batches, the staleness of
    every episode at its batch, and the counts."""

    batches: list[list[int]]
    staleness: list[int]
    counts: Mapping[State, int]


class Run:
    """Simulates a run of `steps` batches of `batch` episodes in `slots` slots, under the staleness
    bound `eta`. train_rate: tokens per second of the trainer. ends: nothing begins that no batch
    will take. Raises RuntimeError where nothing can happen any more."""

    def __init__(
        self, policy: str, prompts: Prompts, *, eta: int, batch: int, slots: int, steps: int,
        train_rate: float, ends: bool = True,
    ) -> None:  # fmt: skip
        self.policy, self.prompts, self.eta, self.batch = policy, prompts, eta, batch
        self.slots, self.steps, self.train_rate = slots, steps, train_rate
        self.admission = Admission(
            max_concurrent=slots, max_head_offpolicyness=eta, batch=batch,
            batches_left=steps if ends else None,
        )  # fmt: skip
        self.counts: Counter[State] = Counter()
        self.version, self.now = 0, 0.0
        self.live: list[Episode] = []  # in order of submission
        self._events: list[tuple[float, int, Episode | None]] = []  # None: the trainer is done
        self._ticks, self._places = itertools.count(), itertools.count()
        self._waits = True
        self._result = Result(batches=[], staleness=[], counts={})

    def finish(self) -> Result:
        """Simulates to the end of the last step."""
        while self.version < self.steps:
            self._begin()
            self._train()
            if not self._events:
                raise RuntimeError(f"stuck at version {self.version}: {self.counts}")
            self.now, _, episode = heapq.heappop(self._events)
            if episode is None:
                self._update()
            elif any(episode is e for e in self.live):
                self._end(episode)
        result = self._result
        result.counts = self.counts
        return result

    def _capacity(self) -> int:
        a, running = self.admission, self.counts[State.RUNNING]
        if self.policy != "dropping":
            return a.capacity(self.version, self.counts)
        room = min(a.max_concurrent - running, (self.eta + 1) * self.batch - len(self.live))
        needed = a.needed(self.counts)
        return room if needed is None else min(room, needed)

    def _begin(self) -> None:
        while self._capacity() > 0:
            episode = self.prompts.draw()
            episode.began = self.version
            self.counts[State.RUNNING] += 1
            self.live.append(episode)
            self._at(self.now + episode.length / RATE, episode)

    def _end(self, episode: Episode) -> None:
        self._move(State.RUNNING, episode.outcome)
        if episode.outcome is State.READY:
            episode.place = next(self._places)
        else:
            self.live.remove(episode)

    def _train(self) -> None:
        taken = self._next()
        if not self._waits or len(taken) < self.batch:
            return
        for episode in taken:
            self.live.remove(episode)
            self._move(State.READY, State.TAKEN)
        if self.admission.batches_left is not None:
            self.admission.batches_left -= 1
        in_flight = self.counts[State.RUNNING] + self.counts[State.READY]
        assert in_flight == len(self.live), (self.counts, len(self.live))
        result, lengths = self._result, [e.length for e in taken]
        result.batches.append(lengths)
        result.staleness += [self.version - (e.began or 0) for e in taken]
        self._waits = False
        self._at(self.now + sum(lengths) / self.train_rate, None)

    def _next(self) -> Sequence[Episode]:
        if self.policy == "submission":
            return head(self.live, self.batch)
        # a bound that is never reached: first come without a rule
        bound = self.eta if self.policy == "completion" else self.version + 1
        return first_come(self.live, self.batch, version=self.version, bound=bound)

    def _update(self) -> None:
        """Has the trainer's next version generate."""
        self.version, self._waits = self.version + 1, True
        self.admission.check_version(self.version, self.counts)
        stale = [e for e in self.live if self.admission.is_stale(e.began, self.version)]
        for episode in stale:
            if self.policy != "dropping":
                raise RuntimeError(f"an episode of {episode.began} is alive at {self.version}")
            if episode.place is None:
                self._move(State.RUNNING, State.READY)  # so that the books know it
            self._move(State.READY, State.DROPPED)
            self.live.remove(episode)
            self.prompts.put_back(episode)

    def _move(self, at: State, to: State) -> None:
        assert to in NEXT[at] and self.counts[at] > 0, (at, to, self.counts)
        self.counts[at] -= 1
        self.counts[to] += 1

    def _at(self, time: float, episode: Episode | None) -> None:
        heapq.heappush(self._events, (time, next(self._ticks), episode))
