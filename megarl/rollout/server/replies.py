"""Bodies in and out, as JSON by orjson; refusals as their status and body."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from megarl.rollout.server.errors import ServerError

Handler = Callable[[Request], Awaitable[Response]]


def answer(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


async def read_json(request: Request, *, required: bool = True) -> Any:
    raw = await request.body()
    if not raw and not required:
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as e:
        raise ServerError(f"the body is not JSON: {e}") from None
    if not isinstance(body, dict):
        raise ServerError("the body must be a JSON object")
    return body


def guarded(handler: Handler) -> Handler:
    """Refusals as their status and body."""

    @functools.wraps(handler)
    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except ServerError as e:
            return answer(e.body(), e.status)

    return run
