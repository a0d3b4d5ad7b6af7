"""Defines RemoteSGLangEngine, a client of running servers that speak SGLang's HTTP protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial, wraps
from typing import Any, TypeVar

from megarl.api.batch import Batch, Padded
from megarl.api.inference import Arrival, InferenceEngine, RolloutWorkflow
from megarl.api.records import FinetuneSpec, ModelRequest, ModelResponse, WeightUpdateMeta
from megarl.config.check_rollout import kv_problems
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.config.servers import server_addresses
from megarl.config.weight_sync import WeightSyncConfig
from megarl.parallel.rank_zero import RankZero
from megarl.rollout.answers import current as current_answers
from megarl.rollout.cache_keys import CacheKeys
from megarl.rollout.concurrency import adapt
from megarl.rollout.dispatch import Dispatcher
from megarl.rollout.driver import SharedArrival, check_same_data, driver_of_world
from megarl.rollout.executor import RolloutExecutor
from megarl.rollout.gateway.gateway import Gateway
from megarl.rollout.gateway.session import Session
from megarl.rollout.generation import Sample, attempt_key, stable_seed, with_ids
from megarl.rollout.loop_thread import LoopThread
from megarl.rollout.pausing import Pauses
from megarl.rollout.pipeline import ShouldAccept
from megarl.rollout.router import Router
from megarl.rollout.routes import wanted
from megarl.rollout.sample_loop import SampleLoop
from megarl.rollout.server_choice import ServerChoice
from megarl.rollout.server_pool import PROBE_TIMEOUT, ServerPool
from megarl.rollout.server_waits import (
    check_routes,
    context_length,
    wait_for_version,
    wait_healthy,
)
from megarl.wire.routes import RouteShape

T = TypeVar("T")


class RemoteSGLangEngine(InferenceEngine):
    """Generates by the servers of `config.addresses`, else of MEGARL_LLM_SERVER_ADDRS.

    Under torchrun every rank makes one. Rank 0, the driver, talks to the servers. `initialize`,
    `prepare_batch`, `rollout_batch`, `update_weights` and `destroy` are called by every rank, and
    an error of the driver is raised on every rank. `pause`, `resume` and `drop_servers` do nothing
    on other ranks; `submit`, `wait` and `agenerate` are errors there. Asynchronous code runs in one
    thread with its own event loop; the synchronous methods may be called from any other thread.

    `seed` keys requests that carry none while gconfig.seed is set; `tokenizer` is for requests by
    text and for the text of responses.
    """

    start_timeout = 0.0  # seconds in which the driver starts servers of its own

    def __init__(
        self,
        config: RolloutConfig,
        *,
        weight_sync: WeightSyncConfig | None = None,
        seed: int = 1,
        tokenizer: Any = None,
    ) -> None:
        self.config = config
        self._sync = weight_sync or WeightSyncConfig()
        for problem in kv_problems(config.kv_after_sync, self._sync.pause_mode):
            raise ValueError(problem)
        self._seed, self._tokenizer = seed, tokenizer
        self._version = 0
        self._keys = CacheKeys(config.kv_after_sync)
        self._updated: int | None = None  # the last version that update_weights saw arrive
        self._loop: LoopThread | None = None
        self._pool: ServerPool | None = None
        self._samples: SampleLoop | None = None
        self._executor: RolloutExecutor | None = None
        self._zero: RankZero | None = None  # while it is open
        self._loader: object = None  # the dataloader that all ranks were found to share
        self._pauses: Pauses | None = None
        self._gateway: Gateway | None = None  # from the first session
        self._routes: RouteShape | None = None  # where answers are to have them

    # life

    @property
    def addresses(self) -> list[str]:
        """Returns host:port of every server that is not lost."""
        return self._pool.addresses if self._pool else server_addresses(self.config)

    def initialize(
        self, addr: str | Sequence[str] | None = None, ft_spec: FinetuneSpec | None = None
    ) -> None:
        """Waits until every server is healthy. Collective; starts torch.distributed where torchrun
        began several processes and nothing has started it yet.

        addr: host:port of the servers, several by commas, in place of those configured; ft_spec: no
        episode begins that none of its steps can use. Raises RuntimeError naming servers that are
        not well.
        """
        assert self._zero is None, "initialize() was called twice"
        if addr:
            listed = addr.split(",") if isinstance(addr, str) else addr
            addresses = [a.strip() for a in listed if a.strip()]
            self.config = dataclasses.replace(self.config, addresses=addresses)
        self._zero = driver_of_world(self.config, self._sync, start_timeout=self.start_timeout)
        try:
            addresses = self._zero(self._connect, ft_spec)
        except BaseException:
            self.destroy()
            raise
        if not self._zero.is_zero:
            self.config = dataclasses.replace(self.config, addresses=addresses)

    def _connect(self, ft_spec: FinetuneSpec | None) -> list[str]:
        """Opens connections, on the driver; returns the servers' addresses."""
        pool = ServerPool(server_addresses(self.config), server_timeout=self._sync.server_timeout)
        router = Router(self.config.router, pool) if self.config.router else None
        dispatcher = Dispatcher(
            pool,
            ServerChoice(affinity=self.config.affinity),
            timeout=self.config.request_timeout,
            retries=self.config.request_retries,
            router=router,
        )
        self._pool, self._loop = pool, LoopThread()
        # a pause may take weight_sync.timeout to drain, and the update as long
        patience = 2 * self._sync.timeout + self.config.request_timeout
        self._samples = SampleLoop(dispatcher, keys=self._keys, patience=patience)
        self._executor = RolloutExecutor(self.config, engine=self, loop=self._loop)
        self._pauses = Pauses(
            self.config,
            self._sync,
            loop=self._loop,
            pool=pool,
            samples=self._samples,
            pipeline=self._executor.pipeline,
        )
        setup = self.config.setup_timeout
        self._loop.run(pool.open(), timeout=PROBE_TIMEOUT)
        self._loop.run(wait_healthy(pool, setup), timeout=setup + 2 * PROBE_TIMEOUT)
        if router is not None:
            self._loop.run(router.check(), timeout=2 * PROBE_TIMEOUT)
        if self.config.max_queue is not None and self.config.max_concurrent_rollouts is None:
            pipeline = self._executor.pipeline
            self._loop.submit(adapt(pool, self._samples, pipeline, self.config.max_queue))
        if ft_spec is not None:
            self._executor.expect(ft_spec.total_train_steps)
        return pool.addresses

    def destroy(self) -> None:
        """Cancels episodes in flight, resumes servers that are paused, closes connections, ends the
        thread. Every rank calls it, none waits for another. May be called twice."""
        loop, pool, samples, zero = self._loop, self._pool, self._samples, self._zero
        gateway = self._gateway
        self._loop = self._pool = self._samples = self._executor = self._zero = None
        self._gateway = self._pauses = None
        if zero is not None:
            zero.close()
        if loop is not None:
            if gateway is not None and not loop.blocked():
                loop.run(gateway.close(), timeout=PROBE_TIMEOUT)
            paused = samples is not None and samples.held
            loop.close(last=partial(pool.close, resume=paused) if pool is not None else None)

    @property
    def drives(self) -> bool:
        """Returns whether this process is the driver: rank 0, or the only process."""
        return self._zero is None or self._zero.is_zero

    def on_driver(self, fn: Callable[..., T], *args: Any) -> T:
        """Returns `fn(*args)` of the driver, or raises its error, on every rank. Collective."""
        return self._everyone()(fn, *args)

    def share(self, fn: Callable[..., Sequence[Padded]], *args: Any) -> Batch:
        """Returns the batch of the padded samples that `fn(*args)` returns on the driver, whose
        tokens stay there until the first engine verb. Collective.
        """
        mine: list[Padded] = []

        @wraps(fn)
        def bring() -> None:
            mine.extend(fn(*args))

        self._everyone()(bring)
        return Batch.from_local(mine)

    def _everyone(self) -> RankZero:
        if self._zero is None:
            raise RuntimeError("the rollout client is not open: call initialize() on every rank")
        return self._zero

    def check_health(self) -> None:
        """Raises RuntimeError naming the servers whose /health is not 200. On the driver only."""
        loop, pool, _ = self._open()
        down = loop.run(pool.unhealthy(), timeout=2 * PROBE_TIMEOUT)
        if down:
            raise RuntimeError("unhealthy servers: " + "; ".join(map(str, down.values())))

    @property
    def is_open(self) -> bool:
        """Returns whether this process is connected to the servers; only the driver ever is."""
        return self._pool is not None

    def _open(self) -> tuple[LoopThread, ServerPool, SampleLoop]:
        if not self.drives:
            raise RuntimeError(
                "generation is driven by rank 0 alone: call initialize, prepare_batch, "
                "rollout_batch, update_weights and destroy on every rank, and submit, wait, "
                "agenerate, check_health and stats on rank 0 only"
            )
        if self._loop is None or self._pool is None or self._samples is None:
            raise RuntimeError("the rollout client is not open: call initialize() first")
        return self._loop, self._pool, self._samples

    def record_routes(self, shape: RouteShape) -> None:
        """Has answers carry the experts that the servers' routers choose, see ModelResponse.

        shape: the model's. On the driver only. Raises RuntimeError naming the servers that do not
        return them."""
        loop, pool, _ = self._open()
        loop.run(check_routes(pool), timeout=2 * PROBE_TIMEOUT)
        self._routes = shape

    # generation

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Generates one sample; see agenerate_many."""
        return (await self.agenerate_many([req]))[0]

    async def agenerate_many(self, reqs: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Generates samples in one request to one server, that of the episode where there is one
        (rollout.affinity), in the order of `reqs`, and continues those that a pause aborts. Raises
        RuntimeError where all tries fail, ValueError for a broken answer."""
        loop, _, sending = self._open()
        samples = [self._sample(i, with_ids(r, self._tokenizer)) for i, r in enumerate(reqs)]
        if (answers := current_answers.get()) is not None:
            for sample in samples:
                answers.begin(sample)
        responses = await loop.here(sending.generate(samples))
        if self._tokenizer is not None:
            for response in responses:
                response.completion = self._tokenizer.decode(
                    response.output_tokens, skip_special_tokens=True
                )
        return responses

    @asynccontextmanager
    async def session(
        self, gconfig: GenerationHyperparameters, tokenizer: Any = None, **named: Any
    ) -> AsyncIterator[Session]:
        """Opens a session of the gateway, which starts with the first of them; see
        InferenceEngine.session. tokenizer: the client's where it is None."""
        loop, pool, _ = self._open()
        if self._gateway is None:
            self._gateway = Gateway(self, self.config.gateway)
        await loop.here(self._gateway.start(partial(context_length, pool)))
        chosen = self._tokenizer if tokenizer is None else tokenizer
        with self._gateway.session(gconfig, chosen, **named) as session:
            yield session

    def _sample(self, index: int, req: ModelRequest) -> Sample:
        seed = req.seed
        if seed is None and req.gconfig.seed is not None:
            key = (self._seed, req.gconfig.seed, self._version, tuple(req.input_ids), index)
            seed = stable_seed(*key, *attempt_key())
        return Sample(req, seed=seed, routes=self._routes if wanted.get() else None)

    # weights

    def pause(self) -> None:
        """Stops admitting requests here, then pauses every server; nothing on other ranks.
        One that gives no answer is lost: `addresses` and the next update do without it. Raises
        RuntimeError where no other is left. A lost server that answers again, or one that is new in
        rollout.addresses_file, joins `addresses` and gets requests after an update.
        """
        if not self.drives:
            return
        self._paused().begin()

    def resume(self) -> None:
        """Has the servers go on and sends requests again; does nothing on other ranks."""
        if not self.drives:
            return
        self._paused().end()

    def _paused(self) -> Pauses:
        self._open()
        assert self._pauses is not None
        return self._pauses

    def drop_servers(self, lost: Mapping[str, str]) -> None:
        """Goes on without `lost` (address -> reason). Raises RuntimeError if no other is left."""
        if not self.drives:
            return
        loop, pool, _ = self._open()

        async def drop() -> None:  # in the loop's thread, as all that the pool does
            pool.drop(lost)

        loop.run(drop(), timeout=PROBE_TIMEOUT)

    def update_weights(self, meta: WeightUpdateMeta) -> Arrival:
        """Returns the arrival of the weights that the trainer's `upload_weights` moves: it is done
        once every server reports `meta.version` (None: the one after the client's), which then is
        the client's too. Every rank calls this, and `result()`. Raises ValueError for a version
        that is not above the last."""
        zero = self._everyone()
        meta = meta.settled(self._version, self._updated)
        arrival = self._open()[0].submit(self._await_version(meta)) if zero.is_zero else None
        if arrival is not None and zero.size == 1:
            return arrival
        return SharedArrival(zero, arrival, partial(self._arrived, meta))

    async def _await_version(self, meta: WeightUpdateMeta) -> None:
        await wait_for_version(self._open()[1], meta, self._sync.server_timeout)
        self._arrived(meta)

    def _arrived(self, meta: WeightUpdateMeta) -> None:
        if self._samples is not None:  # on the driver
            self._samples.adapter = meta.adapter
        self.set_version(meta.number)
        self._updated = meta.number

    def set_version(self, version: int) -> None:
        """Sets the version of the weights; after a lower one than the last, updates count anew."""
        self._version = version
        self._keys.set_version(version)
        if self._updated is not None and version < self._updated:
            self._updated = None  # back at earlier weights, whose versions count anew
        if self._executor is not None:
            self._executor.pipeline.version_changed(version)

    def get_version(self) -> int:
        """Returns the version that `set_version` or the last finished update has set."""
        return self._version

    # rollouts

    @property
    def executor(self) -> RolloutExecutor:
        """Returns the executor of an open client, on the driver. Raises RuntimeError elsewhere."""
        self._open()
        assert self._executor is not None
        return self._executor

    def submit(
        self,
        data: dict[str, Any],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: Callable[[], RolloutWorkflow] | None = None,
        should_accept: ShouldAccept | None = None,
    ) -> None:
        """Queues one episode; see RolloutExecutor.submit. On the driver only."""
        self.executor.submit(data, workflow, workflow_builder, should_accept)

    def wait(
        self, count: int, timeout: float | None = None, should_accept: ShouldAccept | None = None
    ) -> Padded:
        """Returns the next `count` accepted episodes. On the driver only; see RolloutExecutor."""
        return self.executor.wait(count, timeout, should_accept)

    def rollout_batch(
        self,
        data: Sequence[dict[str, Any]],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: Callable[[], RolloutWorkflow] | None = None,
        should_accept: ShouldAccept | None = None,
    ) -> Batch:
        """Returns the samples of all rows; see RolloutExecutor.rollout_batch. Collective."""
        return self.share(
            lambda: [self.executor.rollout_batch(data, workflow, workflow_builder, should_accept)]
        )

    def prepare_batch(
        self,
        dataloader: Iterable[list[dict[str, Any]]],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: Callable[[], RolloutWorkflow] | None = None,
        should_accept: ShouldAccept | None = None,
    ) -> Batch:
        """Returns one training batch; see RolloutExecutor.prepare_parts. Collective. Raises
        ValueError where the ranks' dataloaders differ."""
        if dataloader is not self._loader:
            check_same_data(dataloader, self._everyone())
            self._loader = dataloader
        given = (dataloader, workflow, workflow_builder, should_accept)
        return self.share(lambda: self.executor.prepare_parts(*given))

    def stats(self) -> dict[str, float]:
        """Returns the executor's counters and timings, see RolloutExecutor.stats; with a gateway
        lost_answers, which were written and no agent took."""
        lost = {} if self._gateway is None else {"lost_answers": float(self._gateway.lost)}
        return self.executor.stats() | lost
