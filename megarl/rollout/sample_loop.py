"""SampleLoop brings samples to their end, over as many requests as pauses make necessary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from megarl.api.records import ModelResponse
from megarl.rollout.cache_keys import CacheKeys
from megarl.rollout.dispatch import Dispatcher
from megarl.rollout.generation import Sample, batch_body, routes_from
from megarl.rollout.server_choice import current_home
from megarl.utils.http import HttpError

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
    adapter: the name of the adapter that requests ask for, None for none.
    """

    def __init__(self, dispatcher: Dispatcher, *, keys: CacheKeys, patience: float) -> None:
        self._dispatcher, self._keys, self._patience = dispatcher, keys, patience
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
        again. Raises RuntimeError where all tries fail, ValueError for a broken answer."""
        fruitless, begun = 0, self._keys.begin()
        unfinished = [s for s in samples if not s.done]
        while unfinished:
            await self._admission()
            holds = self._holds
            try:
                gained = await self._ask(unfinished, begun)
            except HttpError:  # on its way across an update: the adapter it names is gone
                if self.adapter is None or holds == self._holds:
                    raise
                continue
            before, unfinished = len(unfinished), [s for s in unfinished if not s.done]
            if holds == self._holds and unfinished:
                fruitless = 0 if gained or len(unfinished) < before else fruitless + 1
                if fruitless == MAX_FRUITLESS_ABORTS:
                    raise RuntimeError(
                        f"request {unfinished[0].request.rid}: aborted {fruitless} times in a row "
                        "without a token; something keeps aborting the servers' requests"
                    )
                await asyncio.sleep(ABORT_DELAY)
        return [s.response for s in samples]

    async def _ask(self, samples: Sequence[Sample], begun: int) -> int:
        """Sends one request for all, whose episode began at version `begun`, and takes the answers
        in; returns how many tokens came."""
        named, asked = self._keys.version_for(begun), routes_from(samples) or 0
        body = batch_body(samples, self._keys.key(named), self.adapter)
        self._under_way += 1
        try:
            items, server = await self._dispatcher.generate(body, len(samples), current_home.get())
            until = named if self._keys.crossed(named) else None
            try:
                pairs = zip(samples, items, strict=True)
                gained = sum(
                    s.absorb(item, initial_version=0, until=until, routes_from=asked)
                    for s, item in pairs
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
