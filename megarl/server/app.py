"""Routes, who may call them, and life cycle: the HTTP face of the scheduler.

A page in a browser on the server's machine can send requests to it, directly or under a name of its
own that resolves to this machine. Both show in headers that pages cannot choose: Origin and Host. A
caller that knows the job's token is no such page.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import ipaddress
import logging
import os
import secrets
import socket
import sys
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from transformers.utils.logging import disable_progress_bar

from megarl.server.args import ServerArgs
from megarl.server.core import ServerCore
from megarl.server.endpoints import Endpoints, WeightEndpoints
from megarl.server.protocol import ServerError, answer, guarded
from megarl.utils.env import JOB_TOKEN, is_loopback, job_token
from megarl.utils.http import in_thread

logger = logging.getLogger(__name__)
_STOP_TIMEOUT = 2.0
# the event loop and the scheduler share the GIL; the default of 5 ms would show in every step
_SWITCH_INTERVAL = 5e-4

# an endpoint's route has its name but for these
_PATHS = {"chat_completions": "/v1/chat/completions"}
# its method is POST but for these
_METHODS = {
    **dict.fromkeys(("health", "ready", "model_info", "server_info", "metrics"), ("GET",)),
    **dict.fromkeys(("flush_cache", "weights_checker"), ("GET", "POST")),
}
# endpoints that neither show nor change anything of the server but its requests
_OPEN = {"health", "ready", "model_info", "server_info", "generate", "chat_completions"}
_WILDCARDS = ("", "0.0.0.0", "::")


class Access:
    """Checks who calls. host: the address the server is bound to. token: the job's; with None every
    program may call everything, but a browser's page may not."""

    def __init__(self, host: str, token: str | None) -> None:
        self._token, self._everywhere = token, host in _WILDCARDS
        self._host, self._machine = host.strip("[]").lower(), _label(socket.gethostname().lower())
        self._local = is_loopback(self._host)

    def check(self, request: Request, *, control: bool) -> None:
        """Raises ServerError with 401, 403 or 415 for a call that is refused. control: the call
        changes the server, or shows its weights."""
        headers = request.headers
        known = self._knows_token(headers.get("authorization", ""))
        if not known:
            self._check_browser(headers.get("host"), headers.get("origin"))
            if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
                raise ServerError("requests of web pages are refused", status=403)
        if not control:
            return
        if self._token is not None and not known:
            raise ServerError(
                f"{request.url.path} is for this server's job alone: send its token, "
                f"`Authorization: Bearer ...` (a job takes it from the environment's {JOB_TOKEN})",
                status=401,
            )
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if has_body and kind != "application/json":
            raise ServerError(
                f"Content-Type: {kind or '(none)'}; send the body as application/json", status=415
            )

    def _knows_token(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        return (
            self._token is not None
            and scheme.lower() == "bearer"
            and secrets.compare_digest(given.strip().encode(), self._token.encode())
        )

    def _check_browser(self, host: str | None, origin: str | None) -> None:
        if host is not None and not self._is_own(host):
            raise ServerError(
                f"Host: {host} is not this server's; call it by its IP address, by localhost or "
                f"by its machine's name, or give it and the job one {JOB_TOKEN}",
                status=403,
            )
        if origin is not None and origin.lower().partition("://")[2] != (host or "").lower():
            raise ServerError(f"Origin: {origin}; requests of web pages are refused", status=403)

    def _is_own(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if name in ("localhost", self._host):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:  # the machine's name; with any domain, unless the server is local
            return _label(name) == self._machine and (name == self._machine or not self._local)
        # only a page served at this address has the address for its name
        return address.is_loopback or self._everywhere


def _label(name: str) -> str:
    return name.partition(".")[0]


def build_app(core: ServerCore, access: Access) -> Starlette:
    """Returns the app with a route for every endpoint, each behind `access`."""
    routes = []
    for part in (Endpoints(core), WeightEndpoints(core)):
        for name, handler in inspect.getmembers(part, inspect.iscoroutinefunction):
            if not name.startswith("_"):
                check = functools.partial(access.check, control=name not in _OPEN)
                methods = _METHODS.get(name, ("POST",))
                path = _PATHS.get(name, f"/{name}")
                routes.append(Route(path, guarded(handler, check), methods=methods))
    have = ", ".join(route.path for route in routes)

    async def unknown(request: Request) -> Response:
        path = request.url.path
        message = f"{request.method} {path} is not supported by the embedded server; it has {have}"
        return answer({"error": {"message": message}}, 404)

    every = ("GET", "POST", "PUT", "DELETE", "PATCH")
    return Starlette(routes=[*routes, Route("/{path:path}", unknown, methods=every)])


class _HttpServer(uvicorn.Server):
    """Ends on the first signal, after the requests in flight were aborted."""

    def __init__(self, args: ServerArgs) -> None:
        self.core = ServerCore(args, on_death=self.stop)
        self.thread_ended = False
        config = uvicorn.Config(
            build_app(self.core, Access(args.host, job_token())),
            host=args.host,
            port=args.port,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            backlog=4096,
            # clients keep connections between steps; closing an idle one races with its next use
            timeout_keep_alive=600,
        )
        super().__init__(config)

    def stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: Any = None) -> None:
        self.core.start()
        await super().startup(sockets)
        if self.started:
            logger.info("ready on http://%s:%d", self.config.host, self.config.port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends with status 0; uvicorn's own handler would raise the signal again at the end."""
        self.stop()

    async def shutdown(self, sockets: Any = None) -> None:
        # the default pool may be busy with long texts
        stop = in_thread(self.core.scheduler.stop, _STOP_TIMEOUT)
        self.thread_ended = await asyncio.wrap_future(stop)
        await super().shutdown(sockets)


def serve(args: ServerArgs) -> int:
    """Loads the model and serves until SIGTERM or SIGINT; returns the exit status."""
    sys.setswitchinterval(_SWITCH_INTERVAL)
    disable_progress_bar()  # stdout is a log file
    http = _HttpServer(args)
    http.run()
    status = 0 if http.started and not http.core.scheduler.error else 1
    if http.started and (http.core.updates.joins or not http.thread_ended):
        # a thread waits for members of a group that are gone; nothing ends that wait
        logging.shutdown()
        os._exit(status)
    return status
