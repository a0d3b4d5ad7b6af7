"""Defines RemoteSGLangEngine, a client of running servers that speak SGLang's HTTP protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial, wraps
from typing import Any, Self, TypeVar

from megarl.api.batch import Batch, Padded
from megarl.api.inference import Arrival, RolloutWorkflow
from megarl.api.records import FinetuneSpec, WeightUpdateMeta
from megarl.config.check_parts import kv_problems
from megarl.config.recipe_engines import server_addresses
from megarl.config.recipes import GRPOConfig
from megarl.config.rollout import RolloutConfig, WeightSyncConfig
from megarl.config.script import CLIENT_KEYS, note_read
from megarl.parallel.rank_zero import RankZero
from megarl.rollout import tally
from megarl.rollout.concurrency import adapt
from megarl.rollout.driver import SharedArrival, check_same_data, check_same_rows, driver_of_world
from megarl.rollout.executor import RolloutExecutor
from megarl.rollout.pausing import Pauses
from megarl.rollout.pipeline import ShouldAccept, has_signal
from megarl.rollout.requester import Connection, Requester
from megarl.rollout.routes import check_routes
from megarl.rollout.servers import PROBE_TIMEOUT
from megarl.rollout.user_calls import stuck_threads
from megarl.rollout.worker_link import START_TIMEOUT
from megarl.rollout.workers import WorkerPool
from megarl.utils.importing import load_object
from megarl.wire.routes import RouteShape

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Driving:
    """Holds what the driver's client has while it is open."""

    executor: RolloutExecutor
    pauses: Pauses


class RemoteSGLangEngine(Requester):
    """Generates by the servers of `config.addresses`, else of MEGARL_LLM_SERVER_ADDRS.

    Under torchrun every rank makes one. Rank 0, the driver, talks to the servers. `initialize`,
    `prepare_batch`, `rollout_batch`, `update_weights` and `destroy` are called by every rank, and
    an error of the driver is raised on every rank. `pause`, `resume` and `drop_servers` do nothing
    on other ranks; `submit`, `wait` and `agenerate` are errors there. Asynchronous code runs in one
    thread with its own event loop; the synchronous methods may be called from any other thread.

    `seed` keys requests that carry none while gconfig.seed is set; `tokenizer` is for requests by
    text and for the text of responses. `should_accept`: what prepare_batch takes where it is given
    none; for_run sets it where actor.dynamic_sampling is on.
    """

    should_accept: ShouldAccept | None = None

    start_timeout = 0.0  # seconds in which the driver starts servers of its own

    def __init__(
        self,
        config: RolloutConfig,
        *,
        weight_sync: WeightSyncConfig | None = None,
        seed: int = 1,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(config, weight_sync or WeightSyncConfig(), seed=seed, tokenizer=tokenizer)
        for problem in kv_problems(config, self._sync):
            raise ValueError(problem)
        self._updated: int | None = None  # the last version that update_weights saw arrive
        self._driving: _Driving | None = None
        self._zero: RankZero | None = None  # while it is open
        self._loader: object = None  # the dataloader that all ranks were found to share
        self._workers: WorkerPool | None = None

    @classmethod
    def for_run(cls, cfg: GRPOConfig, *, tokenizer: Any = None) -> RemoteSGLangEngine:
        """Makes the client that a recipe's or a script's configuration describes: rollout with its
        backend, weight_sync, seed and actor.dynamic_sampling."""
        note_read(cfg, *CLIENT_KEYS)
        common = {"weight_sync": cfg.weight_sync, "seed": cfg.seed}
        if tokenizer is not None:
            common["tokenizer"] = tokenizer
        client = cls._of_config(cfg, common)
        client.should_accept = has_signal if cfg.actor.dynamic_sampling else None
        return client

    @classmethod
    def _of_config(cls, cfg: GRPOConfig, common: dict[str, Any]) -> RemoteSGLangEngine:
        if cls is not RemoteSGLangEngine:
            return cls(cfg.rollout, **common)
        backend = cfg.rollout.backend
        make = load_object(backend.type, what="rollout.backend")
        client: RemoteSGLangEngine = make(cfg.rollout, **common, **backend.options)
        return client

    # life

    @property
    def addresses(self) -> list[str]:
        """Returns host:port of every server that is not lost."""
        at = self._connection
        return at.pool.addresses if at else server_addresses(self.config)

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
        at = self.connect()
        executor = RolloutExecutor(self.config, engine=self, loop=at.loop)
        pipeline, opening = executor.pipeline, None
        if self.config.workers:
            self._workers = WorkerPool(self)
            opening = at.loop.submit(self._workers.open())  # servers load meanwhile
            at.pool.changed, pipeline.runner = self._tell_workers, self._workers.run
        pauses = Pauses(self.config, self._sync, at=at, pipeline=pipeline, workers=self._workers)
        self._driving = _Driving(executor, pauses)
        setup = self.config.setup_timeout
        at.loop.run(at.pool.wait_healthy(setup), timeout=setup + 2 * PROBE_TIMEOUT)
        if opening is not None:
            opening.result(2 * START_TIMEOUT)
        if self.config.max_queue is not None and self.config.max_concurrent_rollouts is None:
            at.loop.submit(adapt(at.pool, at.samples, pipeline, self.config.max_queue))
        if ft_spec is not None:
            executor.expect(ft_spec.total_train_steps)
        return at.pool.addresses

    def destroy(self) -> None:
        """Cancels episodes in flight, resumes servers that are paused, closes connections, ends the
        thread. Every rank calls it, none waits for another. May be called twice."""
        zero, workers = self._zero, self._workers
        self._zero = self._driving = self._workers = None
        if zero is not None:
            zero.close()
        try:
            self.disconnect()
        finally:
            if workers is not None:
                workers.stop()

    def _tell_workers(self) -> None:
        """Has the workers' clients, if there are any, agree with this one."""
        if self._workers is not None:
            self.opened().loop.call_soon(self._workers.follow)

    def for_worker(self, index: int) -> Self:
        """Returns a client for a worker process; see Requester.for_worker."""
        twin = super().for_worker(index)
        twin._driving = twin._zero = twin._loader = twin._workers = None
        return twin

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
        at = self.opened()
        down = at.loop.run(at.pool.unhealthy(), timeout=2 * PROBE_TIMEOUT)
        if down:
            raise RuntimeError("unhealthy servers: " + "; ".join(map(str, down.values())))

    def opened(self) -> Connection:
        """Returns the connection of an open client, on the driver. Raises RuntimeError
        elsewhere."""
        if not self.drives:
            raise RuntimeError(
                "generation is driven by rank 0 alone: call initialize, prepare_batch, "
                "rollout_batch, update_weights and destroy on every rank, and submit, wait, "
                "agenerate, check_health and stats on rank 0 only"
            )
        return super().opened()

    def record_routes(self, shape: RouteShape) -> None:
        """Has answers carry the experts that the servers' routers choose, see ModelResponse.

        shape: the model's. On the driver only. Raises RuntimeError naming the servers that do not
        return them."""
        at = self.opened()
        at.loop.run(check_routes(at.pool), timeout=2 * PROBE_TIMEOUT)
        self._routes = shape
        self._tell_workers()

    # weights

    def pause(self) -> None:
        """Stops admitting requests here, then pauses every server; nothing on other ranks.
        One that gives no answer is lost: `addresses` and the next update do without it. Raises
        RuntimeError where no other is left. A lost server that answers again, or one that is new in
        rollout.addresses_file, joins `addresses` and gets requests after an update.
        """
        if not self.drives:
            return
        self.pauses.begin()

    def resume(self) -> None:
        """Has the servers go on and sends requests again; does nothing on other ranks."""
        if not self.drives:
            return
        self.pauses.end()

    @property
    def pauses(self) -> Pauses:
        """Returns what pauses the servers and has them release memory. On the driver only."""
        return self._drive().pauses

    def drop_servers(self, lost: Mapping[str, str]) -> None:
        """Goes on without `lost` (address -> reason). Raises RuntimeError if no other is left."""
        if not self.drives:
            return
        at = self.opened()

        async def drop() -> None:  # in the loop's thread, as all that the pool does
            at.pool.drop(lost)

        at.loop.run(drop(), timeout=PROBE_TIMEOUT)

    def update_weights(self, meta: WeightUpdateMeta) -> Arrival:
        """Returns the arrival of the weights that the trainer's `upload_weights` moves: it is done
        once every server reports `meta.version` (None: the one after the client's), which then is
        the client's too. Every rank calls this, and `result()`. Raises ValueError for a version
        that is not above the last."""
        zero = self._everyone()
        meta = meta.settled(self._version, self._updated)
        if zero.is_zero:
            arrival = self.opened().loop.submit(self._await_version(meta))
        else:
            arrival = Future[None]()
            arrival.set_result(None)
        if zero.size == 1:
            return arrival
        return SharedArrival(zero, arrival, partial(self._arrived, meta))

    async def _await_version(self, meta: WeightUpdateMeta) -> None:
        await self.opened().pool.wait_for_version(meta)
        self._arrived(meta)
        if self._workers is not None:  # before servers answer with these weights
            await self._workers.told()

    def _arrived(self, meta: WeightUpdateMeta) -> None:
        if self._connection is not None:  # on the driver
            self._connection.samples.adapter = meta.adapter
        self.set_version(meta.number)
        self._updated = meta.number

    def set_version(self, version: int) -> None:
        """Sets the version of the weights; after a lower one than the last, updates count anew."""
        self._take_version(version)
        if self._updated is not None and version < self._updated:
            self._updated = None  # back at earlier weights, whose versions count anew
        self._tell_workers()
        if self._driving is not None:
            self._driving.executor.pipeline.version_changed(version)

    # rollouts

    @property
    def executor(self) -> RolloutExecutor:
        """Returns the executor of an open client, on the driver. Raises RuntimeError elsewhere."""
        return self._drive().executor

    def _drive(self) -> _Driving:
        self.opened()
        assert self._driving is not None
        return self._driving

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
        """Returns the samples of all rows; see RolloutExecutor.rollout_batch. Collective. Raises
        ValueError where the ranks' rows differ."""
        check_same_rows(data, self._everyone())
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
        """Returns one training batch; see RolloutExecutor.prepare_parts. should_accept: None is
        the client's. Collective. Raises ValueError where the ranks' dataloaders differ."""
        if dataloader is not self._loader:
            check_same_data(dataloader, self._everyone())
            self._loader = dataloader
        given = (dataloader, workflow, workflow_builder, should_accept or self.should_accept)
        return self.share(lambda: self.executor.prepare_parts(*given))

    def stats(self) -> dict[str, float]:
        """Returns the executor's counters and timings, see RolloutExecutor.stats; loop_lag, the
        seconds that the event loop was late at most since the last call; with a gateway
        lost_answers, which were written and no agent took; stuck_threads, see user_calls; what
        tally counted since the last call; with workers WorkerPool.stats."""
        found = self.executor.stats() | {"loop_lag": self.opened().loop.take_lag()}
        if self._workers is not None:
            found |= self._workers.stats()
        found |= tally.take()
        found["stuck_threads"] = found.get("stuck_threads", 0.0) + stuck_threads()
        if (lost := self.lost_answers) is not None:
            found["lost_answers"] = found.get("lost_answers", 0.0) + lost
        return found
