"""Defines Requester, the part of a client that asks servers for samples: all that episodes use."""

from __future__ import annotations

import atexit
import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from megarl.api.inference import InferenceEngine
from megarl.api.records import ModelRequest, ModelResponse
from megarl.config.recipe_engines import server_addresses
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, WeightSyncConfig
from megarl.rollout.answers import current as current_answers
from megarl.rollout.gateway.calls import GatewayConfig
from megarl.rollout.gateway.gateway import Gateway
from megarl.rollout.gateway.session import Session
from megarl.rollout.generation import (
    Asked,
    Generator,
    asked,
    attempt_key,
    seed_version,
    stable_seed,
)
from megarl.rollout.loop_thread import LoopThread
from megarl.rollout.routes import wanted
from megarl.rollout.sample import Sample, fill_ids
from megarl.rollout.servers import PROBE_TIMEOUT, ServerPool
from megarl.wire.routes import RouteShape


@dataclass(frozen=True, kw_only=True)
class Connection:
    """Holds what an open client has: its event loop, the servers, and what sends them samples."""

    loop: LoopThread
    pool: ServerPool
    samples: Generator


@dataclass(frozen=True, kw_only=True)
class ClientState:
    """Says what the clients of all processes agree on.

    version: of the weights. servers: host:port of those that get requests. served: the version of
    the last update, as servers report it; None before the first. adapter, routes: what requests ask
    for.
    """

    version: int
    servers: tuple[str, ...]
    served: str | None = None
    adapter: str | None = None
    routes: RouteShape | None = None


class Requester(InferenceEngine):
    """Generates by the servers of `config.addresses`, else of MEGARL_LLM_SERVER_ADDRS, in an event
    loop of its own thread. `seed` keys requests that carry none while gconfig.seed is set;
    `tokenizer` is for requests by text and for the text of responses."""

    def __init__(
        self, config: RolloutConfig, sync: WeightSyncConfig, *, seed: int, tokenizer: Any
    ) -> None:
        self.config, self._sync = config, sync
        self._seed, self._tokenizer = seed, tokenizer
        self._version = 0
        self._asked = Asked()  # outside of episodes, with the weights of now
        self._connection: Connection | None = None
        self._gateway: Gateway | None = None  # from the first session
        self._routes: RouteShape | None = None  # where answers are to have them

    @property
    def is_open(self) -> bool:
        """Returns whether this process is connected to the servers."""
        return self._connection is not None

    def opened(self) -> Connection:
        """Returns the connection of an open client. Raises RuntimeError where it is not open."""
        if self._connection is None:
            raise RuntimeError("the rollout client is not open: call initialize() first")
        return self._connection

    def connect(self) -> Connection:
        """Opens connections; no server is called yet."""
        config, sync = self.config, self._sync
        pool = ServerPool(server_addresses(config), server_timeout=sync.server_timeout)
        # a pause may take weight_sync.timeout to drain, and the update as long
        patience = 2 * sync.timeout + config.request_timeout
        samples = Generator(pool, config, patience=patience)
        samples.set_version(self._version)
        made = Connection(loop=LoopThread(), pool=pool, samples=samples)
        self._connection = made
        atexit.register(self.disconnect)  # of a script that ends by an error
        made.loop.run(pool.open(), timeout=PROBE_TIMEOUT)
        return made

    def disconnect(self, *, resume: bool = True) -> None:
        """Cancels what is under way, has servers go on that this client has paused (`resume`),
        closes connections, ends the thread. May be called twice."""
        atexit.unregister(self.disconnect)
        at, gateway = self._connection, self._gateway
        self._connection = self._gateway = None
        if at is None:
            return
        if gateway is not None and not at.loop.blocked():
            at.loop.run(gateway.close(), timeout=PROBE_TIMEOUT)
        at.loop.close(last=partial(at.pool.close, resume=resume and at.samples.held))

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
        samples = [self._sample(req) for req in reqs]
        if (answers := current_answers.get()) is not None:
            for sample in samples:
                answers.begin(sample)
        responses = await at.loop.here(at.samples.generate(samples))
        if self._tokenizer is not None:
            for response in responses:
                decode, tokens = self._tokenizer.decode, response.output_tokens
                response.completion = decode(tokens, skip_special_tokens=True)
                response.raw_completion = decode(tokens, skip_special_tokens=False)
        return responses

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

    def _sample(self, req: ModelRequest) -> Sample:
        seed, ids = req.seed, tuple(req.input_ids)
        if seed is None and req.gconfig.seed is not None:
            if (mine := asked.get()) is None:
                mine = self._asked
            key = (self._seed, req.gconfig.seed, seed_version(self._version), *mine.key, ids)
            seed = stable_seed(*key, mine.number(ids), *attempt_key())
        return Sample(req, seed=seed, routes=self._routes if wanted.get() else None)

    def get_version(self) -> int:
        """Returns the version that `set_version` or the last finished update has set."""
        return self._version

    def _take_version(self, version: int) -> None:
        """Notes the version of the weights."""
        if version != self._version:
            self._asked = Asked()
        self._version = version
        if self._connection is not None:
            self._connection.samples.set_version(version)

    # in several processes

    def state(self) -> ClientState:
        """Returns what the client of a worker process has to know, see `follow`."""
        at = self.opened()
        return ClientState(
            version=self._version,
            servers=tuple(s.address for s in at.pool.serving),
            served=at.pool.version,
            adapter=at.samples.adapter,
            routes=self._routes,
        )

    def follow(self, state: ClientState) -> None:
        """Takes over the state of another client. Runs in this client's loop."""
        at = self.opened()
        self._routes = state.routes
        self._take_version(state.version)
        at.samples.adapter = state.adapter
        at.pool.follow(state.servers, state.served)

    def for_worker(self, index: int) -> Self:
        """Returns a client like this one for the worker process of this number (rollout.workers),
        not open and to be pickled. A subclass leaves out what it cannot share with another process.
        A gateway whose port is given has those behind it in the workers."""
        twin = copy.copy(self)
        twin._connection = twin._gateway = None
        config, addresses = self.config, self.opened().pool.addresses
        gateway = config.gateway
        if port := gateway.get("port"):
            gateway = gateway | {"port": port + 1 + index}
        twin.config = replace(
            config, workers=0, addresses=addresses, addresses_file="", gateway=gateway
        )
        return twin
