"""Reads bodies and writes answers, as JSON by orjson; refusals keep their status and body."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from megarl.server.errors import MAX_BODY, ServerError, described

logger = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]


def answer(content: Any, status: int = 200) -> Response:
    """Returns `content` as a JSON response."""
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


async def read_json(request: Request, *, required: bool = True) -> dict[str, Any]:
    """Returns the body; {} for none where it is not `required`. Raises ServerError for anything but
    a JSON object of at most MAX_BODY bytes."""
    raw = await _body(request)
    if not raw and not required:
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as e:
        raise ServerError(f"the body is not JSON: {e}") from None
    if not isinstance(body, dict):
        raise ServerError("the body must be a JSON object")
    return body


async def _body(request: Request) -> bytearray:
    length, raw = request.headers.get("content-length", ""), bytearray()
    if not (length.isdigit() and int(length) > MAX_BODY):
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > MAX_BODY:
                break
        else:
            return raw
    raise ServerError(f"the body has more than {MAX_BODY >> 20} MiB; send less at once", status=413)


async def is_waited_for(request: Request, result: asyncio.Future[Any]) -> bool:
    """Returns True once there is a result, False where the client, whose body is read, closes its
    connection before."""
    gone = asyncio.ensure_future(_disconnected(request))
    await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    return result.done()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def guarded(handler: Handler, check: Callable[[Request], None]) -> Handler:
    """Makes a handler that calls `check` first. It answers refusals with their status and body, and
    every other error with 500, so that a failure ends only its own request.
    """

    @functools.wraps(handler)
    async def run(request: Request) -> Response:
        try:
            check(request)
            return await handler(request)
        except ServerError as e:
            return answer(e.body(), e.status)
        except ClientDisconnect:
            return Response(status_code=499)  # the client is gone
        except asyncio.CancelledError:  # by uvicorn's end, for a call that hangs
            return answer(ServerError("the server is stopping", status=503).body(), 503)
        except Exception as e:
            logger.exception("%s failed", request.url.path)
            return answer(ServerError(described(e), status=500).body(), 500)

    return run
