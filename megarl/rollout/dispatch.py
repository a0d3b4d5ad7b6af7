"""Sends generation requests to the servers of a pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from megarl.observability.logging import get_logger
from megarl.rollout.servers import Home, Server, ServerChoice, ServerPool
from megarl.utils.http import MAX_REST, STRANGER, HttpError, is_final, shown

log = get_logger(__name__)

ABORT_TIMEOUT = 10.0  # seconds in which a server brings the tokens of a request that it aborts


class Dispatcher:
    """Sends requests through `pool`. All methods run in the pool's event loop.

    timeout: seconds after which a server is to bring the tokens it has.
    """

    def __init__(self, pool: ServerPool, choice: ServerChoice, *, timeout: float) -> None:
        self._pool, self.choice, self._timeout = pool, choice, timeout

    async def generate(
        self,
        body: dict[str, Any],
        samples: int,
        home: Home | None = None,
        *,
        failed: Sequence[str] = (),
        held: Callable[[], bool] = lambda: False,
    ) -> tuple[list[dict[str, Any]], str]:
        """Sends a request to a server, if possible none of those that `failed`, and returns one
        answer for each sample, and the server's address. Raises HttpError where it fails, and
        RuntimeError where no server is left.

        A request that takes longer than the timeout is aborted: its answers have the tokens so far.
        held: whether a pause keeps the server from answering; that time does not count.
        """
        tokens = self._tokens(body)
        server = self._pick(tokens, home, failed)
        server.outstanding += tokens
        try:
            await self._ready(server)
            return await self._asked(server, body, samples, held), server.address
        except HttpError as error:
            if not is_final(error):
                self._heard(server, error)
            raise
        finally:
            server.outstanding -= tokens

    def check_left(self, error: HttpError) -> None:
        """Raises RuntimeError where no server is left: the last call of each got no answer."""
        present = self._pool.present
        if all(server.silent for server in present):
            self._pool.drop({server.address: error for server in present})

    def _tokens(self, body: dict[str, Any]) -> float:
        prompts = sum(map(len, body["input_ids"]))
        budget = sum(params["max_new_tokens"] for params in body["sampling_params"])
        return self.choice.expected(prompts, budget)

    def _pick(self, tokens: float, home: Home | None, failed: Sequence[str]) -> Server:
        if not (serving := self._pool.serving):
            raise RuntimeError("no generation server is left")
        return self.choice.pick(serving, tokens, home=home, avoid=failed)

    async def _ready(self, server: Server) -> None:
        """Waits as long as the server asked for, and finds out about it where it was silent."""
        if (left := server.rests_until - time.monotonic()) > 0:
            await asyncio.sleep(left)
        if server.silent:
            await self._pool.check_version(server)

    async def _asked(
        self, server: Server, body: dict[str, Any], samples: int, held: Callable[[], bool]
    ) -> list[dict[str, Any]]:
        """Returns a server's checked answers. Raises HttpError, as soon as the server is lost."""
        items = _checked(await self._answer(server, body, held), samples, server.address)
        for item in items:
            self._pool.check_served(server, item["meta_info"], "/generate")
        self._heard(server)
        return items

    async def _answer(self, server: Server, body: dict[str, Any], held: Callable[[], bool]) -> Any:
        call = asyncio.ensure_future(
            self._pool.call(server.address, "POST", "/generate", body, timeout=None)
        )
        server.generating.add(call)
        try:
            while not (await asyncio.wait({call}, timeout=self._timeout))[0]:
                if not held():
                    await self._cut_short(call, server, body["rid"])
            if call.cancelled():  # by ServerPool.drop
                raise HttpError(server.address, "/generate", "was given up: the server is lost")
            return call.result()
        finally:
            server.generating.discard(call)
            call.cancel()

    async def _cut_short(
        self, call: asyncio.Future[Any], server: Server, rids: Sequence[str]
    ) -> None:
        """Has a server answer a request with the tokens it has. Raises HttpError where it does
        not."""
        aborts = (
            self._pool.call(
                server.address, "POST", "/abort_request", {"rid": rid}, timeout=ABORT_TIMEOUT
            )
            for rid in rids
        )
        late = HttpError(server.address, "/generate", f"gave no answer within {self._timeout:g} s")
        late.__cause__ = TimeoutError()
        for refused in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(refused, BaseException):
                log.debug("not aborted: %s", refused)
        if not (await asyncio.wait({call}, timeout=ABORT_TIMEOUT))[0]:
            raise late

    def _heard(self, server: Server, error: HttpError | None = None) -> None:
        """Notes how a request ended; one warning for however many a server leaves unanswered."""
        silent = error is not None and error.status is None
        if error is not None and not (silent and server.silent):
            log.warning("%s", error)
        server.silent = silent
        if error is not None and error.retry_after is not None:
            server.rests_until = time.monotonic() + min(error.retry_after, MAX_REST)


def _checked(answer: Any, samples: int, address: str) -> list[dict[str, Any]]:
    items = answer if isinstance(answer, list) else [answer]
    if len(items) != samples or not all(
        isinstance(i, dict) and isinstance(i.get("meta_info"), dict) for i in items
    ):
        raise RuntimeError(
            f"server {address}: /generate answered {shown(answer)!r} to {samples} samples: "
            f"{STRANGER}"
        )
    return items
