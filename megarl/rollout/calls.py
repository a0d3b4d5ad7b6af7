"""Calls servers from an event loop, with JSON over HTTP. utils.http has the rules of all calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from megarl.utils.http import (
    LOOK_EVERY,
    HttpError,
    accepted,
    authorization,
    decode_answer,
    retry_after,
    shown,
)

CONNECT_TIMEOUT = 30.0  # of one connection


def open_session(
    *, keeps_connections: bool = False, key: str | None = None
) -> aiohttp.ClientSession:
    """Returns a session for `call_server`. A kept connection may end just when a call begins on
    it, which then fails: a control call has a connection of its own. key: shown to servers ("" for
    none), in place of the job's token."""
    connector = aiohttp.TCPConnector(limit=0, force_close=not keeps_connections)
    return aiohttp.ClientSession(connector=connector, headers=authorization(key))


async def call_server(
    session: aiohttp.ClientSession,
    method: str,
    address: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    timeout: float | None,
) -> Any:
    """Returns and raises what utils.http.call_json does. address: host:port, or the beginning of a
    URL. timeout: in seconds; None waits for ever, once it is connected."""
    limit = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT)
    try:
        url = f"{address}{path}" if "://" in address else f"http://{address}{path}"
        async with session.request(method, url, json=body, timeout=limit) as response:
            status, raw = response.status, await response.read()
            rest = retry_after(response.headers.get("Retry-After"))
    except TimeoutError as e:
        seconds = CONNECT_TIMEOUT if timeout is None else timeout
        raise HttpError(address, path, f"gave no answer within {seconds:g} s") from e
    except (aiohttp.ClientError, OSError) as e:
        reason = f"failed: {type(e).__name__}: {shown(str(e)) if str(e) else ''}".rstrip(": ")
        raise HttpError(address, path, reason) from e
    return accepted(address, path, status, decode_answer(raw), retry_after=rest)


async def while_alive(
    answer: Awaitable[Any], look: Callable[[], Awaitable[Any]], patience: float
) -> Any:
    """Returns a server's answer or the HttpError of its call. While it keeps us waiting, `look`
    asks for a sign of life; where that brings none in `patience` s, its error is returned."""
    waits = [asyncio.ensure_future(answer)]
    try:
        while not (await asyncio.wait(waits[:1], timeout=LOOK_EVERY))[0]:
            begun = time.monotonic()
            waits[1:] = [asyncio.ensure_future(look())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            late = time.monotonic() - begun > patience + LOOK_EVERY  # we ourselves: a blocked loop
            error = waits[1].exception() if waits[1].done() else None
            silent = isinstance(error, HttpError) and error.status is None
            if silent and not late and not waits[0].done():
                return error
        return waits[0].result()
    except HttpError as e:
        return e
    finally:
        for wait in waits:
            wait.cancel()
