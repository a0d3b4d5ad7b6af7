"""Routes and life cycle: the HTTP face of the scheduler.

Handlers are plain Starlette endpoints: bodies are read and answers written with orjson, without a
model validation per token.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import sys
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from transformers.utils.logging import disable_progress_bar

from megarl.server.access import Access
from megarl.server.args import ServerArgs
from megarl.server.core import ServerCore
from megarl.server.endpoints import Endpoints
from megarl.server.replies import answer, guarded
from megarl.server.weight_endpoints import WeightEndpoints
from megarl.utils.env import job_token
from megarl.utils.http import in_thread

logger = logging.getLogger(__name__)
_STOP_TIMEOUT = 2.0
# the event loop and the scheduler share the GIL; the default of 5 ms would show in every step
_SWITCH_INTERVAL = 5e-4

# an endpoint's route has its name but for these
_PATHS = {"chat_completions": "/v1/chat/completions", "v1_loads": "/v1/loads"}
# its method is POST but for these
_METHODS = {
    **dict.fromkeys(("health", "ready", "model_info", "server_info", "v1_loads"), ("GET",)),
    **dict.fromkeys(("flush_cache", "weights_checker"), ("GET", "POST")),
}
# endpoints that neither show nor change anything of the server but its requests
_OPEN = {
    *("health", "ready", "model_info", "server_info", "v1_loads"),
    *("generate", "chat_completions"),
}


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
