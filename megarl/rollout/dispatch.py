"""Sends generation requests to the servers of a pool, and tries again where one fails."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from megarl.observability.logging import get_logger
from megarl.rollout.router import Router, single_bodies
from megarl.rollout.server_choice import Home, Server, ServerChoice
from megarl.rollout.server_pool import ServerPool
from megarl.utils.http import STRANGER, HttpError, shown

log = get_logger(__name__)

RETRY_DELAY = 0.2  # seconds before the first retry; doubles up to MAX_RETRY_DELAY
MAX_RETRY_DELAY = 10.0
MAX_REST = 60.0  # seconds of a server's Retry-After that are honoured
TOO_MANY = 429  # the one refusal that asks for another try
_jitter = random.Random()  # apart from the generator that a run seeds


class Dispatcher:
    """Sends requests through `pool`. All methods run in the pool's event loop.

    timeout: seconds one try may take; retries: tries of one request. router: to which requests go,
    None for the servers themselves.
    """

    def __init__(
        self,
        pool: ServerPool,
        choice: ServerChoice,
        *,
        timeout: float,
        retries: int,
        router: Router | None = None,
    ) -> None:
        if retries < 1:
            raise ValueError(f"rollout.request_retries={retries}: use at least 1")
        self._pool, self.choice = pool, choice
        self._timeout, self._retries, self._router = timeout, retries, router

    async def generate(
        self, body: dict[str, Any], samples: int, home: Home | None = None
    ) -> tuple[list[dict[str, Any]], str]:
        """Sends one batch request to a server, and to another where it fails or gives no answer; to
        a router, a request for each sample. Returns one answer for each sample, and the address
        that they came from. Raises RuntimeError where every try fails, and HttpError where a server
        refuses the request (4xx but 429)."""
        if self._router is None:
            return await self._tried(body, samples, home)
        parts = [self._tried(part, 1) for part in single_bodies(body, samples)]
        answers: list[dict[str, Any]] = []
        for found in await asyncio.gather(*parts, return_exceptions=True):
            if isinstance(found, BaseException):
                raise found
            answers += found[0]
        return answers, self._router.server.address

    async def _tried(
        self, body: dict[str, Any], samples: int, home: Home | None = None
    ) -> tuple[list[dict[str, Any]], str]:
        tokens = self._tokens(body)
        failed: list[Server] = []
        for attempt in range(self._retries):
            server = self._pick(tokens, home, failed)
            server.outstanding += tokens
            try:
                await self._ready(server)
                return await self._asked(server, body, samples), server.address
            except HttpError as error:
                if error.status is not None and error.status < 500 and error.status != TOO_MANY:
                    raise
                cause = error
                self._heard(server, error)
            finally:
                server.outstanding -= tokens
            failed.append(server)
            log.debug("try %d of %d: %s", attempt + 1, self._retries, cause)
            if attempt + 1 < self._retries:
                await asyncio.sleep(backoff(attempt))
        raise RuntimeError(
            f"generation failed {self._retries} times (rollout.request_retries; one try may take "
            f"rollout.request_timeout={self._timeout:g} s), the last time because {cause}"
        ) from cause

    def _tokens(self, body: dict[str, Any]) -> float:
        if self._router is not None:  # which does the counting
            return 0.0
        prompts = sum(map(len, body["input_ids"]))
        budget = sum(params["max_new_tokens"] for params in body["sampling_params"])
        return self.choice.expected(prompts, budget)

    def _pick(self, tokens: float, home: Home | None, failed: list[Server]) -> Server:
        if self._router is not None:
            return self._router.server
        return self.choice.pick(self._pool.serving, tokens, home=home, avoid=failed)

    async def _ready(self, server: Server) -> None:
        """Waits as long as the server asked for, and finds out about it where it was silent."""
        if (left := server.rests_until - time.monotonic()) > 0:
            await asyncio.sleep(left)
        if self._router is not None:
            await self._router.show()
        elif server.silent:
            await self._pool.check_version(server)

    async def _asked(
        self, server: Server, body: dict[str, Any], samples: int
    ) -> list[dict[str, Any]]:
        """Returns a server's checked answers. Raises HttpError, as soon as the server is lost."""
        items = _checked(await self._answer(server, body), samples, server.address)
        for item in items:
            self._pool.check_served(server, item["meta_info"], "/generate")
        self._heard(server)
        return items

    async def _answer(self, server: Server, body: dict[str, Any]) -> Any:
        call = asyncio.ensure_future(
            self._pool.call(server.address, "POST", "/generate", body, timeout=self._timeout)
        )
        server.generating.add(call)
        try:
            await asyncio.wait({call})
            if call.cancelled():  # by ServerPool.drop
                raise HttpError(server.address, "/generate", "was given up: the server is lost")
            return call.result()
        finally:
            server.generating.discard(call)
            call.cancel()

    def _heard(self, server: Server, error: HttpError | None = None) -> None:
        """Notes how a request ended; one warning for however many a server leaves unanswered."""
        silent = error is not None and error.status is None
        if error is not None and not (silent and server.silent):
            log.warning("%s", error)
        server.silent = silent
        if error is not None and error.retry_after is not None:
            server.rests_until = time.monotonic() + min(error.retry_after, MAX_REST)


def backoff(attempt: int) -> float:
    """Returns the seconds before the next try: they double, and a random part of up to a half is
    left out, so that clients that failed together do not come back together."""
    return min(RETRY_DELAY * 2**attempt, MAX_RETRY_DELAY) * _jitter.uniform(0.5, 1.0)


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
