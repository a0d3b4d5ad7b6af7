"""Has servers write samples, over as many requests as pauses, failures and time limits ask for.

A try of a request is one call of one server, under ids of its own. What a server has written counts
whatever ends the try: a pause, an update, a time limit. A failed try is made again at other servers
while `Retries` allows it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

from megarl.api.inference import RolloutFailed
from megarl.api.records import ModelResponse
from megarl.config.rollout import RolloutConfig
from megarl.observability.logging import get_logger
from megarl.rollout.episode_context import Home, current_episode
from megarl.rollout.sample import Sample, batch_body, routes_from
from megarl.rollout.servers import Server, ServerChoice, ServerPool
from megarl.utils.http import MAX_REST, STRANGER, HttpError, Retries, is_final, shown

log = get_logger(__name__)

# aborts in a row, without a token and without a pause of ours, before it is an error
MAX_FRUITLESS_ABORTS = 20
ABORT_DELAY = 0.1  # seconds before a sample that somebody else's pause aborted is sent again
ABORT_TIMEOUT = 10.0  # seconds in which a server brings the tokens of a request that it aborts
SETTLE_TIMEOUT = 5.0  # seconds a pause's partial answers may take to arrive
POLL_INTERVAL = 0.01


class Generator:
    """Sends samples to the servers of `pool` until none is unfinished, but none while it is held.
    Its methods run in the pool's event loop.

    patience: seconds that a request waits while it is held. adapter: the name of the adapter that
    requests ask for, None for none.
    """

    def __init__(self, pool: ServerPool, config: RolloutConfig, *, patience: float) -> None:
        self._pool, self._choice = pool, ServerChoice(affinity=config.affinity)
        self._timeout, self._retry_timeout = config.request_timeout, config.retry_timeout
        self._patience, self._keeps_kv = patience, config.kv_after_sync == "keep"
        self.adapter: str | None = None
        self._version = 0
        self._run, self._returns = uuid.uuid4().hex[:8], 0
        self._admitted = asyncio.Event()
        self._admitted.set()
        self._holds = 0
        self._under_way = 0  # requests

    def set_version(self, version: int) -> None:
        """Sets the version of the weights. A lower one than before begins new keys of the servers'
        caches: what is cached under its number, and those that follow, comes from other weights."""
        if version < self._version:
            self._returns += 1
        self._version = version

    # pauses

    @property
    def held(self) -> bool:
        """Returns whether no request is sent."""
        return not self._admitted.is_set()

    def hold(self) -> None:
        """Sends no more requests until `release`."""
        self._admitted.clear()
        self._holds += 1

    def release(self) -> None:
        """Sends requests again."""
        self._admitted.set()

    async def settled(self, timeout: float = SETTLE_TIMEOUT) -> bool:
        """Waits, while it is held, for the answers under way; returns whether all came in `timeout`
        seconds."""
        deadline = time.monotonic() + timeout
        while self._under_way and time.monotonic() < deadline:
            await asyncio.sleep(POLL_INTERVAL)
        return not self._under_way

    async def _admission(self) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._admitted.wait()
        except TimeoutError:
            raise TimeoutError(
                f"generation was paused for {self._patience:.0f} s: pause() without resume()"
            ) from None

    # samples

    async def generate(self, samples: Sequence[Sample]) -> list[ModelResponse]:
        """Returns the samples' responses, once all have ended. Samples that a pause aborts are sent
        again, and those of a request that fails. Raises RolloutFailed ("server") where that goes on
        for too long, RuntimeError where no server is left, HttpError for a refusal (4xx but 429)
        and ValueError for a broken answer."""
        episode = current_episode.get()
        home = None if episode is None else episode.home
        begun = self._version if episode is None or episode.began is None else episode.began
        fruitless, holds = 0, self._holds
        retries, failed = Retries(self._retry_timeout), list[str]()
        while unfinished := [s for s in samples if not s.done]:
            await self._admission()
            if holds != self._holds:  # a pause is not the time of a server that fails
                holds, retries = self._holds, Retries(self._retry_timeout)
            try:
                gained = await self._ask(unfinished, begun, home, failed)
            except HttpError as error:
                # on its way across an update: the adapter it names is gone
                if self.adapter is None or holds == self._holds:
                    await self._rest(retries, error)
                    failed.append(error.server)
                continue
            retries = Retries(self._retry_timeout)
            failed.clear()
            if holds == self._holds and not all(s.done for s in unfinished):
                progress = gained or any(s.done for s in unfinished)
                fruitless = 0 if progress else fruitless + 1
                if fruitless == MAX_FRUITLESS_ABORTS:
                    raise RolloutFailed(
                        "server",
                        f"request {unfinished[0].request.rid}: aborted {fruitless} times in a row "
                        "without a token; something keeps aborting the servers' requests",
                    )
                await asyncio.sleep(ABORT_DELAY)
        return [s.response for s in samples]

    async def _rest(self, retries: Retries, error: HttpError) -> None:
        """Waits before the next try. Raises what `generate` raises where there is none."""
        if is_final(error):
            raise error
        if (seconds := retries.rest()) is not None:
            log.debug("failure %d: %s", retries.failures, error)
            await asyncio.sleep(seconds)
            return
        present = self._pool.present
        if all(server.silent for server in present):
            self._pool.drop({server.address: error for server in present})
        raise RolloutFailed(
            "server",
            f"generation failed {retries.failures} times in {self._retry_timeout:g} s "
            f"(rollout.request_timeout, at most 120), the last time because {error}",
        ) from error

    async def _ask(
        self, samples: Sequence[Sample], begun: int, home: Home | None, failed: Sequence[str]
    ) -> int:
        """Sends one request for all, whose episode began at version `begun`, if possible to none of
        the servers that `failed`, and takes the answers in; returns how many tokens came. Raises
        HttpError where it fails, RuntimeError where no server is left."""
        body = batch_body(samples, self._cache_key(begun), self.adapter)
        routed = routes_from(samples) or 0
        budget = sum(params["max_new_tokens"] for params in body["sampling_params"])
        tokens = self._choice.expected(sum(map(len, body["input_ids"])), budget)
        if not (serving := self._pool.serving):
            raise RuntimeError("no generation server is left")
        server = self._choice.pick(serving, tokens, home=home, avoid=failed)
        server.outstanding += tokens
        self._under_way += 1
        try:
            await self._ready(server)
            items = _checked(await self._answer(server, body), len(samples), server.address)
            for item in items:
                self._pool.check_served(server, item["meta_info"], "/generate")
        except HttpError as error:
            if not is_final(error):
                _note(server, error)
            raise
        finally:
            server.outstanding -= tokens
            self._under_way -= 1
        _note(server)
        try:
            pairs = zip(samples, items, strict=True)
            gained = sum(sample.absorb(item, routes_from=routed) for sample, item in pairs)
        except ValueError as e:
            raise ValueError(f"server {server.address}: /generate: {e}") from e
        for sample in samples:
            if sample.done:
                most = sample.request.gconfig.max_new_tokens
                self._choice.learn(sample.response.output_len, most)
        return gained

    def _cache_key(self, begun: int) -> str:
        """Returns the key under which a server shares KV among requests, with an update between
        them, too. It names a version, and the run, for servers may have KV of others.

        With kv_after_sync=keep all requests of an episode name the version at which it began: they
        go on with its KV, and no KV is older than the episode that reads it.
        """
        version = begun if self._keeps_kv else self._version
        return f"megarl-{self._run}.{self._returns}-v{version}"

    # one try

    async def _ready(self, server: Server) -> None:
        """Waits as long as the server asked for, and finds out about it where it was silent."""
        if (left := server.rests_until - time.monotonic()) > 0:
            await asyncio.sleep(left)
        if server.silent:
            await self._pool.check_version(server)

    async def _answer(self, server: Server, body: dict[str, Any]) -> Any:
        """Returns a server's answer. One that takes longer than the timeout is aborted: it has the
        tokens so far. A pause in which the server keeps the request does not count."""
        call = asyncio.ensure_future(
            self._pool.call(server.address, "POST", "/generate", body, timeout=None)
        )
        server.generating.add(call)
        try:
            while not (await asyncio.wait({call}, timeout=self._timeout))[0]:
                if not self.held:
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
        for refused in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(refused, BaseException):
                log.debug("not aborted: %s", refused)
        if not (await asyncio.wait({call}, timeout=ABORT_TIMEOUT))[0]:
            reason = f"gave no answer within {self._timeout:g} s"
            raise HttpError(server.address, "/generate", reason) from TimeoutError()


def _note(server: Server, error: HttpError | None = None) -> None:
    """Notes how a request ended; one warning for however many a server leaves unanswered."""
    silent = error is not None and error.status is None
    if error is not None and not (silent and server.silent):
        log.warning("%s", error)
    server.silent = silent
    if error is not None and error.retry_after is not None:
        server.rests_until = time.monotonic() + min(error.retry_after, MAX_REST)


def _checked(answer: Any, samples: int, address: str) -> list[dict[str, Any]]:
    """Returns the answers to so many samples. Raises RuntimeError for what is none."""
    items = answer if isinstance(answer, list) else [answer]
    if len(items) != samples or not all(
        isinstance(i, dict) and isinstance(i.get("meta_info"), dict) for i in items
    ):
        raise RuntimeError(
            f"server {address}: /generate answered {shown(answer)!r} to {samples} samples: "
            f"{STRANGER}"
        )
    return items
