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
    """Returns a session for `call_server`. Control calls do not keep connections: a server may end
    a kept one just as a call begins, which then fails. key: what servers are shown in place of the
    job's token, "" for nothing."""
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
    url = f"{address}{path}" if "://" in address else f"http://{address}{path}"
    exchange = asyncio.ensure_future(_exchange(session, method, url, body))
    try:
        if not await _ended(exchange, timeout):
            reason = f"gave no answer within {timeout:g} s"
            raise HttpError(address, path, reason) from TimeoutError()
        status, raw, rest = exchange.result()
    except TimeoutError as e:
        reason = f"took no connection within {CONNECT_TIMEOUT:g} s"
        raise HttpError(address, path, reason) from e
    except (aiohttp.ClientError, OSError) as e:
        reason = f"failed: {type(e).__name__}: {shown(str(e)) if str(e) else ''}".rstrip(": ")
        raise HttpError(address, path, reason) from e
    finally:
        exchange.cancel()
    return accepted(address, path, status, decode_answer(raw), retry_after=retry_after(rest))


async def _exchange(
    session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None
) -> tuple[int, bytes, str | None]:
    limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
    async with session.request(
        method, url, json=body, timeout=limit, allow_redirects=False
    ) as response:
        return response.status, await response.read(), response.headers.get("Retry-After")


async def _ended(exchange: asyncio.Future[Any], timeout: float | None) -> bool:
    """Returns whether an exchange has ended, after `timeout` s at most. Where the loop was blocked
    meanwhile, what has come is looked at first: that time is not the server's."""
    begun = time.monotonic()
    await asyncio.wait({exchange}, timeout=timeout)
    if timeout is not None and time.monotonic() - begun > timeout + LOOK_EVERY:
        await asyncio.wait({exchange}, timeout=LOOK_EVERY)
    return exchange.done()


async def while_alive(answer: Awaitable[Any], look: Callable[[], Awaitable[Any]]) -> Any:
    """Returns a server's answer or the HttpError of its call. While it keeps us waiting, `look`
    asks for a sign of life; where that brings none, its error is returned."""
    waits = [asyncio.ensure_future(answer)]
    try:
        while not (await asyncio.wait(waits[:1], timeout=LOOK_EVERY))[0]:
            waits[1:] = [asyncio.ensure_future(look())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            error = waits[1].exception() if waits[1].done() else None
            silent = isinstance(error, HttpError) and error.status is None
            if silent and not waits[0].done():
                return error
        return waits[0].result()
    except HttpError as e:
        return e
    finally:
        for wait in waits:
            wait.cancel()
