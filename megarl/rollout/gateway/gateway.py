"""Defines Gateway, the HTTP server through which the agents of a run reach the policy."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import uvicorn

from megarl.api.inference import InferenceEngine
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.gateway.app import build_app, same_key
from megarl.rollout.gateway.messages import BadRequest
from megarl.rollout.gateway.prompt import CallParser, GatewayConfig, Renderer, call_parser
from megarl.rollout.gateway.session import Session

START_TIMEOUT, STOP_TIMEOUT = 30.0, 10.0
_WILDCARDS = ("", "0.0.0.0", "::")


class Gateway:
    """Serves the sessions of agents. Its methods run in the event loop of `engine`.

    lost: answers of sessions that have ended which no client took, see Session.
    """

    def __init__(self, engine: InferenceEngine, config: GatewayConfig) -> None:
        self._engine, self._config = engine, config
        self._parser: CallParser = call_parser(config.call_format)
        self._context_length: int | None = None
        self._starting = asyncio.Lock()
        self._sessions: dict[str, Session] = {}  # by id
        self._by_key: dict[str, Session] = {}
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._worker_key = f"sk-{secrets.token_hex(24)}"
        # that render long chats; more at once would hold more of them in memory
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="megarl-gateway")
        self.address, self.lost = "", 0

    async def start(self, context_length: Callable[[], Awaitable[int | None]]) -> None:
        """Begins to listen, unless it does already. context_length: asks the servers for theirs.
        Raises OSError where the port is taken."""
        async with self._starting:
            if self._server is None:
                self._context_length = await context_length()
                await self._start()

    async def _start(self) -> None:
        listener = _listener(self._config.host, self._config.port)
        port = listener.getsockname()[1]
        host = self._config.advertise or self._config.host
        if host in _WILDCARDS:
            host = socket.gethostname()
        self.address = f"http://{host}:{port}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                build_app(self._find, self._is_known, self._context_length),
                log_level="warning",
                access_log=False,
                lifespan="off",
                loop="none",
                timeout_graceful_shutdown=1,
                timeout_keep_alive=600,
            )
        )
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        async with asyncio.timeout(START_TIMEOUT):
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()
                    raise RuntimeError("the gateway ended at its start")
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Ends all requests and stops listening."""
        for session in list(self._sessions.values()):
            session.close()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving}, timeout=STOP_TIMEOUT)
            self._serving.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def session(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        index: int = 0,
        seed_key: Sequence[Any] = (),
        rewarded: bool = False,
    ) -> Iterator[Session]:
        """Opens a session with these sampling parameters for as long as the context lasts. See
        InferenceEngine.session."""
        rewards = self._config.rewards
        session = Session(
            self._engine,
            Renderer(tokenizer, self._parser, template_kwargs or {}),
            self._config,
            gconfig,
            address=self.address,
            context_length=self._context_length,
            index=index,
            seed_key=seed_key,
            worker_key=self._worker_key,
            rewards=rewards == "always" or (rewards == "auto" and not rewarded),
            threads=self._threads,
        )
        self._sessions[session.id] = self._by_key[session.api_key] = session
        try:
            yield session
        finally:
            del self._sessions[session.id], self._by_key[session.api_key]
            session.close()
            self.lost += session.lost

    def _is_known(self, key: str) -> bool:
        return same_key(self._worker_key, key) or key in self._by_key

    def _find(self, session_id: str, key: str) -> Session:
        session = self._sessions.get(session_id) if session_id else self._by_key.get(key)
        keys = () if session is None else (session.api_key, self._worker_key)
        if session is None or not any(same_key(k, key) for k in keys):
            raise BadRequest(
                "no open session has this URL and key: the session has ended, or the key is "
                "another's",
                status=401,
                code="invalid_api_key",
            )
        return session


def _listener(host: str, port: int) -> socket.socket:
    """Returns a socket that listens. It says that it speaks TCP: asyncio sends at once only on
    sockets that do, on others an answer waits 40 ms for the client's acknowledgement."""
    family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener
