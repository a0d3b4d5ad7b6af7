"""Gathers the workers of a group as they start, and gives each its place among the others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from megarl.api.scheduler import GroupSpec
from megarl.rpc.server import RpcServer
from megarl.rpc.worker import Presence


class Gathering:
    """Listens at `host` for the workers of one group, from its construction until `close`.

    A worker registers, with a port that is free on its machine, and is answered when all have: by
    the variables of a torch world, in which worker i is rank i. It is ready when it serves. One
    that a launcher has started asks first for `variables` of its environment.
    """

    def __init__(
        self,
        spec: GroupSpec,
        host: str,
        *,
        port: int = 0,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._variables = variables or {}
        self._count = spec.count
        self._known: dict[int, tuple[Presence, int]] = {}
        self._ready: dict[int, Presence] = {}
        self._all_known, self._all_ready = asyncio.Event(), asyncio.Event()
        self._server = RpcServer(self._handle, host=host, port=port)
        self.address = self._server.address

    def ready(self) -> list[Presence] | None:
        """Returns the workers in their order when all are ready, until then None."""
        ready = dict(self._ready)
        return [ready[i] for i in range(self._count)] if len(ready) == self._count else None

    def missing(self) -> list[int]:
        """Returns the numbers of those that are not ready."""
        return [i for i in range(self._count) if i not in self._ready]

    def close(self) -> None:
        """Ends it; a worker that waits for the others then ends, too."""
        self._server.close()

    async def _handle(self, verb: str, payload: Any) -> Any:
        if verb == "variables":
            return self._variables
        if verb == "register":
            presence, port = payload
            self._known[presence.index] = presence, port
            await _all(self._all_known, len(self._known) == self._count)
            return self._place(presence)
        self._ready[payload.index] = payload
        await _all(self._all_ready, len(self._ready) == self._count)

    def _place(self, mine: Presence) -> Mapping[str, str]:
        people = [self._known[i][0] for i in range(self._count)]
        here = [p.index for p in people if p.host == mine.host]
        first, port = self._known[0]
        return {
            "RANK": str(mine.index),
            "WORLD_SIZE": str(self._count),
            "LOCAL_RANK": str(here.index(mine.index)),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "MASTER_ADDR": first.address,
            "MASTER_PORT": str(port),
        }


async def _all(event: asyncio.Event, now: bool) -> None:
    if now:
        event.set()
    await event.wait()
