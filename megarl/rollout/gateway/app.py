"""Routes of the gateway: each dialect's calls, at a session's own URL or by its key alone."""

from __future__ import annotations

import asyncio
import json
import secrets
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from megarl.observability.logging import get_logger
from megarl.rollout.gateway import anthropic, openai_chat, responses, token_ids
from megarl.rollout.gateway.messages import BadRequest, ChatRequest
from megarl.rollout.gateway.session import Answer, Session

log = get_logger(__name__)

T = TypeVar("T")

MAX_BODY = 8 << 20
KEEP_ALIVE = 10.0  # seconds between two signs of life in a stream
MODEL = "policy"

_Find = Callable[[str, str], Session]
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


DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": openai_chat,
    "/v1/messages": anthropic,
    "/v1/v1/messages": anthropic,  # a client that got the OpenAI URL and adds its own /v1
    "/v1/responses": responses,
}


def build_app(
    find: _Find, is_known: Callable[[str], bool], context_length: int | None
) -> Starlette:
    """Returns the app. find: the session of (its id or "", the key); raises BadRequest. is_known:
    whether a key is that of a session, or the workers'."""

    async def models(request: Request) -> Response:
        _check_known(request, is_known)
        entry = {"id": MODEL, "object": "model", "owned_by": "megarl", "created": 0}
        return _answer({"object": "list", "data": [entry | {"max_model_len": context_length}]})

    async def generate(request: Request) -> Response:
        _check_known(request, is_known)  # before the body, which is long, is read
        return await _generate(request, find)

    reward = partial(_reward, find=find)
    calls: list[tuple[str, str, _Handler, Dialect]] = [
        *(("POST", path, partial(_chat, find=find, dialect=d), d) for path, d in DIALECTS.items()),
        ("GET", "/v1/models", models, openai_chat),
        ("POST", "/v1/reward", reward, openai_chat),
        ("POST", "/reward", reward, openai_chat),
        ("POST", "/inference/v1/generate", generate, openai_chat),
    ]
    return Starlette(
        routes=[
            Route(prefix + path, _guarded(handler, dialect), methods=[method])
            for prefix in ("", "/s/{session}")
            for method, path, handler, dialect in calls
        ]
    )


async def _chat(request: Request, *, find: _Find, dialect: Dialect) -> Response:
    session = _session(request, find)
    body = await _read(request)
    try:
        chat = dialect.read(body, key=request.headers.get("idempotency-key", ""))
    except BadRequest:
        raise
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as e:
        raise BadRequest(f"the body has another form than it should: {e}") from e
    model = str(body.get("model") or MODEL)
    # the clients of both vendors count their tries
    again = request.headers.get("x-stainless-retry-count", "0").lstrip("0").isdecimal()
    work = asyncio.ensure_future(session.complete(chat, again=again))
    if body.get("stream"):
        events = _stream(work, dialect, body, model)
        return StreamingResponse(events, media_type="text/event-stream")
    return _answer(dialect.write(body, await _unless_gone(request, work), model))


async def _stream(
    work: asyncio.Task[list[Answer]], dialect: Dialect, body: Mapping[str, Any], model: str
) -> AsyncIterator[bytes]:
    """Yields the answer as server-sent events, and before it a comment now and then: clients and
    proxies close a silent connection."""
    try:
        while not (await asyncio.wait({work}, timeout=KEEP_ALIVE))[0]:
            yield b": the policy is writing\n\n"
        for name, data in dialect.events(body, work.result(), model):
            yield _event(name, data)
    except Exception as e:
        _, content = _refusal(e, dialect)
        yield _event("error", content)
    finally:
        work.cancel()


async def _generate(request: Request, find: _Find) -> Response:
    """Answers a request of token ids. Its session is that of the URL or the key, or the one that
    the body of a worker of environments names."""
    wanted = token_ids.read(await _read(request), trace=request.headers.get("x-session-id", ""))
    session = _session(request, find, wanted.session)
    response = await _unless_gone(request, asyncio.ensure_future(session.generate(wanted)))
    return _answer(token_ids.write(wanted, uuid.uuid4().hex, response))


async def _reward(request: Request, *, find: _Find) -> Response:
    """Takes {"reward": r}, and with "id" the reward of one answer alone."""
    session = _session(request, find)
    body = await _read(request)
    reward, answer_id = body.get("reward"), body.get("id")
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise BadRequest(f"reward={reward!r}: send a number")
    if answer_id is not None:
        answer_id = str(answer_id).partition("_" if "_" in str(answer_id) else "-")[2]
    session.set_reward(reward, answer_id)
    return _answer({"ok": True})


async def _unless_gone(request: Request, work: asyncio.Task[T]) -> T:
    """Returns what `work` does; ends it where the client closes its connection before."""
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        gone.cancel()
        work.cancel()


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


def _session(request: Request, find: _Find, named: str = "") -> Session:
    return find(request.path_params.get("session") or named, _key(request))


def same_key(one: str, other: str) -> bool:
    """Returns whether two keys are the same, in a time that does not tell where they differ."""
    return secrets.compare_digest(one.encode(), other.encode())


async def _read(request: Request) -> dict[str, Any]:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY:
            raise BadRequest(f"the body has more than {MAX_BODY >> 20} MiB", status=413)
    try:
        body = json.loads(raw)
        if b"\\ud" in raw.lower():  # half of a pair is no text, and no answer could repeat it
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"the body is not JSON: {e}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _check_known(request: Request, is_known: Callable[[str], bool]) -> None:
    if not is_known(_key(request)):
        raise BadRequest("this key is not known here", status=401, code="invalid_api_key")


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
