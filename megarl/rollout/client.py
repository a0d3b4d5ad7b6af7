"""RemoteSGLangEngine: generation by running servers that speak SGLang's HTTP protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from megarl.api.inference import Batch, InferenceEngine, RolloutWorkflow
from megarl.api.records import ModelRequest, ModelResponse, WeightUpdateMeta
from megarl.config.rollout import RolloutConfig
from megarl.config.servers import ADDRESSES_ENV, server_addresses
from megarl.config.weight_sync import WeightSyncConfig
from megarl.rollout.executor import RolloutExecutor
from megarl.rollout.generation import Sample, batch_body, stable_seed
from megarl.rollout.loop_thread import LoopThread
from megarl.rollout.server_pool import POLL_INTERVAL, PROBE_TIMEOUT, ServerPool, gone, silent
from megarl.utils.http import STRANGER, HttpError, shown

# aborts in a row, without a token and without a pause of ours, before it is an error
MAX_FRUITLESS_ABORTS = 20
ABORT_DELAY = 0.1  # seconds before a sample that somebody else's pause aborted is sent again


class RemoteSGLangEngine(InferenceEngine):
    """Servers are `config.addresses`, else the environment's MEGARL_LLM_SERVER_ADDRS.

    Everything asynchronous runs in one thread with its own event loop; the synchronous methods may
    be called from any other thread. `seed` keys requests that carry none while gconfig.seed is set.
    """

    def __init__(
        self, config: RolloutConfig, *, weight_sync: WeightSyncConfig | None = None, seed: int = 1
    ) -> None:
        self.config = config
        self._sync = weight_sync or WeightSyncConfig()
        self._seed = seed
        self._version = 0
        self._updated: int | None = None  # the last version that update_weights saw arrive
        self._adapter: str | None = None  # that requests ask for
        self._initial_version = 0  # of the weights the servers started with
        self._loop: LoopThread | None = None
        self._pool: ServerPool | None = None
        self._executor: RolloutExecutor | None = None
        self._admitted: asyncio.Event  # cleared while paused; used inside the loop only
        self._pauses = 0

    # life

    @property
    def addresses(self) -> list[str]:
        """host:port of every server that is not lost."""
        return self._pool.addresses if self._pool else server_addresses(self.config)

    def initialize(self) -> None:
        assert self._loop is None, "initialize() was called twice"
        pool = ServerPool(
            server_addresses(self.config),
            request_timeout=self.config.request_timeout,
            retries=self.config.request_retries,
            server_timeout=self._sync.server_timeout,
        )
        self._pool, self._loop = pool, LoopThread()
        self._admitted = asyncio.Event()
        self._executor = RolloutExecutor(self.config, engine=self, loop=self._loop)
        try:
            self._loop.run(pool.open(), timeout=PROBE_TIMEOUT)
            self._loop.run(self._admit(), timeout=PROBE_TIMEOUT)
            self._loop.run(
                self._wait_healthy(), timeout=self.config.setup_timeout + 2 * PROBE_TIMEOUT
            )
        except BaseException:
            self.destroy()
            raise

    def destroy(self) -> None:
        """Cancels episodes in flight, resumes servers that are paused, closes connections, ends the
        thread. May be called twice.
        """
        loop, pool = self._loop, self._pool
        self._loop = self._pool = self._executor = None
        if loop is not None:
            paused = not self._admitted.is_set()
            loop.close(last=partial(pool.close, resume=paused) if pool is not None else None)

    def check_health(self) -> None:
        loop, pool = self._open()
        down = loop.run(pool.unhealthy(), timeout=2 * PROBE_TIMEOUT)
        if down:
            raise RuntimeError("unhealthy servers: " + "; ".join(map(str, down.values())))

    async def _wait_healthy(self) -> None:
        pool = self._open()[1]
        deadline = time.monotonic() + self.config.setup_timeout
        while True:
            left = deadline - time.monotonic()
            patience = max(1.0, min(PROBE_TIMEOUT, left))
            down = await pool.unhealthy(timeout=patience)
            if not down:
                await pool.check_protocol(timeout=patience)
                return
            for error in down.values():
                if 400 <= (error.status or 0) < 500:  # no server of ours says so while it starts
                    raise RuntimeError(f"{error}: {STRANGER}")
            if left <= POLL_INTERVAL:
                causes = "\n  ".join(map(str, down.values()))
                raise RuntimeError(
                    f"{len(down)} of {len(pool.addresses)} generation servers were not reachable "
                    f"within rollout.setup_timeout={self.config.setup_timeout:g} s:\n  {causes}\n"
                    f"Start them, correct rollout.addresses or {ADDRESSES_ENV}, or raise "
                    "rollout.setup_timeout if they are still loading."
                )
            await asyncio.sleep(POLL_INTERVAL)

    @property
    def is_open(self) -> bool:
        return self._pool is not None

    def _open(self) -> tuple[LoopThread, ServerPool]:
        if self._loop is None or self._pool is None:
            raise RuntimeError("the rollout client is not open: call initialize() first")
        return self._loop, self._pool

    # generation

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        return (await self.agenerate_many([req]))[0]

    async def agenerate_many(self, reqs: Sequence[ModelRequest]) -> list[ModelResponse]:
        loop = self._open()[0]
        return await loop.here(self._generate([self._sample(i, r) for i, r in enumerate(reqs)]))

    def _sample(self, index: int, req: ModelRequest) -> Sample:
        seed = req.seed
        if seed is None and req.gconfig.seed is not None:
            key = (self._seed, req.gconfig.seed, self._version, tuple(req.input_ids), index)
            seed = stable_seed(*key)
        return Sample(req, seed=seed)

    async def _generate(self, samples: list[Sample]) -> list[ModelResponse]:
        """Requests what is unfinished until nothing is: aborted samples go out again."""
        pool, fruitless = self._open()[1], 0
        unfinished = list(samples)
        while unfinished:
            await self._admission()
            pauses = self._pauses
            try:
                body = batch_body(unfinished, self._adapter)
                items, server = await pool.generate(body, len(unfinished))
            except HttpError:  # on its way across an update: the adapter it names is gone
                if self._adapter is None or pauses == self._pauses:
                    raise
                continue
            try:
                gained = sum(
                    s.absorb(item, initial_version=self._initial_version)
                    for s, item in zip(unfinished, items, strict=True)
                )
            except ValueError as e:
                raise ValueError(f"server {server}: /generate: {e}") from e
            before, unfinished = len(unfinished), [s for s in unfinished if not s.done]
            if pauses == self._pauses and unfinished:
                fruitless = 0 if gained or len(unfinished) < before else fruitless + 1
                if fruitless == MAX_FRUITLESS_ABORTS:
                    raise RuntimeError(
                        f"request {unfinished[0].request.rid}: aborted {fruitless} times in a row "
                        "without a token; something keeps aborting the servers' requests"
                    )
                await asyncio.sleep(ABORT_DELAY)
        return [s.response for s in samples]

    async def _admission(self) -> None:
        limit = self._sync.timeout + self.config.request_timeout
        try:
            async with asyncio.timeout(limit):
                await self._admitted.wait()
        except TimeoutError:
            raise TimeoutError(
                f"generation was paused for {limit:.0f} s: pause() without resume()"
            ) from None

    async def _admit(self) -> None:
        self._admitted.set()

    # weights

    def pause(self) -> None:
        """Stops admitting requests here, then pauses every server. Those that give no answer are
        dropped, here and from `addresses`, while any is left; the next update does without them.
        Those dropped before that answer again are in `addresses` again; they get requests after an
        update.
        """
        loop, pool = self._open()
        self.executor.pipeline.hold()

        async def work() -> None:
            self._admitted.clear()
            self._pauses += 1
            body = {"mode": self._sync.pause_mode}
            await pool.pause(body, timeout=self._sync.timeout)

        loop.run(work(), timeout=self._sync.timeout + 2 * PROBE_TIMEOUT)

    def resume(self) -> None:
        loop, pool = self._open()

        async def work() -> None:
            await pool.control("/continue_generation", {}, timeout=self._sync.timeout)
            self._admitted.set()

        loop.run(work(), timeout=self._sync.timeout + PROBE_TIMEOUT)
        self.executor.pipeline.release()

    def drop_servers(self, lost: Mapping[str, str]) -> None:
        """Goes on without these (address -> why), RuntimeError where no other is left."""
        loop, pool = self._open()

        async def work() -> None:
            pool.drop(lost)

        loop.run(work(), timeout=PROBE_TIMEOUT)

    def update_weights(self, meta: WeightUpdateMeta) -> Future[None]:
        """Resolves once every server reports `meta.version` (None: the one after the client's),
        which then is the client's too. ValueError for one that is not above the last.

        The trainer's `upload_weights` moves the weights; this waits for their arrival.
        """
        meta = meta.settled(self._version, self._updated)
        return self._open()[0].submit(self._await_version(meta))

    async def _await_version(self, meta: WeightUpdateMeta) -> None:
        pool, wanted = self._open()[1], str(meta.number)
        deadline = time.monotonic() + meta.timeout
        while True:
            left = deadline - time.monotonic()
            patience = self._sync.server_timeout
            infos = await pool.everywhere(
                "GET", "/model_info", timeout=max(1.0, min(patience, left))
            )
            pool.drop(gone(infos) if left < patience else silent(infos))
            late = {a: _served(info) for a, info in infos.items() if _served(info) != wanted}
            late = {a: what for a, what in late.items() if a in pool.addresses}
            if not late:
                pool.serves(meta.number)
                self._adapter = meta.adapter
                self.set_version(meta.number)
                self._updated = meta.number
                return
            if left <= POLL_INTERVAL:
                who = "; ".join(f"{a} serves {what}" for a, what in late.items())
                raise TimeoutError(
                    f"weights of version {wanted} did not reach {len(late)} of {len(infos)} "
                    f"servers within weight_sync.timeout={meta.timeout:g} s: {who}"
                )
            await asyncio.sleep(POLL_INTERVAL)

    def set_version(self, version: int) -> None:
        self._version = version
        if self._updated is not None and version < self._updated:
            self._updated = None  # back at earlier weights, whose versions count anew
        if self._executor is not None:
            self._executor.pipeline.version_changed(version)

    def get_version(self) -> int:
        return self._version

    # rollouts

    @property
    def executor(self) -> RolloutExecutor:
        self._open()
        assert self._executor is not None
        return self._executor

    def submit(
        self,
        data: dict[str, Any],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: Callable[[], RolloutWorkflow] | None = None,
        should_accept: Callable[[Batch], bool] | None = None,
    ) -> None:
        self.executor.submit(data, workflow, workflow_builder, should_accept)

    def wait(self, count: int, timeout: float | None = None) -> Batch:
        return self.executor.wait(count, timeout)

    def rollout_batch(
        self,
        data: Sequence[dict[str, Any]],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: Callable[[], RolloutWorkflow] | None = None,
        should_accept: Callable[[Batch], bool] | None = None,
    ) -> Batch:
        return self.executor.rollout_batch(data, workflow, workflow_builder, should_accept)

    def prepare_batch(
        self,
        dataloader: Iterable[list[dict[str, Any]]],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: Callable[[], RolloutWorkflow] | None = None,
        should_accept: Callable[[Batch], bool] | None = None,
    ) -> Batch:
        return self.executor.prepare_batch(dataloader, workflow, workflow_builder, should_accept)

    def stats(self) -> dict[str, float]:
        """The executor's counters and timings, see RolloutExecutor.stats."""
        return self.executor.stats()


def _served(info: Any) -> str:
    """The weight version of a /model_info answer, or why there is none."""
    if not isinstance(info, dict):
        return f"nothing ({info if isinstance(info, HttpError) else shown(info)})"
    return str(info.get("weight_version"))
