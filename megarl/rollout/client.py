"""Defines RemoteSGLangEngine, a client of running servers that speak SGLang's HTTP protocol."""

from __future__ import annotations

import atexit
import copy
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Self, TypeVar

from megarl.api.batch import Batch, Padded
from megarl.api.inference import Arrival, InferenceEngine, RolloutWorkflow
from megarl.api.records import FinetuneSpec, ModelRequest, ModelResponse, WeightUpdateMeta
from megarl.config.check_parts import kv_problems
from megarl.config.recipe_engines import server_addresses
from megarl.config.recipes import GRPOConfig, sampled_parts
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, WeightSyncConfig
from megarl.config.script import CLIENT_KEYS, note_read
from megarl.parallel.ranks import Ranks
from megarl.rollout.all_ranks import (
    SharedArrival,
    check_same_data,
    check_same_rows,
    ranks_of_client,
)
from megarl.rollout.episode import has_signal
from megarl.rollout.episode_context import EpisodeContext, current_episode
from megarl.rollout.episodes import ShouldAccept
from megarl.rollout.executor import RolloutExecutor
from megarl.rollout.gateway.gateway import Gateway
from megarl.rollout.gateway.messages import GatewayConfig
from megarl.rollout.gateway.session import Session
from megarl.rollout.generation import Connection, Generator, Sample, fill_ids
from megarl.rollout.loop_thread import LoopThread, stuck_threads, take_counts
from megarl.rollout.pausing import Pauses
from megarl.rollout.servers import PROBE_TIMEOUT, ServerPool
from megarl.rollout.workers import START_TIMEOUT, WorkerPool
from megarl.utils.importing import load_object
from megarl.wire.routes import RouteShape, check_routes

T = TypeVar("T")


class RemoteSGLangEngine(InferenceEngine):
    """Generates by the servers of `config.addresses`, else of MEGARL_LLM_SERVER_ADDRS.

    Under torchrun every rank makes one. Rank 0, the driver, talks to the servers. `initialize`,
    `prepare_batch`, `rollout_batch`, `update_weights` and `destroy` are called by every rank, and
    an error of the driver is raised on every rank. `pause`, `resume` and `drop_servers` do nothing
    on other ranks; `submit`, `wait` and `agenerate` are errors there. Asynchronous code runs in one
    thread with its own event loop; the synchronous methods may be called from any other thread.

    `seed` keys requests that carry none while gconfig.seed is set; `tokenizer` is for requests by
    text and for the text of responses. `should_accept`: the default of prepare_batch's
    argument; for_run sets it if actor.dynamic_sampling is on. `routes`: the shape of the routes
    that answers must have, None if they need none.
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
        self.config, self._sync = config, weight_sync or WeightSyncConfig()
        for problem in kv_problems(config, self._sync):
            raise ValueError(problem)
        self._seed, self._tokenizer = seed, tokenizer
        self._version = 0
        self._updated: int | None = None  # the last version that update_weights saw arrive
        self._no_episode = EpisodeContext()  # of requests outside of any, with the weights of now
        self.routes: RouteShape | None = None
        self._ranks: Ranks | None = None  # while it is open
        self._loader: object = None  # the dataloader that all ranks were found to share
        self._close()

    def _close(self) -> None:
        """Forgets what belongs to an open client."""
        self._connection: Connection | None = None
        self._gateway: Gateway | None = None  # from the first session
        self._executor: RolloutExecutor | None = None  # on the driver, as are these
        self._pauses: Pauses | None = None
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
        if cfg.actor.dynamic_sampling:
            limits = None if cfg.actor.advantages.type == "gdpo" else cfg.actor.reward_limits
            client.should_accept = partial(has_signal, parts=sampled_parts(cfg), limits=limits)
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

    @property
    def is_open(self) -> bool:
        """Returns whether this process is connected to the servers."""
        return self._connection is not None

    def initialize(
        self, addr: str | Sequence[str] | None = None, ft_spec: FinetuneSpec | None = None
    ) -> None:
        """Waits until every server is healthy. Collective; starts torch.distributed where torchrun
        began several processes and nothing has started it yet.

        addr: host:port of the servers, several by commas, in place of those configured; ft_spec: no
        episode begins that none of its steps can use. Raises RuntimeError naming servers that are
        not well.
        """
        assert self._ranks is None, "initialize() was called twice"
        if addr:
            listed = addr.split(",") if isinstance(addr, str) else addr
            addresses = [a.strip() for a in listed if a.strip()]
            self.config = replace(self.config, addresses=addresses)
        self._ranks = ranks_of_client(self.config, self._sync, start_timeout=self.start_timeout)
        try:
            addresses = self._ranks.from_zero(self._connect, ft_spec)
        except BaseException:
            self.destroy()
            raise
        if not self._ranks.is_zero:
            self.config = replace(self.config, addresses=addresses)

    def _connect(self, ft_spec: FinetuneSpec | None) -> list[str]:
        """Opens connections and waits for the servers, on the driver; returns their addresses."""
        at = self.connect()
        self._executor = RolloutExecutor(self.config, engine=self, loop=at.loop)
        opening = None
        if self.config.workers:
            self._workers = WorkerPool(self)
            opening = at.loop.submit(self._workers.open())  # servers load meanwhile
            at.pool.changed = self._tell_workers
            self._executor.runner = self._workers.run
        self._pauses = Pauses(
            self.config, self._sync, at=at, executor=self._executor, workers=self._workers
        )
        setup = self.config.setup_timeout
        at.loop.run(at.pool.wait_healthy(setup), timeout=setup + 2 * PROBE_TIMEOUT)
        if opening is not None:
            opening.result(2 * START_TIMEOUT)
        if ft_spec is not None:
            self._executor.expect(ft_spec.total_train_steps)
        return at.pool.addresses

    def connect(self) -> Connection:
        """Opens connections; no server is called yet."""
        config, sync = self.config, self._sync
        pool = ServerPool(server_addresses(config), server_timeout=sync.server_timeout)
        # a pause may take weight_sync.timeout to drain, and the update as long
        samples = Generator(pool, config, patience=2 * sync.timeout + config.request_timeout)
        samples.set_version(self._version)
        at = self._connection = Connection(loop=LoopThread(), pool=pool, samples=samples)
        atexit.register(self.disconnect)  # of a script that ends by an error
        at.loop.run(pool.open(), timeout=PROBE_TIMEOUT)
        return at

    def disconnect(self, *, resume: bool = True) -> None:
        """Cancels what is under way, has servers go on that this client has paused (`resume`),
        closes connections, ends the thread. May be called twice."""
        atexit.unregister(self.disconnect)
        at, gateway, workers = self._connection, self._gateway, self._workers
        self._close()
        try:
            if at is not None:
                if gateway is not None and not at.loop.blocked():
                    at.loop.run(gateway.close(), timeout=PROBE_TIMEOUT)
                at.loop.close(last=partial(at.pool.close, resume=resume))
        finally:
            if workers is not None:
                workers.stop()

    def destroy(self) -> None:
        """Cancels episodes in flight, resumes servers that are paused, closes connections, ends the
        thread. Every rank calls it, none waits for another. May be called twice."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()
        self.disconnect()

    def opened(self) -> Connection:
        """Returns the connection of an open client, on the driver. Raises RuntimeError where it is
        not open, and on other ranks."""
        if not self.drives:
            raise RuntimeError(
                "generation is driven by rank 0 alone: call initialize, prepare_batch, "
                "rollout_batch, update_weights and destroy on every rank, and submit, wait, "
                "agenerate, check_health and stats on rank 0 only"
            )
        if self._connection is None:
            raise RuntimeError("the rollout client is not open: call initialize() first")
        return self._connection

    def check_health(self) -> None:
        """Raises RuntimeError naming the servers whose /health is not 200. On the driver only."""
        at = self.opened()
        down = at.loop.run(at.pool.unhealthy(), timeout=2 * PROBE_TIMEOUT)
        if down:
            raise RuntimeError("unhealthy servers: " + "; ".join(map(str, down.values())))

    # one client of all ranks

    @property
    def drives(self) -> bool:
        """Returns whether this process is the driver: rank 0, or the only process."""
        return self._ranks is None or self._ranks.is_zero

    def on_driver(self, fn: Callable[..., T], *args: Any) -> T:
        """Returns `fn(*args)` of the driver, or raises its error, on every rank. Collective."""
        return self._everyone().from_zero(fn, *args)

    def share(self, fn: Callable[..., Sequence[Padded]], *args: Any) -> Batch:
        """Returns the batch of the padded samples that `fn(*args)` returns on the driver, whose
        tokens stay there until the first engine verb. Collective.
        """
        samples: list[Padded] = []

        @wraps(fn)
        def bring() -> None:
            samples.extend(fn(*args))

        self._everyone().from_zero(bring)
        return Batch.from_local(samples)

    def _everyone(self) -> Ranks:
        if self._ranks is None:
            raise RuntimeError("the rollout client is not open: call initialize() on every rank")
        return self._ranks

    # worker processes (rollout.workers)

    def for_worker(self, index: int) -> Self:
        """Returns a client like this one for the worker process of this number, not open and to be
        pickled. A subclass leaves out what it cannot share with another process. A gateway whose
        port is given has those behind it in the workers."""
        addresses, gateway = self.opened().pool.addresses, self.config.gateway
        if port := gateway.get("port"):
            gateway = gateway | {"port": port + 1 + index}
        twin = copy.copy(self)
        twin._close()
        twin._ranks = twin._loader = None
        twin.config = replace(
            self.config, workers=0, addresses=addresses, addresses_file="", gateway=gateway
        )
        return twin

    def _tell_workers(self) -> None:
        """Has the workers' clients, if there are any, agree with this one."""
        if self._workers is not None:
            self.opened().loop.call_soon(self._workers.follow)

    # generation

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Generates one sample; see agenerate_many."""
        return (await self.agenerate_many([req]))[0]

    async def agenerate_many(self, reqs: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Generates samples in one request to one server, that of the episode where there is one
        (rollout.affinity), in the order of `reqs`, and continues those that a pause aborts. Raises
        RolloutFailed ("server") where servers fail for config.retry_timeout, RuntimeError where
        none is left, ValueError for a broken answer."""
        at = self.opened()
        for req in reqs:
            fill_ids(req, self._tokenizer)
        episode = current_episode.get() or self._no_episode
        samples = [self._sample(req, episode) for req in reqs]
        if episode.answers is not None:
            for sample in samples:
                episode.answers.begin(sample)
        responses = await at.loop.here(at.samples.generate(samples))
        if self._tokenizer is not None:
            for response in responses:
                decode, tokens = self._tokenizer.decode, response.output_tokens
                response.completion = decode(tokens, skip_special_tokens=True)
                response.raw_completion = decode(tokens, skip_special_tokens=False)
        return responses

    def _sample(self, req: ModelRequest, episode: EpisodeContext) -> Sample:
        seed, run = req.seed, (self._seed, req.gconfig.seed)
        if seed is None and req.gconfig.seed is not None:
            seed = episode.seed(*run, prompt=req.input_ids, version=self._version)
        return Sample(req, seed=seed, routes=self.routes if episode.routes else None)

    @asynccontextmanager
    async def session(
        self, gconfig: GenerationHyperparameters, tokenizer: Any = None, **named: Any
    ) -> AsyncIterator[Session]:
        """Opens a session of the gateway, which starts with the first of them; see
        InferenceEngine.session. tokenizer: the client's where it is None."""
        at = self.opened()
        if self._gateway is None:
            self._gateway = Gateway(self, GatewayConfig(**self.config.gateway))
        await at.loop.here(self._gateway.start(at.pool.context_length))
        chosen = self._tokenizer if tokenizer is None else tokenizer
        with self._gateway.session(gconfig, chosen, **named) as session:
            yield session

    @property
    def lost_answers(self) -> int | None:
        """Returns how many answers were written that no agent took; None without a gateway."""
        return None if self._gateway is None else self._gateway.lost

    def record_routes(self, shape: RouteShape) -> None:
        """Has answers carry the experts that the servers' routers choose, see ModelResponse.

        shape: the model's. On the driver only. Raises RuntimeError naming the servers that do not
        return them."""
        at = self.opened()
        infos = at.pool.everywhere("GET", "/server_info", timeout=PROBE_TIMEOUT)
        check_routes(at.loop.run(infos, timeout=2 * PROBE_TIMEOUT))
        self.routes = shape
        self._tell_workers()

    # weights

    @property
    def pauses(self) -> Pauses:
        """Returns what pauses the servers and has them release memory. On the driver only."""
        self.opened()
        assert self._pauses is not None
        return self._pauses

    def pause(self) -> None:
        """Stops admitting requests here, then pauses every server; nothing on other ranks.
        One that gives no answer is lost: `addresses` and the next update do without it. Raises
        RuntimeError where no other is left. A lost server that answers again, or one that is new in
        rollout.addresses_file, joins `addresses` and gets requests after an update.
        """
        if self.drives:
            self.pauses.begin()

    def resume(self) -> None:
        """Has the servers go on and sends requests again; does nothing on other ranks."""
        if self.drives:
            self.pauses.end()

    def drop_servers(self, lost: Mapping[str, str]) -> None:
        """Goes on without `lost` (address -> reason). Raises RuntimeError if no other is left."""
        if self.drives:
            at = self.opened()

            async def drop() -> None:  # in the loop's thread, as all that the pool does
                at.pool.drop(lost)

            at.loop.run(drop(), timeout=PROBE_TIMEOUT)

    def update_weights(self, meta: WeightUpdateMeta) -> Arrival:
        """Returns the arrival of the weights that the trainer's `upload_weights` moves: it is done
        once every server reports `meta.version` (None: the one after the client's), which then is
        the client's too. Every rank calls this, and `result()`. Raises ValueError for a version
        that is not above the last."""
        ranks = self._everyone()
        meta = meta.settled(self._version, self._updated)
        if ranks.is_zero:
            arrival = self.opened().loop.submit(self._await_version(meta))
        else:
            arrival = Future[None]()
            arrival.set_result(None)
        if ranks.size == 1:
            return arrival
        return SharedArrival(ranks, arrival, partial(self._arrived, meta))

    async def _await_version(self, meta: WeightUpdateMeta) -> None:
        await self.opened().pool.wait_for_version(meta)
        self._arrived(meta)
        if self._workers is not None:  # before servers answer with these weights
            await self._workers.agree()

    def _arrived(self, meta: WeightUpdateMeta) -> None:
        if self._connection is not None:  # on the driver
            self._connection.samples.adapter = meta.adapter
        self.set_version(meta.number)
        self._updated = meta.number

    def get_version(self) -> int:
        """Returns the version that `set_version` or the last finished update has set."""
        return self._version

    def set_version(self, version: int) -> None:
        """Sets the version of the weights; after a lower one than the last, updates count anew."""
        if version != self._version:
            self._no_episode = EpisodeContext()
        self._version = version
        if self._connection is not None:
            self._connection.samples.set_version(version)
        if self._updated is not None and version < self._updated:
            self._updated = None  # back at earlier weights, whose versions count anew
        self._tell_workers()
        if self._executor is not None:
            self._executor.version_changed(version)

    # rollouts

    @property
    def executor(self) -> RolloutExecutor:
        """Returns the executor of an open client, on the driver. Raises RuntimeError elsewhere."""
        self.opened()
        assert self._executor is not None
        return self._executor

    def submit(
        self,
        data: dict[str, Any],
        workflow: RolloutWorkflow | None = None,
        workflow_builder: Callable[[], RolloutWorkflow] | None = None,
        should_accept: ShouldAccept | None = None,
    ) -> None:
        """Queues one episode; see RolloutExecutor.submit. On the driver only. This and what follows
        raises ValueError unless either a workflow or a builder of one is given."""
        self.executor.submit(data, _workflow(workflow, workflow_builder), should_accept)

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
        flow = partial(_workflow, workflow, workflow_builder)  # on the driver alone
        return self.share(lambda: [self.executor.rollout_batch(data, flow(), should_accept)])

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
        accept = should_accept or self.should_accept
        flow = partial(_workflow, workflow, workflow_builder)
        return self.share(lambda: self.executor.prepare_parts(dataloader, flow(), accept))

    def stats(self) -> dict[str, float]:
        """Returns the executor's counters and timings, see RolloutExecutor.stats; loop_lag, the
        seconds that the event loop was late at most since the last call; with a gateway
        lost_answers, which were written and no agent took; stuck_threads, see
        loop_thread; what add_counts counted since the last call; with workers WorkerPool.stats."""
        stats = self.executor.stats() | {"loop_lag": self.opened().loop.take_lag()}
        if self._workers is not None:
            stats |= self._workers.stats()
        stats |= take_counts()
        stats["stuck_threads"] = stats.get("stuck_threads", 0.0) + stuck_threads()
        if (lost := self.lost_answers) is not None:
            stats["lost_answers"] = stats.get("lost_answers", 0.0) + lost
        return stats


def _workflow(
    workflow: RolloutWorkflow | None, builder: Callable[[], RolloutWorkflow] | None
) -> RolloutWorkflow:
    if workflow is not None and builder is None:
        return workflow
    if builder is None or workflow is not None:
        raise ValueError("pass either workflow or workflow_builder")
    return builder()
