"""Routes and life cycle: the HTTP face of the scheduler.

Handlers are plain Starlette endpoints on the FastAPI app: bodies are read and answers written with
orjson, without a model validation per token.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from transformers.utils.logging import disable_progress_bar

from megarl.server.access import Access
from megarl.server.args import ServerArgs
from megarl.server.core import ServerCore
from megarl.server.endpoints import Endpoints
from megarl.server.replies import answer, guarded
from megarl.server.weight_endpoints import WeightEndpoints
from megarl.utils.http import in_thread
from megarl.utils.job_token import job_token

logger = logging.getLogger(__name__)
_STOP_TIMEOUT = 2.0
# the event loop and the scheduler share the GIL; the default of 5 ms would show in every step
_SWITCH_INTERVAL = 5e-4

_ROUTES: dict[str, tuple[str, ...]] = {
    "health": ("GET",), "ready": ("GET",), "model_info": ("GET",),
    "server_info": ("GET",), "generate": ("POST", "PUT"), "abort_request": ("POST",),
    "pause_generation": ("POST",), "continue_generation": ("POST",),
    "flush_cache": ("GET", "POST"), "begin_weight_update": ("POST",),
    "end_weight_update": ("POST",), "init_weights_update_group": ("POST",),
    "destroy_weights_update_group": ("POST",), "update_weights_from_distributed": ("POST",),
    "update_weights_from_tensor": ("POST",), "update_weights_from_disk": ("POST",),
    "update_weight_version": ("POST",), "load_lora_adapter": ("POST",),
    "unload_lora_adapter": ("POST",),
    "weights_checker": ("GET", "POST"),
}  # fmt: skip
# what shows no weights and changes nothing but by computing
_OPEN = {"health", "ready", "model_info", "server_info", "generate"}


def build_app(core: ServerCore, access: Access) -> FastAPI:
    app = FastAPI(title="megarl generation server", docs_url=None, redoc_url=None, openapi_url=None)
    parts = (Endpoints(core), WeightEndpoints(core))
    for path, methods in _ROUTES.items():
        handler = next(getattr(p, path) for p in parts if hasattr(p, path))
        check = functools.partial(access.check, control=path not in _OPEN)
        app.add_route(f"/{path}", guarded(handler, check), methods=list(methods))

    async def unknown(request: Request) -> Response:
        have = ", ".join(f"/{p}" for p in _ROUTES)
        path = request.url.path
        message = f"{request.method} {path} is not supported by the embedded server; it has {have}"
        return answer({"error": {"message": message}}, 404)

    app.add_route("/{path:path}", unknown, methods=["GET", "POST", "PUT", "DELETE", "PATCH"])
    return app


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
        """uvicorn would raise the signal again at the end; a server told to end ends with 0."""
        self.stop()

    async def shutdown(self, sockets: Any = None) -> None:
        # the default pool may be busy with long texts
        stop = in_thread(self.core.scheduler.stop, _STOP_TIMEOUT)
        self.thread_ended = await asyncio.wrap_future(stop)
        await super().shutdown(sockets)


def serve(args: ServerArgs) -> int:
    """Loads the model and serves until SIGTERM or SIGINT; the exit status."""
    sys.setswitchinterval(_SWITCH_INTERVAL)
    disable_progress_bar()  # stdout is a log file
    http = _HttpServer(args)
    http.run()
    status = 0 if http.started and not http.core.scheduler.error else 1
    if http.started and (http.core.updates.joins or not http.thread_ended):
        # somebody waits for other members of a group, who are gone; nothing ends that wait
        logging.shutdown()
        os._exit(status)
    return status
