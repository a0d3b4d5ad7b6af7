"""Gathers the workers of a group as they start, and gives each its place among the others."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from megarl.api.scheduler import GroupSpec
from megarl.rpc.link import Link, Listener
from megarl.rpc.worker import Presence


class Gathering:
    """Listens at `host` for the workers of one group, from its construction until `close`.

    A worker registers, with a port that is free on its machine, and is answered when all have: by
    the variables of a torch world, in which worker i is rank i. It is ready when it serves, over
    the same link.
    """

    def __init__(self, spec: GroupSpec, host: str, *, port: int = 0) -> None:
        self._count = spec.count
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._registered: dict[int, tuple[Presence, int, Future[Mapping[str, str]]]] = {}
        self._ready: dict[int, tuple[Presence, Link]] = {}
        self._listener = Listener(self._handle, host=host, port=port)
        self.address = self._listener.address

    def ready(self) -> list[tuple[Presence, Link]] | None:
        """Returns the workers in their order, and the link to each, when all are ready, until then
        None."""
        ready = dict(self._ready)
        return [ready[i] for i in range(self._count)] if len(ready) == self._count else None

    def missing(self) -> list[int]:
        """Returns the numbers of those that are not ready."""
        return [i for i in range(self._count) if i not in self._ready]

    def close(self) -> None:
        """Listens no more; where not all are ready, those that have come end, too."""
        self._listener.close()
        if self.ready() is None:
            for link in self._links:
                link.close()

    def _handle(self, verb: str, payload: Any, link: Link) -> Any:
        self._links.add(link)
        if verb == "register":
            return self._register(*payload)
        self._ready[payload.index] = payload, link

    def _register(self, presence: Presence, port: int) -> Future[Mapping[str, str]]:
        place: Future[Mapping[str, str]] = Future()
        with self._lock:
            self._registered[presence.index] = presence, port, place
            if len(self._registered) == self._count:
                for one, _, waiting in self._registered.values():
                    waiting.set_result(self._place(one))
        return place

    def _place(self, mine: Presence) -> Mapping[str, str]:
        presences = [self._registered[i][0] for i in range(self._count)]
        here = [p.index for p in presences if p.host == mine.host]
        first, port, _ = self._registered[0]
        return {
            "RANK": str(mine.index),
            "WORLD_SIZE": str(self._count),
            "LOCAL_RANK": str(here.index(mine.index)),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "MASTER_ADDR": first.address,
            "MASTER_PORT": str(port),
        }
