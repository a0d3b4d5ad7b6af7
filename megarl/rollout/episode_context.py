"""Says what is known of the episode whose workflow runs, and makes the seeds of its requests.

Tasks that a workflow starts inherit its context. Code that an episode calls finds it here, so that
no signature carries it; outside of episodes there is none.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.rollout.answers import AnswerLog


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
    home: the server of its requests. answers: of its requests, where they are kept for a resume.
    notes: to which its rollouts add the texts of their rewards. routes: whether its answers carry
        routes, where the client asks servers for them.
    """

    number: int | None = None
    attempt: int = 0
    admitted: int | None = None
    began: int | None = None
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


def stable_seed(*key: object) -> int:
    """Returns a 31-bit seed of the key's values, the same in every process and run."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 33
