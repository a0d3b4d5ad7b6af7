"""SampleLoop brings samples to their end, over as many requests as pauses and failures make
necessary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from megarl.api.inference import RolloutFailed
from megarl.api.records import ModelResponse
from megarl.observability.logging import get_logger
from megarl.rollout.cache_keys import CacheKeys
from megarl.rollout.dispatch import Dispatcher
from megarl.rollout.generation import Sample, batch_body, routes_from
from megarl.rollout.servers import current_home
from megarl.utils.http import HttpError, Retries, is_final

log = get_logger(__name__)

# aborts in a row, without a token and without a pause of ours, before it is an error
MAX_FRUITLESS_ABORTS = 20
ABORT_DELAY = 0.1  # seconds before a sample that somebody else's pause aborted is sent again
SETTLE_TIMEOUT = 5.0  # seconds a pause's partial answers may take to arrive
POLL_INTERVAL = 0.01


class SampleLoop:
    """Sends samples by `dispatcher` until none is unfinished, but none while it is held. Its
    methods run in the event loop of the dispatcher.

    keys: of the servers' prefix caches, which requests name.
    patience: seconds that a request waits while it is held.
    retry_timeout: seconds for which what fails is tried again.
    adapter: the name of the adapter that requests ask for, None for none.
    """

    def __init__(
        self, dispatcher: Dispatcher, *, keys: CacheKeys, patience: float, retry_timeout: float
    ) -> None:
        self._dispatcher, self._keys, self._patience = dispatcher, keys, patience
        self._retry_timeout = retry_timeout
        self.adapter: str | None = None
        self._admitted = asyncio.Event()
        self._admitted.set()
        self._holds = 0
        self._under_way = 0  # requests

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

    async def generate(self, samples: Sequence[Sample]) -> list[ModelResponse]:
        """Returns the samples' responses, once all have ended. Samples that a pause aborts are sent
        again, and those of a request that fails. Raises RolloutFailed ("server") where that goes on
        for too long, RuntimeError where no server is left, HttpError for a refusal (4xx but 429)
        and ValueError for a broken answer."""
        await self._finish(samples)
        return [s.response for s in samples]

    async def _finish(self, samples: Sequence[Sample]) -> None:
        """Has servers write until all samples have ended."""
        fruitless, begun, holds = 0, self._keys.begin(), self._holds
        retries, failed = Retries(self._retry_timeout), list[str]()
        while unfinished := [s for s in samples if not s.done]:
            await self._admission()
            if holds != self._holds:  # a pause is not the time of a server that fails
                holds, retries = self._holds, Retries(self._retry_timeout)
            try:
                gained = await self._ask(unfinished, begun, failed)
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

    async def _rest(self, retries: Retries, error: HttpError) -> None:
        """Waits before the next try. Raises what `generate` raises where there is none."""
        if is_final(error):
            raise error
        if (seconds := retries.rest()) is not None:
            log.debug("failure %d: %s", retries.failures, error)
            await asyncio.sleep(seconds)
            return
        self._dispatcher.check_left(error)
        raise RolloutFailed(
            "server",
            f"generation failed {retries.failures} times in {self._retry_timeout:g} s "
            f"(rollout.request_timeout, at most 120), the last time because {error}",
        ) from error

    async def _ask(self, samples: Sequence[Sample], begun: int, failed: Sequence[str]) -> int:
        """Sends one request for all, whose episode began at version `begun`, and takes the answers
        in; returns how many tokens came. failed: servers that failed these samples."""
        asked = routes_from(samples) or 0
        body = batch_body(samples, self._keys.key(begun), self.adapter)
        self._under_way += 1
        try:
            items, server = await self._dispatcher.generate(
                body, len(samples), current_home.get(), failed=failed, held=lambda: self.held
            )
            try:
                pairs = zip(samples, items, strict=True)
                gained = sum(
                    s.absorb(item, initial_version=0, routes_from=asked) for s, item in pairs
                )
            except ValueError as e:
                raise ValueError(f"server {server}: /generate: {e}") from e
            for s in samples:
                if s.done:
                    most = s.request.gconfig.max_new_tokens
                    self._dispatcher.choice.learn(s.response.output_len, most)
            return gained
        finally:
            self._under_way -= 1

    async def _admission(self) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._admitted.wait()
        except TimeoutError:
            raise TimeoutError(
                f"generation was paused for {self._patience:.0f} s: pause() without resume()"
            ) from None
