"""Sends generation requests through SGLang's router (`rollout.router`), which chooses the server.

The router takes requests and knows nothing of weights. So the servers stay known to the client by
their own addresses: it pauses and updates them, and tells the router which of them serve.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from megarl.observability.logging import get_logger
from megarl.rollout.server_choice import Server
from megarl.rollout.server_pool import POLL_INTERVAL, PROBE_TIMEOUT, ServerPool
from megarl.utils.env import job_token
from megarl.utils.http import as_object, split_address

log = get_logger(__name__)

WORKERS = "/workers"


class Router:
    """Keeps the workers of the router at `address` (host:port) the servers of `pool` that serve;
    one that `follows` leaves that to the client of another process."""

    def __init__(self, address: str, pool: ServerPool, *, follows: bool = False) -> None:
        self.server = Server("{}:{}".format(*split_address(address)))
        self._pool, self._follows = pool, follows
        self._shown: set[str] = set()
        self._lock = asyncio.Lock()

    async def check(self) -> None:
        """Raises RuntimeError where the router has workers that no update would reach, and
        HttpError where it does not answer as a router."""
        strangers = set(await self._workers()) - set(self._pool.addresses)
        if strangers:
            raise RuntimeError(
                f"rollout.router={self.server.address}: has the workers {sorted(strangers)}, which "
                "are not among rollout.addresses: weights would not reach them; name them there "
                "too, or start the router without workers: the run adds its servers"
            )

    async def show(self) -> None:
        """Makes the router's workers those that serve, where that has changed, and waits until it
        has taken them. Raises RuntimeError where it does not."""
        async with self._lock:
            wanted = {s.address for s in self._pool.serving}
            if self._follows or wanted == self._shown:
                return
            found = await self._workers()
            for address in wanted - set(found):
                token = job_token()
                body = {"url": f"http://{address}"} | ({"api_key": token} if token else {})
                await self._call("POST", WORKERS, body)
            for address in set(found) - wanted:
                await self._call("DELETE", f"{WORKERS}/{found[address]}")
                log.info("router %s: %s gets no more requests", self.server.address, address)
            await self._settled(wanted)
            self._shown = wanted

    async def _settled(self, wanted: set[str]) -> None:
        deadline = time.monotonic() + PROBE_TIMEOUT
        while (found := set(await self._workers())) != wanted:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"router {self.server.address}: has the workers {sorted(found)} after "
                    f"{PROBE_TIMEOUT:g} s, not {sorted(wanted)}"
                )
            await asyncio.sleep(POLL_INTERVAL)

    async def _workers(self) -> dict[str, str]:
        """Returns the id of each worker, by its address."""
        answer = as_object(
            self.server.address, WORKERS, await self._call("GET", WORKERS), "workers"
        )
        return {"{}:{}".format(*split_address(w["url"])): w["id"] for w in answer["workers"]}

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        address = self.server.address
        return await self._pool.call(address, method, path, body, timeout=PROBE_TIMEOUT)


def single_body(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the body of a batch request of one sample without its lists: the router takes none
    but a prompt's tokens."""
    return {key: v[0] if isinstance(v, list) else v for key, v in body.items()}
