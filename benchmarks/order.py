"""Simulates asynchronous runs with long-tailed answers, by rollout.order and staleness bound.

    python benchmarks/order.py [--steps 150] [--batch 64] [--slots 128] [--seed 0] [--ahead 0.25]

Time is simulated; who may begin (StalenessManager) and which episodes make a batch (order.py) is
megarl's own code. An episode writes its tokens at a fixed rate in one of --slots slots, and the
trainer trains at another, chosen so that full slots write as many tokens per second as it trains.
"dropping" is what other systems do: batches are first come, as many episodes are in flight as the
bound allows, and what has grown too stale is discarded, running or finished, its prompt put at the
end of the queue. Prints a Markdown table.

--ahead: the share of the trainer's work that needs no gradient and could be done while it waits for
its batch, as a reference's logprobs: 1 of 4 passes beside an update. Prints by how much a trainer
that does so, as early as it has the time, is faster: the most that it can gain.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.rollout import order
from megarl.rollout.staleness import StalenessManager

POLICIES = ("submission", "completion", "dropping")
RATE = 50.0  # tokens per second of one episode
PROMPT, LUCK = 0.9, 0.6  # of the logarithm of a length: spread of prompts, and of their answers
MEDIAN, LONGEST = 1500, 16_000  # tokens


@dataclass(kw_only=True, eq=False)
class Episode:
    """Describes a simulated episode: `hard` is its prompt's median length, `length` its own, in
    tokens; `outcome` is accept, reject or fail."""

    number: int
    hard: float
    length: int
    outcome: str = "accept"
    began: int | None = None
    place: int | None = None


@dataclass(kw_only=True)
class Prompts:
    """Draws episodes without end; prompts that were put back come after `ahead` new ones."""

    rng: random.Random
    outcome: Callable[[random.Random], str] = lambda _: "accept"
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
    """Holds what a simulated run did: seconds in all and of the trainer's waits, the lengths that
    were trained, in batches, the staleness of every episode at its batch, and the counters."""

    seconds: float
    waited: float
    batches: list[list[int]]
    staleness: list[int]
    counters: dict[str, int]

    @property
    def lengths(self) -> list[int]:
        """The lengths that were trained, in tokens."""
        return [n for batch in self.batches for n in batch]


class Run:
    """Simulates a run of `steps` batches of `batch` episodes in `slots` slots, under the staleness
    bound `eta`. train_rate: tokens per second of the trainer. ends: nothing begins that no batch
    will take. ahead: the share of a step that the trainer may do while it waits. Raises
    RuntimeError where nothing can happen any more."""

    def __init__(
        self, policy: str, prompts: Prompts, *, eta: int, batch: int, slots: int, steps: int,
        train_rate: float, ends: bool = True, ahead: float = 0.0,
    ) -> None:  # fmt: skip
        self.policy, self.prompts, self.eta, self.batch = policy, prompts, eta, batch
        self.slots, self.steps, self.train_rate, self.ahead = slots, steps, train_rate, ahead
        self.staleness = StalenessManager(
            max_concurrent=slots, max_head_offpolicyness=eta, consumer_batch=batch,
            batches_left=steps if ends else None,
        )  # fmt: skip
        self.version, self.now = 0, 0.0
        self.live: list[Episode] = []  # in order of submission
        self._events: list[tuple[float, int, Episode | None]] = []  # None: the trainer is done
        self._ticks, self._places = itertools.count(), itertools.count()
        self._waits_since: float | None = 0.0
        self._result = Result(seconds=0, waited=0, batches=[], staleness=[], counters={})

    def finish(self) -> Result:
        """Simulates to the end of the last step."""
        while self.version < self.steps:
            self._begin()
            self._train()
            if not self._events:
                raise RuntimeError(f"stuck at version {self.version}: {self.staleness.counters()}")
            self.now, _, episode = heapq.heappop(self._events)
            if episode is None:
                self._update()
            elif any(episode is e for e in self.live):
                self._end(episode)
        result = self._result
        result.seconds, result.counters = self.now, self.staleness.counters()
        return result

    def _capacity(self) -> int:
        s = self.staleness
        if self.policy != "dropping":
            return s.capacity(self.version)
        room = min(s.max_concurrent - s.running, (self.eta + 1) * self.batch - len(self.live))
        needed = s.needed()
        return room if needed is None else min(room, needed)

    def _begin(self) -> None:
        while self._capacity() > 0:
            episode = self.prompts.draw()
            episode.began = self.version
            self.staleness.start()
            self.live.append(episode)
            self._at(self.now + episode.length / RATE, episode)

    def _end(self, episode: Episode) -> None:
        getattr(self.staleness, episode.outcome)()
        if episode.outcome == "accept":
            episode.place = next(self._places)
        else:
            self.live.remove(episode)

    def _train(self) -> None:
        taken = self._next()
        if self._waits_since is None or len(taken) < self.batch:
            return
        for episode in taken:
            self.live.remove(episode)
        self.staleness.hand_out(len(taken))
        self.staleness.check(in_flight=len(self.live))
        result, lengths = self._result, [e.length for e in taken]
        waited, seconds = self.now - self._waits_since, sum(lengths) / self.train_rate
        result.waited += waited
        result.batches.append(lengths)
        result.staleness += [self.version - (e.began or 0) for e in taken]
        self._waits_since = None
        self._at(self.now + seconds - min(waited, self.ahead * seconds), None)

    def _next(self) -> Sequence[Episode]:
        if self.policy == "submission":
            return order.head(self.live, self.batch)
        # a bound that is never reached: first come without a rule
        bound = self.eta if self.policy == "completion" else self.version + 1
        return order.first_come(self.live, self.batch, version=self.version, bound=bound)

    def _update(self) -> None:
        """Has the trainer's next version generate."""
        self.version, self._waits_since = self.version + 1, self.now
        self.staleness.check_version(self.version)
        stale = [e for e in self.live if self.staleness.is_stale(e.began, self.version)]
        for episode in stale:
            if self.policy != "dropping":
                raise RuntimeError(f"an episode of {episode.began} is alive at {self.version}")
            if episode.place is None:
                self.staleness.accept()  # so that the books know it
            self.staleness.drop()
            self.live.remove(episode)
            self.prompts.put_back(episode)

    def _at(self, time: float, episode: Episode | None) -> None:
        heapq.heappush(self._events, (time, next(self._ticks), episode))


def line(name: str, eta: int, result: Result) -> str:
    """Returns a row of the table."""
    lengths, seconds = result.lengths, result.seconds
    dropped = result.counters["dropped"] / (len(lengths) + result.counters["dropped"])
    cells = (
        name, str(eta), f"{seconds / 3600:.2f}", f"{sum(lengths) / seconds:,.0f}",
        f"{100 * result.waited / seconds:.0f} %", f"{statistics.fmean(lengths):,.0f}",
        f"{statistics.quantiles(lengths, n=20)[-1]:,.0f}", f"{100 * dropped:.1f} %",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def print_ahead(simulated: Callable[..., Result], share: float, rate: float) -> None:
    """Prints how much faster runs are whose trainer does a share of its work ahead, for trainers of
    a quarter of `rate`, once and twice it."""
    print("| staleness | trainer over servers | waits | faster with the share ahead |")
    print("| --- | --- | --- | --- |")
    for eta, speed in itertools.product((0, 1, 4), (0.25, 1.0, 2.0)):
        plain, ahead = (
            simulated("submission", eta=eta, train_rate=speed * rate, ahead=part)
            for part in (0.0, share)
        )
        waits = 100 * plain.waited / plain.seconds
        gain = 100 * (plain.seconds / ahead.seconds - 1)
        print(f"| {eta} | {speed:g} | {waits:.0f} % | {gain:.1f} % |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("steps", 150), ("batch", 64), ("slots", 128), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ahead", type=float, default=0.0)
    args = parser.parse_args()

    def simulated(policy: str, **how: Any) -> Result:
        run = Run(
            policy, Prompts(rng=random.Random(args.seed)), batch=args.batch, slots=args.slots,
            steps=args.steps, **how,
        )  # fmt: skip
        return run.finish()

    if args.ahead:
        return print_ahead(simulated, args.ahead, args.slots * RATE)
    prompts = Prompts(rng=random.Random(args.seed))
    sampled = [prompts.draw().length for _ in range(100_000)]
    print(
        f"Sampled lengths: mean {statistics.fmean(sampled):,.0f}, 95 % "
        f"{statistics.quantiles(sampled, n=20)[-1]:,.0f}, longest {max(sampled):,} tokens.\n"
    )
    print("| order | staleness | hours | tokens/s | waits | mean length | 95 % | dropped |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for eta, policy in itertools.product((0, 1, 2, 4), POLICIES):
        print(
            line(policy, eta, simulated(policy, eta=eta, train_rate=args.slots * RATE)), flush=True
        )


if __name__ == "__main__":
    main()
