"""Says what is known of the episode whose workflow runs: its server, the seeds of its requests, and
its answers, so that a run that is started again goes on with them.

Tasks that a workflow starts inherit its context. Code that an episode calls finds it here, so that
no signature carries it; outside of episodes there is none.

A workflow runs from its beginning after a resume. A request that it made before gets the tokens it
had then, and is continued if it had not ended. All answers are kept as they were at one moment, a
*cut*: when a pause had brought in every token written so far. Keeping what had ended, and not the
beginnings of the rest, would favour short answers.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megarl.rollout.loop_thread import PauseClock

if TYPE_CHECKING:
    from megarl.rollout.generation import Sample


@dataclass(eq=False)
class Home:
    """Remembers the address of the server that somebody's requests go to, None before the first.

    near: whose home it begins at, as the sessions of a group begin where the group's prompt is.
    """

    address: str | None = None
    near: Home | None = None

    @property
    def first_choice(self) -> str | None:
        """Returns the address to prefer."""
        if self.address is None and self.near is not None:
            return self.near.first_choice
        return self.address

    def settle(self, address: str) -> None:
        """Makes a server the home, and that of the group where it has none yet."""
        self.address = address
        if self.near is not None and self.near.first_choice is None:
            self.near.settle(address)


@dataclass(kw_only=True, eq=False)
class EpisodeContext:
    """Describes one run of an episode's workflow.

    number: the episode's; None for requests outside of episodes.
    attempt: how often the workflow has run before, because rollouts failed.
    admitted: the version of the weights at the episode's admission, which a resume does not change:
        seeds go by it, so that an episode that goes on asks for the same again.
    began: the version at which this run began, whose KV its requests may go on with.
    clock: which its time-outs go by: it stands still in pauses.
    home: the server of its requests. answers: of its requests, where they are kept for a resume.
    notes: to which its rollouts add the texts of their rewards. routes: whether its answers carry
        routes, where the client asks servers for them.
    """

    number: int | None = None
    attempt: int = 0
    admitted: int | None = None
    began: int | None = None
    clock: PauseClock = field(default_factory=PauseClock)
    home: Home | None = None
    answers: AnswerLog | None = None
    notes: list[dict[str, Any]] = field(default_factory=list)
    routes: bool = True
    _samples: Counter[bytes] = field(default_factory=Counter)  # by a digest of their prompt

    def seed(self, *key: object, prompt: Sequence[int], version: int) -> int:
        """Returns the seed of a request that brings none. Each sample of a prompt has another.

        version: of the weights now, for requests outside of episodes."""
        digest = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=16).digest()
        self._samples[digest] += 1
        admitted = version if self.admitted is None else self.admitted
        number = () if self.number is None else (self.number,)
        again = (self.attempt,) if self.attempt else ()
        return stable_seed(
            *key, admitted, *number, tuple(prompt), self._samples[digest] - 1, *again
        )


current_episode: ContextVar[EpisodeContext | None] = ContextVar("current_episode", default=None)


def seed_version(now: int) -> int:
    """Returns the version that keys the seeds of this episode, that of its admission; `now` outside
    of an episode."""
    episode = current_episode.get()
    return now if episode is None or episode.admitted is None else episode.admitted


def attempt_key() -> tuple[int, ...]:
    """Returns the part of a seed's key that tells rollouts made anew from those that failed."""
    episode = current_episode.get()
    return (episode.attempt,) if episode is not None and episode.attempt else ()


def pause_clock() -> PauseClock:
    """Returns the clock of this episode; outside of an episode one that never stands still."""
    episode = current_episode.get()
    return PauseClock() if episode is None else episode.clock


def stable_seed(*key: object) -> int:
    """Returns a 31-bit seed of the key's values, the same in every process and run."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 33


# request (a digest), tokens, logprobs, versions (tensors), stop_reason, perhaps routes (a tensor);
# admitted, of its episode
Answer = dict[str, Any]
News = list[Answer | int]  # an integer for one that has not changed
Kept = list[tuple[Any, list[Answer]]]  # of each episode, the row's id and its answers
_TENSORS = ("tokens", "logprobs", "versions")


class AnswerLog:
    """Holds the answers of one episode. `kept`: those of the same episode before a resume.
    `admitted`: the version at the start of the episode, which keys its seeds and so its requests.

    An episode that another process runs has a log in both: `hear` takes in here what `news` returns
    there.
    """

    def __init__(self, kept: Iterable[Answer] = ()) -> None:
        self.kept = list(kept)
        self.admitted: int | None = next((a.get("admitted") for a in self.kept), None)
        self._kept = self.kept  # that no request of this process has asked for yet
        self._requests: list[_Request] = []
        self._cut: list[tuple[_Request, int, str]] = []  # with length and stop reason
        self._kept_at_cut = self._kept
        self._told: list[_Mark] | None = None  # of the last news

    def begin(self, sample: Sample) -> None:
        """Takes note of a sample before its first request. Where an answer to the same request
        (prompt, seed, sampling parameters) is kept, the sample begins with it."""
        request = _Request(sample)
        for answer in self._kept:
            if answer["request"] == request.key:
                self._kept = [a for a in self._kept if a is not answer]
                request.origin = answer
                response = sample.response
                response.output_tokens = answer["tokens"].tolist()
                response.output_logprobs = answer["logprobs"].tolist()
                response.output_versions = answer["versions"].tolist()
                response.stop_reason = answer["stop_reason"]
                if sample.routes is not None:
                    sample.routes.begin_with(answer.get("routes"), response.output_len)
                    response.routed_experts = sample.routes.known
                break
        self._requests.append(request)

    @property
    def tokens(self) -> int:
        """Returns how many tokens the answers have so far."""
        return sum(request.progress()[0] for request in self._requests)

    def end(self) -> None:
        """Notes that the episode has ended: its answers do not change any more."""
        for request in self._requests:
            request.compact()

    def oldest_kept(self) -> int | None:
        """Returns the oldest version of the tokens of before a resume that no request has asked for
        yet; None where there are none."""
        versions = [int(a["versions"].min()) for a in self._kept if len(a["versions"])]
        return min(versions, default=None)

    def cut(self) -> None:
        """Notes how far every answer is."""
        self._cut = [(r, *r.progress()) for r in self._requests]
        self._kept_at_cut = self._kept

    def state(self) -> list[Answer]:
        """Returns the answers as of the last cut, but those without a token; plain data."""
        answers = [request.upto(n, reason) for request, n, reason in self._cut if n]
        return [a | {"admitted": self.admitted} for a in self._kept_at_cut + answers]

    def news(self) -> News:
        """Returns the answers as they are, but those without a token; plain data. In place of one
        that is as it was at the last call stands its place in what that returned; at the first
        call, its place in `kept`."""
        told = map(_mark, self.kept) if self._told is None else self._told
        places = {mark: i for i, mark in enumerate(told)}
        news: News = [places.get(_mark(a), a) for a in self._kept]
        requests = [request for request in self._requests if request.progress()[0]]
        for request in requests:
            place = places.get(request.mark())
            news.append(request.whole() if place is None else place)
        self._told = [*map(_mark, self._kept), *(request.mark() for request in requests)]
        return news

    def hear(self, news: News) -> None:
        """Takes in the `news` of the log in the process that runs the episode."""
        self._kept = [self._kept[a] if isinstance(a, int) else a for a in news]


_Mark = tuple[int, int, str, int]  # tells whether an answer has changed


def _mark(answer: Answer) -> _Mark:
    routes = answer.get("routes", ())
    return id(answer), len(answer["tokens"]), answer["stop_reason"], len(routes)


class _Request:
    """Holds a request's answer: in a sample that grows, and as tensors after its end. origin: the
    answer of before a resume that it began with."""

    def __init__(self, sample: Sample) -> None:
        self.key = _digest(sample)
        self.origin: Answer | None = None
        self._sample: Sample | None = sample
        self._answer: Answer = {}

    def progress(self) -> tuple[int, str]:
        """Returns the tokens there are, and the stop reason ("" while it goes on)."""
        if self._sample is not None:
            return self._sample.response.output_len, self._sample.response.stop_reason
        return len(self._answer["tokens"]), self._answer["stop_reason"]

    def mark(self) -> _Mark:
        """Returns what is another after every change, and is that of its origin before the
        first."""
        if self._sample is not None:
            routes = self._sample.response.routed_experts
        else:
            routes = self._answer.get("routes")
        origin = id(self if self.origin is None else self.origin)
        return origin, *self.progress(), 0 if routes is None else len(routes)

    def compact(self) -> None:
        """Keeps the answer in 12 bytes per token, routes apart, from now on."""
        self._answer, self._sample = self.whole(), None

    def whole(self) -> Answer:
        """Returns the answer as it is."""
        if self._sample is None:
            return self._answer
        response = self._sample.response
        whole = {
            "request": self.key,
            "stop_reason": response.stop_reason,
            "tokens": torch.tensor(response.output_tokens, dtype=torch.int32),
            "logprobs": torch.tensor(response.output_logprobs, dtype=torch.float32),
            "versions": torch.tensor(response.output_versions, dtype=torch.int32),
        }
        routes = response.routed_experts
        return whole if routes is None else whole | {"routes": routes.clone()}

    def upto(self, n: int, stop_reason: str) -> Answer:
        """Returns the first `n` tokens of the answer, and its routes without those of the
        others."""
        whole = self.whole()
        lengths = dict.fromkeys(_TENSORS, n)
        if "routes" in whole:
            later = len(whole["tokens"]) - n
            lengths["routes"] = max(0, len(whole["routes"]) - later)
        parts = {name: whole[name][:length].clone() for name, length in lengths.items()}
        return whole | parts | {"stop_reason": stop_reason}


def take_log(kept: Kept, row: dict[str, Any]) -> AnswerLog:
    """Returns the log of an episode of `row` that begins, with the answers that are `kept` for it,
    and takes them out. Episodes of one row come in their order."""
    for i, (row_id, answers) in enumerate(kept):
        if row_id == row.get("row_id"):
            del kept[i]
            return AnswerLog(answers)
    return AnswerLog()


def _digest(sample: Sample) -> str:
    """Returns a digest of all that the distribution of a sample's answer depends on."""
    key = (list(sample.request.input_ids), sample.seed, sample.request.gconfig)
    return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()
