"""The servers a client talks to: choice by load, retries, and control calls to all of them.

A server that gives no answer to a request is asked last until it answers again; one that gives none
to a control call is dropped: it missed what keeps servers alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from megarl.observability.logging import get_logger
from megarl.utils.http import HttpError, decode_answer, error_message, split_address

log = get_logger(__name__)

RETRY_DELAY = 0.2  # seconds before the first retry; doubles up to MAX_RETRY_DELAY
MAX_RETRY_DELAY = 10.0
POLL_INTERVAL = 0.2
PROBE_TIMEOUT = 30.0  # of one /health or /model_info; SGLang's /health generates a token


@dataclass
class _Server:
    address: str  # host:port
    in_flight: int = 0  # samples
    silent: bool = False  # its last call got no answer


class ServerPool:
    """All methods run in the event loop that `open` ran in."""

    def __init__(self, addresses: Sequence[str], *, request_timeout: float, retries: int) -> None:
        if not addresses:
            raise ValueError(
                "no generation server: set rollout.addresses=[host:port,...] or the environment "
                "variable MEGARL_LLM_SERVER_ADDRS, or use megarl.launcher.local, which starts them"
            )
        if retries < 1:
            raise ValueError(f"rollout.request_retries={retries}: use at least 1")
        self._servers = [_Server("{}:{}".format(*split_address(a))) for a in addresses]
        self._timeout, self._retries = request_timeout, retries
        self._next = 0
        self._session: aiohttp.ClientSession | None = None

    @property
    def addresses(self) -> list[str]:
        return [s.address for s in self._servers]

    async def open(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)  # concurrency is bounded by the executor
        self._session = aiohttp.ClientSession(connector=connector)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(self, body: dict[str, Any], samples: int) -> list[dict[str, Any]]:
        """One batch request to the least loaded server, elsewhere on a connection error."""
        failed: list[_Server] = []
        for attempt in range(self._retries):
            server = self._pick(avoid=failed)
            server.in_flight += samples
            try:
                answer = await self.call(
                    server.address, "POST", "/generate", body, timeout=self._timeout
                )
            except HttpError as error:
                if error.status is not None and error.status < 500:
                    raise
                cause = error
                self._heard(server, error)
            else:
                self._heard(server)
                return _checked(answer, samples, server.address)
            finally:
                server.in_flight -= samples
            failed.append(server)
            log.debug("try %d of %d: %s", attempt + 1, self._retries, cause)
            if attempt + 1 < self._retries:
                await asyncio.sleep(min(RETRY_DELAY * 2**attempt, MAX_RETRY_DELAY))
        raise RuntimeError(
            f"generation failed {self._retries} times (rollout.request_retries; one try may take "
            f"rollout.request_timeout={self._timeout:g} s), the last time because {cause}"
        ) from cause

    def _pick(self, *, avoid: Sequence[_Server]) -> _Server:
        """The least loaded server, in turns among equals; servers that just failed come last."""
        n = len(self._servers)
        order = [self._servers[(self._next + i) % n] for i in range(n)]
        best = min(order, key=lambda s: (avoid.count(s), s.silent, s.in_flight))
        self._next = (self._servers.index(best) + 1) % n
        return best

    def _heard(self, server: _Server, error: HttpError | None = None) -> None:
        """Notes how a request ended; one warning for however many a server leaves unanswered."""
        silent = error is not None and error.status is None
        if error is not None and not (silent and server.silent):
            log.warning("%s", error)
        server.silent = silent

    def drop(self, lost: Mapping[str, HttpError], *, bound: str = "") -> None:
        """Goes on without the servers `lost` (address -> why), or raises if no other is left.
        `bound` says how long they were waited for.
        """
        if not lost:
            return
        left = [s for s in self._servers if s.address not in lost]
        causes = "; ".join(map(str, lost.values()))
        if not left:
            raise RuntimeError(f"no generation server is left: {causes}{bound}")
        self._servers = left
        log.warning(
            "going on with %d server(s), without those lost: %s%s", len(left), causes, bound
        )

    async def everywhere(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float
    ) -> dict[str, Any]:
        """One control call (idempotent, all of them) to every server at once: {address: answer or
        its HttpError}. A server that left requests unanswered gets no more time than a probe.
        """

        async def ask(server: _Server) -> Any:
            limit = min(timeout, PROBE_TIMEOUT) if server.silent else timeout
            try:
                return await self.call(server.address, method, path, body, timeout=limit)
            except HttpError as error:
                if not gone({server.address: error}):
                    raise
            await asyncio.sleep(RETRY_DELAY)  # it may have been closing an idle connection
            return await self.call(server.address, method, path, body, timeout=limit)

        servers = list(self._servers)
        answers = await asyncio.gather(*map(ask, servers), return_exceptions=True)
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, HttpError):
                raise answer
            server.silent = isinstance(answer, HttpError) and answer.status is None
        return {s.address: answer for s, answer in zip(servers, answers, strict=True)}

    async def control(self, path: str, body: dict[str, Any], *, timeout: float) -> None:
        """POST to every server in `timeout` s (weight_sync.timeout). Drops those that give no
        answer, and raises one error that names all that refused.
        """
        answers = await self.everywhere("POST", path, body, timeout=timeout)
        errors = {a: e for a, e in answers.items() if isinstance(e, HttpError)}
        if refused := [str(e) for e in errors.values() if e.status is not None]:
            raise RuntimeError("; ".join(refused))
        self.drop(errors, bound=f" (weight_sync.timeout={timeout:g} s)")

    async def unhealthy(self, *, timeout: float = PROBE_TIMEOUT) -> dict[str, HttpError]:
        """The servers whose /health does not answer 200, with the reason."""
        answers = await self.everywhere("GET", "/health", timeout=timeout)
        return {a: e for a, e in answers.items() if isinstance(e, HttpError)}

    async def call(
        self,
        address: str,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout: float,
    ) -> Any:
        """The decoded answer of one call. Every failure is an HttpError naming the server."""
        assert self._session is not None, "ServerPool.open() was not awaited"
        limit = aiohttp.ClientTimeout(total=timeout)
        url = f"http://{address}{path}"
        try:
            async with self._session.request(method, url, json=body, timeout=limit) as response:
                status, raw = response.status, await response.read()
        except TimeoutError as e:
            raise HttpError(address, path, f"gave no answer within {timeout:.0f} s") from e
        except (aiohttp.ClientError, OSError) as e:
            reason = f"failed: {type(e).__name__}: {e}".rstrip(": ")
            raise HttpError(address, path, reason) from e
        answer = decode_answer(raw)
        if status >= 400 or (isinstance(answer, dict) and answer.get("success") is False):
            raise HttpError(address, path, error_message(answer), status)
        return answer


def gone(answers: Mapping[str, Any]) -> dict[str, HttpError]:
    """The servers, of these answers, that are there no more; slow ones still may be."""
    silent = {a: e for a, e in answers.items() if isinstance(e, HttpError) and e.status is None}
    return {a: e for a, e in silent.items() if not isinstance(e.__cause__, TimeoutError)}


def _checked(answer: Any, samples: int, address: str) -> list[dict[str, Any]]:
    items = answer if isinstance(answer, list) else [answer]
    if len(items) != samples or not all(isinstance(i, dict) and "meta_info" in i for i in items):
        raise RuntimeError(
            f"server {address}: /generate answered {str(answer)[:200]!r} to {samples} samples; "
            "it does not speak SGLang's protocol"
        )
    return items
