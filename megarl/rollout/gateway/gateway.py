"""Serves agents over HTTP: Gateway, which holds their sessions, and its routes: each dialect's
calls, at a session's own URL or by its key alone."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from megarl.api.inference import InferenceEngine
from megarl.config.rollout import GenerationHyperparameters
from megarl.observability.logging import get_logger
from megarl.rollout.gateway import anthropic, openai_chat, responses
from megarl.rollout.gateway.messages import (
    BadRequest,
    CallParser,
    ChatRequest,
    GatewayConfig,
    Renderer,
    TokenRequest,
    call_parser,
    too_long,
)
from megarl.rollout.gateway.session import MODEL, Answer, Session, ended

log = get_logger(__name__)

START_TIMEOUT, STOP_TIMEOUT = 30.0, 10.0
_WILDCARDS = ("", "0.0.0.0", "::")
MAX_BODY = 8 << 20
KEEP_ALIVE = 10.0  # seconds between two signs of life in a stream


_Handler = Callable[[Request], Awaitable[Response]]


class Dialect(Protocol):
    """Reads and writes one vendor's form of a chat; a module of this package is one."""

    def read(self, body: Mapping[str, Any], *, key: str) -> ChatRequest: ...
    def write(
        self, body: Mapping[str, Any], answers: Sequence[Answer], model: str
    ) -> dict[str, Any]: ...
    def events(
        self, body: Mapping[str, Any], answers: Sequence[Answer], model: str
    ) -> Iterator[tuple[str, Any]]: ...
    def error(self, message: str, status: int, code: str) -> dict[str, Any]: ...
    def failed(self, refusal: dict[str, Any]) -> tuple[str, Any]: ...


DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": openai_chat,
    "/v1/messages": anthropic,
    "/v1/v1/messages": anthropic,  # a client that got the OpenAI URL and adds its own /v1
    "/v1/responses": responses,
}


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
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app(),
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
        rewarded: bool = True,
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

    def _session_of(self, request: Request, named: str = "") -> Session:
        """Returns the session of the request's URL and key, or the one that a body has named.
        Raises BadRequest where none of this key is open."""
        key, session_id = _key(request), request.path_params.get("session") or named
        session = self._sessions.get(session_id) if session_id else self._by_key.get(key)
        keys = () if session is None else (session.api_key, self._worker_key)
        if session is None or not any(_same(k, key) for k in keys):
            raise ended()
        return session

    def _check_known(self, request: Request) -> None:
        """Raises BadRequest unless the key is that of a session, or the workers'."""
        if not (_same(self._worker_key, key := _key(request)) or key in self._by_key):
            raise BadRequest("this key is not known here", status=401, code="invalid_api_key")

    # -- the routes

    def _app(self) -> Starlette:
        calls: list[tuple[str, str, _Handler, Dialect]] = [
            *(("POST", path, partial(self._chat, dialect=d), d) for path, d in DIALECTS.items()),
            ("POST", "/v1/messages/count_tokens", self._count, anthropic),
            ("GET", "/v1/models", self._models, openai_chat),
            ("POST", "/v1/reward", self._reward, openai_chat),
            ("POST", "/reward", self._reward, openai_chat),
            ("POST", "/inference/v1/generate", self._generate, openai_chat),
        ]
        return Starlette(
            routes=[
                Route(prefix + path, _guarded(handler, dialect), methods=[method])
                for prefix in ("", "/s/{session}")
                for method, path, handler, dialect in calls
            ]
            + [Route("/s/{session}", _alive, methods=["HEAD"])]
        )

    async def _chat(self, request: Request, *, dialect: Dialect) -> Response:
        session = self._session_of(request)
        body = await _read(request)
        chat = self._chat_of(request, body, dialect)
        model = str(body.get("model") or MODEL)
        # the clients of both vendors count their tries
        again = request.headers.get("x-stainless-retry-count", "0").lstrip("0").isdecimal()
        work = asyncio.ensure_future(session.complete(chat, again=again))
        if body.get("stream"):
            events = _stream(work, dialect, body, model)
            await anext(events)
            await _wait(request, work, timeout=KEEP_ALIVE)  # a refusal has its status
            return StreamingResponse(events, media_type="text/event-stream")
        await _wait(request, work)
        return _answer(dialect.write(body, work.result(), model))

    def _chat_of(self, request: Request, body: Mapping[str, Any], dialect: Dialect) -> ChatRequest:
        """Returns the chat of a body. Raises BadRequest if it has another form, or more messages
        than a context has tokens."""
        lists = [v for v in map(body.get, ("messages", "input")) if isinstance(v, list)]
        context, most = self._context_length, max(map(len, lists), default=0)
        if context is not None and most > context:
            raise too_long(f"{most} messages", context)
        try:
            return dialect.read(body, key=request.headers.get("idempotency-key", ""))
        except BadRequest:
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as e:
            raise BadRequest(f"the body has another form than it should: {e}") from e

    async def _count(self, request: Request) -> Response:
        session = self._session_of(request)
        chat = self._chat_of(request, await _read(request), anthropic)
        return _answer({"input_tokens": await session.count(chat)})

    async def _models(self, request: Request) -> Response:
        self._check_known(request)
        entry = {"id": MODEL, "object": "model", "owned_by": "megarl", "created": 0}
        entry["max_model_len"] = self._context_length
        return _answer({"object": "list", "data": [entry]})

    async def _generate(self, request: Request) -> Response:
        """Answers a request of token ids. Its session is that of the URL or the key, or the one
        that the body of a worker of environments names."""
        self._check_known(request)  # before the body, which is long, is read
        trace = request.headers.get("x-session-id", "")
        wanted = TokenRequest.read(await _read(request), trace=trace)
        session = self._session_of(request, wanted.session)
        work = asyncio.ensure_future(session.generate(wanted))
        await _wait(request, work)
        return _answer(wanted.answer(uuid.uuid4().hex, work.result()))

    async def _reward(self, request: Request) -> Response:
        """Takes {"reward": r}, and with "id" the reward of one answer alone."""
        session = self._session_of(request)
        body = await _read(request)
        reward, answer_id = body.get("reward"), body.get("id")
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise BadRequest(f"reward={reward!r}: send a number")
        if answer_id is not None:
            answer_id = str(answer_id).partition("_" if "_" in str(answer_id) else "-")[2]
        session.set_reward(reward, answer_id)
        return _answer({"ok": True})


async def _alive(request: Request) -> Response:
    """Answers a client that looks whether somebody listens at its URL."""
    return Response()


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


async def _stream(
    work: asyncio.Task[list[Answer]], dialect: Dialect, body: Mapping[str, Any], model: str
) -> AsyncIterator[bytes]:
    """Yields nothing, then the answer as server-sent events, and before it a comment now and then:
    clients and proxies close a silent connection."""
    try:
        yield b""  # from here on the end of the stream, however early, is that of `work`
        while not (await asyncio.wait({work}, timeout=KEEP_ALIVE))[0]:
            yield b": the policy is writing\n\n"
        for name, data in dialect.events(body, work.result(), model):
            yield _event(name, data)
    except Exception as e:
        _, content = _refusal(e, dialect)
        yield _event(*dialect.failed(content))
    finally:
        work.cancel()


async def _wait(request: Request, work: asyncio.Task[Any], timeout: float | None = None) -> None:
    """Waits for `work`, at most `timeout` s, and raises what it does; ends it where the client
    closes its connection before."""
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        done, _ = await asyncio.wait(
            {work, gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if work in done:
            work.result()
        elif done:
            raise ClientDisconnect
    except BaseException:
        work.cancel()
        raise
    finally:
        gone.cancel()


def _guarded(handler: _Handler, dialect: Dialect) -> _Handler:
    """Makes a handler that answers refusals in the dialect's form."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as e:
            status, content = _refusal(e, dialect)
            return _answer(content, status)

    return run


def _refusal(error: Exception, dialect: Dialect) -> tuple[int, Any]:
    if isinstance(error, BadRequest):
        status, code = error.status, error.code
    elif isinstance(error, RecursionError):
        status, code = 400, "invalid_request"  # what the body nests is nested too deep
    else:
        log.warning("gateway: %s: %s", type(error).__name__, error)
        status, code = 502, "generation_failed"
    return status, dialect.error(str(error), status, code)


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key:
        return key.strip()
    return request.headers.get("x-api-key", "")


def _same(one: str, other: str) -> bool:
    """Returns whether two keys are the same, in a time that does not tell where they differ."""
    return secrets.compare_digest(one.encode(), other.encode())


async def _read(request: Request) -> dict[str, Any]:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY:
            raise BadRequest(f"the body has more than {MAX_BODY >> 20} MiB", status=413)
    try:
        body = json.loads(raw.decode())
        if b"\\ud" in raw.lower():  # half of a pair is no text, and no answer could repeat it
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"the body is not JSON: {e}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _json(content: Any) -> bytes:
    try:
        return orjson.dumps(content)
    except TypeError:  # what it repeats of the request has a number of more than 64 bits
        return json.dumps(content).encode()


def _answer(content: Any, status: int = 200) -> Response:
    return Response(_json(content), status_code=status, media_type="application/json")


def _event(name: str, data: Any) -> bytes:
    text = data.encode() if isinstance(data, str) else _json(data)
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + text + b"\n\n"


async def _disconnected(request: Request) -> None:
    """Returns when the client has closed its connection (its body is read already)."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
