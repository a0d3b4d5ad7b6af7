"""Pauses generation for a weight update, by weight_sync.pause_mode, and has it go on.

| mode | requests under way |
| --- | --- |
| abort | come back with the tokens so far, and are sent again after the pause |
| drain | end first, which takes as long as the longest |
| retract | wait in the server, which computes their tokens anew with the new weights |
| in_place | wait in the server, and go on with the keys and values of the old weights |
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future

from megarl.config.rollout import RolloutConfig, WeightSyncConfig
from megarl.observability.logging import get_logger
from megarl.rollout.pipeline import Pipeline
from megarl.rollout.requester import Connection
from megarl.rollout.sample_loop import SETTLE_TIMEOUT
from megarl.rollout.server_memory import ServerMemory
from megarl.rollout.server_pool import PROBE_TIMEOUT, listed_servers, silent
from megarl.rollout.workers import WorkerPool

log = get_logger(__name__)


class Pauses:
    """Pauses the servers that `at` connects to, and what is sent to them; `memory` is what they may
    release meanwhile. Its methods are for other threads than the loop's."""

    def __init__(
        self,
        config: RolloutConfig,
        sync: WeightSyncConfig,
        *,
        at: Connection,
        pipeline: Pipeline,
        workers: WorkerPool | None = None,
    ) -> None:
        self._config, self._sync = config, sync
        self._loop, self._pool, self._samples = at.loop, at.pool, at.samples
        self._pipeline, self._workers = pipeline, workers
        self.memory = ServerMemory(at.pool, at.loop, timeout=sync.timeout)
        self._cut: Future[bool] | None = None  # of the answers, during a pause

    def begin(self) -> None:
        """Stops admitting requests, then pauses every server. Raises RuntimeError where none is
        left."""
        self._begin(self._sync.pause_mode, listed_servers(self._config))

    def cut(self) -> bool:
        """Has every request under way come back with its tokens so far, and then go on, whatever
        the mode: nothing changes but that the pipeline notes all answers as they are. Returns
        whether it could."""
        self._begin("abort", None)
        return self.end()

    def _begin(self, mode: str, listed: list[str] | None) -> None:
        self._pipeline.hold()
        drains = self._sync.timeout if mode == "drain" else 0.0
        limit = self._sync.timeout + drains + 2 * PROBE_TIMEOUT
        self._loop.run(self._pause(mode, listed), timeout=limit)
        if mode in ("abort", "drain"):  # the others bring no partial answers
            self._cut = self._loop.submit(self._take_cut())

    async def _pause(self, mode: str, listed: list[str] | None) -> None:
        self._samples.hold()
        if self._workers is not None:
            await self._workers.hold()
        if mode == "drain":
            await self._drain()
            mode = "abort"  # servers know no drain; what is left of it now is somebody else's
        await self._pool.pause({"mode": mode}, timeout=self._sync.timeout, listed=listed)

    async def _drain(self) -> None:
        """Waits for the answers under way, at most weight_sync.timeout seconds. A server that gives
        no sign of life meanwhile is lost, and its requests go to another."""
        patience = self._sync.server_timeout
        deadline = time.monotonic() + self._sync.timeout
        while (left := deadline - time.monotonic()) > 0:
            if await self._settled(min(patience, left)):
                return
            infos = await self._pool.everywhere("GET", "/model_info", timeout=patience)
            self._pool.drop(silent(infos), bound=f" (weight_sync.server_timeout={patience:g} s)")
        log.warning(
            "weight_sync.pause_mode=drain: answers took longer than weight_sync.timeout="
            "%g s; they are interrupted, and go on after the update",
            self._sync.timeout,
        )

    async def _take_cut(self) -> bool:
        """Has the pipeline note all answers as they are, once what the pause cut short is here;
        returns whether it came in time."""
        if not await self._settled(SETTLE_TIMEOUT):
            return False
        self._pipeline.cut()
        return True

    async def _settled(self, timeout: float) -> bool:
        """Returns whether no request of any process is under way, after `timeout` s at most."""
        if self._workers is None:
            return await self._samples.settled(timeout)
        both = self._samples.settled(timeout), self._workers.settled(timeout)
        return all(await asyncio.gather(*both))

    def end(self) -> bool:
        """Has the servers go on and sends requests again, also where the cut of the answers raises.
        Returns whether they were noted as of this pause."""
        cut, self._cut = self._cut, None
        try:
            return cut is not None and cut.result(SETTLE_TIMEOUT + PROBE_TIMEOUT)
        finally:
            self._go_on()

    def _go_on(self) -> None:
        async def work() -> None:
            await self._pool.control("/continue_generation", {}, timeout=self._sync.timeout)
            self._samples.release()
            if self._workers is not None:
                await self._workers.release()

        self._loop.run(work(), timeout=self._sync.timeout + PROBE_TIMEOUT)
        self._pipeline.release()
