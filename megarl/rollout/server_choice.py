"""Chooses the server of a generation request.

An episode stays with its *home*, the server whose prefix cache holds its earlier turns, until that
server is lost or overloaded. Everything else goes where the fewest tokens are outstanding: those of
prompts, and those that answers are expected to bring. Requests differ in length by orders of
magnitude, so their number says little.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

LEARN = 1 / 64  # weight of the latest answer in the mean that tells how long the next will be


class State(Enum):
    """Says what a server gets; the value of each state is its meaning."""

    SERVING = "gets requests and control calls"
    JOINING = "paused; gets control calls, and requests once it serves the weights of an update"
    LOST = "gets nothing"


@dataclass(eq=False)
class Server:
    """Holds what the client knows of a server.

    address: host:port. outstanding: tokens of the requests under way, prompts and expected answers.
    silent: its last call got no answer. rests_until: the time (time.monotonic) until which it asked
    to be left alone. generating: the /generate calls. released: the parts of its memory that it has
    given back (ServerMemory), None where that is not known. empty: its weights were released and
    not updated since.
    """

    address: str
    state: State = State.SERVING
    outstanding: float = 0.0
    silent: bool = False
    rests_until: float = 0.0
    generating: set[asyncio.Future[Any]] = field(default_factory=set)
    released: frozenset[str] | None = frozenset()
    empty: bool = False

    @property
    def rests(self) -> bool:
        """Returns whether it asked to be left alone until later."""
        return self.rests_until > time.monotonic()


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


# of the episode, or of the session, that makes the requests; tasks that it starts inherit it
current_home: ContextVar[Home | None] = ContextVar("current_home", default=None)


class ServerChoice:
    """Chooses servers, and learns how long answers are.

    affinity: a home is overloaded where the tokens outstanding there exceed this many times those
        that the least loaded server would have with the request; 0 gives up homes.
    """

    def __init__(self, *, affinity: float) -> None:
        self._affinity = affinity
        self._share = 1.0  # of max_new_tokens that answers have taken
        self._next = 0

    def expected(self, prompts: int, budget: int) -> float:
        """Returns the tokens that a request brings: those of its prompts, and the part of its
        budget that answers have used lately."""
        return prompts + self._share * budget

    def learn(self, written: int, budget: int) -> None:
        """Notes the length of an answer that ended by itself, in tokens."""
        if budget > 0:
            self._share += LEARN * (written / budget - self._share)

    def pick(
        self,
        servers: Sequence[Server],
        tokens: float,
        *,
        home: Home | None = None,
        avoid: Sequence[str] = (),
    ) -> Server:
        """Returns the server for a request of `tokens`, and makes it the home. Those at addresses
        in `avoid`, which just failed, silent ones and resting ones come last; equals take turns."""
        n = len(servers)
        order = [servers[(self._next + i) % n] for i in range(n)]
        best = min(order, key=lambda s: (avoid.count(s.address), s.silent, s.rests, s.outstanding))
        if home is not None and self._affinity:
            wanted = home.first_choice
            for server in servers:
                if server.address == wanted and self._holds(server, best, tokens, avoid):
                    best = server
            home.settle(best.address)
        self._next = (servers.index(best) + 1) % n
        return best

    def _holds(self, home: Server, best: Server, tokens: float, avoid: Sequence[str]) -> bool:
        """Returns whether a home keeps its guest: it is as well as the best, not overloaded."""
        ailing = (avoid.count(home.address), home.silent, home.rests)
        if ailing > (avoid.count(best.address), best.silent, best.rests):
            return False
        return home.outstanding <= self._affinity * (best.outstanding + tokens)
