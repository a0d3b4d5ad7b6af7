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
from collections.abc import AsyncIterator, Awaitable, Callable
from types import FrameType
from typing import Any

import numpy as np
import orjson
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from megarl.rollout.server.args import ServerArgs, as_dict
from megarl.rollout.server.errors import ControlError, ServerError
from megarl.rollout.server.generate import RequestParser, render
from megarl.rollout.server.runner import ModelRunner
from megarl.rollout.server.scheduler import PAUSE_MODES, Delivery, Scheduler
from megarl.rollout.server.sequence import GenerateCall
from megarl.rollout.server.text import TextTools, eos_token_ids
from megarl.rollout.server.updates import WeightUpdates
from megarl.rollout.server.weights import WeightStore

logger = logging.getLogger(__name__)
VERSION = "0.5.23+megarl"  # the SGLang release whose protocol this is
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or "
    "waiting requests, the operation will not be performed.)\n"
)
_HEALTH_TIMEOUT = 20.0
_STOP_TIMEOUT = 2.0
# the event loop and the scheduler share the GIL; the default of 5 ms would show in every step
_SWITCH_INTERVAL = 5e-4
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


class GenerationServer:
    """Owns the scheduler; every method named after a route handles it."""

    def __init__(self, args: ServerArgs) -> None:
        self.args = args
        self.runner = ModelRunner(args)
        self.text = TextTools(args.tokenizer_path or args.model_path)
        self.model_path, self.name = args.model_path, args.served_model_name or args.model_path
        self.updates = WeightUpdates(
            WeightStore(self.runner.model), self.runner.device, timeout=args.dist_timeout
        )
        self.parser = RequestParser(
            text=self.text, context_length=self.runner.context_length,
            vocab_size=self.runner.vocab_size,
            eos=eos_token_ids(args.model_path, self.runner.config, self.text.tokenizer),
            rng=np.random.default_rng(args.random_seed),
        )  # fmt: skip
        self.on_death: Callable[[], None] = lambda: None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.scheduler = Scheduler(
            self.runner, self.text, notify=self._notify, on_death=lambda: self.on_death(),
            threads=args.threads,
        )  # fmt: skip

    def start(self) -> None:
        """In the event loop that serves requests."""
        self.loop = asyncio.get_running_loop()
        self.scheduler.start()

    def _notify(self, deliveries: list[Delivery]) -> None:
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(_deliver, deliveries)

    def _check_alive(self) -> None:
        if not self.scheduler.alive:
            raise ServerError(self.scheduler.error or "the server is stopping", status=503)

    # ---- state

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.scheduler.alive else 503)

    async def health_generate(self, request: Request) -> Response:
        """Generates a token; a paused server is healthy without."""
        if self.scheduler.paused or not self.scheduler.alive:
            return await self.health(request)
        call, _ = self.parser.parse(
            {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "rid": "HEALTH_CHECK"}
        )
        self.scheduler.submit(call.sequences)
        done, _ = await asyncio.wait({call.done}, timeout=_HEALTH_TIMEOUT)
        self.scheduler.abort_sequences(call.sequences)
        return Response(status_code=200 if done and self.scheduler.alive else 503)

    async def ready(self, request: Request) -> Response:
        up = self.scheduler.alive and not self.scheduler.paused
        return Response(status_code=200 if up else 503)

    async def model_info(self, request: Request) -> Response:
        config = self.runner.config
        return answer(
            {
                "model_path": self.model_path, "served_model_name": self.name,
                "tokenizer_path": self.args.tokenizer_path or self.args.model_path,
                "is_generation": True, "preferred_sampling_params": None,
                "weight_version": self.scheduler.version, "load_format": "auto",
                "has_image_understanding": False, "has_audio_understanding": False,
                "model_type": config.model_type, "architectures": config.architectures,
            }
        )

    async def server_info(self, request: Request) -> Response:
        runner, scheduler = self.runner, self.scheduler
        launch = as_dict(self.args) | {
            "model_path": self.model_path, "context_length": runner.context_length,
            "dtype": str(runner.dtype).removeprefix("torch."), "device": runner.device.type,
        }  # fmt: skip
        state = {
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting), "paused": scheduler.paused,
            "weight_version": scheduler.version,
        }  # fmt: skip
        return answer(
            launch | {
                "status": "ready", "version": VERSION, "weight_version": scheduler.version,
                "max_total_num_tokens": runner.max_total_tokens,
                "internal_states": [launch | state],
            }
        )

    # ---- generation

    async def generate(self, request: Request) -> Response:
        self._check_alive()
        call, batched = self.parser.parse(await read_json(request))
        self.scheduler.submit(call.sequences)
        if call.stream:
            return StreamingResponse(self._stream(call, batched), media_type="text/event-stream")
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait({call.done, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not call.done.done():
            self.scheduler.abort_sequences(call.sequences)
            return Response(status_code=499)  # nobody reads it
        for s in call.sequences:
            if s.error:
                raise ServerError(s.error, status=500)
        answers = [render(s, len(s.output), True, self.text) for s in call.sequences]
        return answer(answers if batched else answers[0])

    async def _stream(self, call: GenerateCall, batched: bool) -> AsyncIterator[bytes]:
        """Cumulative chunks; Starlette closes the generator when the client is gone."""
        left = len(call.sequences)
        try:
            while left:
                seq, length, finished = await call.updates.get()
                left -= finished
                if finished and seq.error:
                    chunk: dict[str, Any] = ServerError(seq.error, status=500).body()
                else:
                    chunk = render(seq, length, finished, self.text)
                if batched:
                    chunk["index"] = seq.index
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            if left:
                self.scheduler.abort_sequences(call.sequences)

    async def abort_request(self, request: Request) -> Response:
        body = await read_json(request)
        rid, everything = body.get("rid"), bool(body.get("abort_all"))
        if not everything and (not isinstance(rid, str) or not rid):
            raise ServerError("abort_request needs rid, or abort_all=true")
        self.scheduler.abort(rid or "", abort_all=everything)
        return Response(status_code=200)

    async def pause_generation(self, request: Request) -> Response:
        mode = (await read_json(request, required=False)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise ServerError(f"mode={mode!r}: use one of {', '.join(PAUSE_MODES)}")
        await asyncio.wrap_future(self.scheduler.pause(mode))
        return answer({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: Request) -> Response:
        await read_json(request)  # SGLang requires a body; so does this server
        await asyncio.wrap_future(self.scheduler.resume())
        return answer({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, request: Request) -> Response:
        try:
            timeout = float(request.query_params.get("timeout", 0))
        except ValueError:
            raise ServerError("timeout must be a number of seconds") from None
        deadline = asyncio.get_running_loop().time() + timeout
        while not await asyncio.wrap_future(self.scheduler.call(self.scheduler.flush_cache)):
            if asyncio.get_running_loop().time() >= deadline:
                return PlainTextResponse("Flush cache failed.\n", status_code=400)
            await asyncio.sleep(0.05)
        return PlainTextResponse(_FLUSHED)

    # ---- weights

    async def begin_weight_update(self, request: Request) -> Response:
        body = await read_json(request, required=False)
        if body.get("selector", "all") != "all":
            raise ControlError(f"selector={body['selector']!r}: only 'all' is supported")
        await asyncio.wrap_future(self.scheduler.call(self.updates.begin))
        return answer({"success": True, "message": "Success"})

    async def end_weight_update(self, request: Request) -> Response:
        await asyncio.wrap_future(self.scheduler.call(self.updates.end))
        return answer({"success": True, "message": "Success"})

    async def init_weights_update_group(self, request: Request) -> Response:
        body = await read_json(request)
        await asyncio.to_thread(self.updates.init_group, body)
        return answer(
            {"success": True, "message": "Succeeded to initialize custom process group."}
        )

    async def destroy_weights_update_group(self, request: Request) -> Response:
        name = (await read_json(request, required=False)).get("group_name")
        job = self.scheduler.call(functools.partial(self.updates.destroy_group, name))
        await asyncio.wrap_future(job)
        return answer({"success": True, "message": "Succeeded to destroy custom process group."})

    async def update_weights_from_distributed(self, request: Request) -> Response:
        body = await read_json(request)
        done = await self._update(body, lambda: self.updates.from_distributed(body))
        return answer(done("Succeeded to update parameter online."))

    async def update_weights_from_disk(self, request: Request) -> Response:
        body = await read_json(request)
        path = body.get("model_path")
        if not isinstance(path, str):
            raise ControlError("model_path must be a string", num_paused_requests=0)
        if body.get("load_format") not in (None, "auto", "safetensors"):
            raise ControlError(
                f"load_format={body['load_format']!r}: use null", num_paused_requests=0
            )
        for flag in ("is_async", "keep_pause"):
            if body.get(flag):
                raise ControlError(f"{flag}=true is not supported", num_paused_requests=0)
        try:
            done = await self._update(body, lambda: self.updates.store.load_directory(path))
        except ControlError as e:
            e.extra.setdefault("num_paused_requests", 0)
            raise
        self.model_path = self.name = path
        return answer(done("Succeeded to update model weights.") | {"num_paused_requests": 0})

    async def _update(
        self, body: dict[str, Any], load: Callable[[], None]
    ) -> Callable[[str], dict[str, Any]]:
        """Runs `load` between requests; returns what makes the answer out of its message."""
        version = body.get("weight_version")
        flush = body.get("flush_cache", True)

        def run() -> None:
            load()
            if version is not None:
                self.scheduler.set_version(str(version))
            if flush and not self.scheduler.drop_cache():
                raise ControlError(
                    "the weights are updated, but the cache cannot be flushed while requests hold "
                    "it: pause with mode 'abort' or 'retract', or send flush_cache=false"
                )

        job = self.scheduler.call_exclusive(run, abort_all=bool(body.get("abort_all_requests")))
        await asyncio.wrap_future(job)
        suffix = f" Weight version updated to {version}." if version is not None else ""
        return lambda message: {"success": True, "message": message + suffix}

    async def update_weight_version(self, request: Request) -> Response:
        body = await read_json(request)
        version = body.get("new_version")
        if version is None:
            raise ControlError("new_version is missing")
        if body.get("abort_all_requests", True):
            self.scheduler.abort("", abort_all=True)
        job = self.scheduler.call(functools.partial(self.scheduler.set_version, str(version)))
        await asyncio.wrap_future(job)
        message = f"Weight version updated to {version}"
        return answer({"success": True, "message": message, "new_version": version})

    async def weights_checker(self, request: Request) -> Response:
        action = (await read_json(request, required=False)).get("action", "checksum")
        if action != "checksum":
            raise ControlError(f"action={action!r}: only 'checksum' is supported")
        job = self.scheduler.call(self.updates.store.checksums)
        sums = await asyncio.wrap_future(job)
        return answer({"success": True, "message": "Success.", "ranks": [{"checksums": sums}]})

    async def get_weights_by_name(self, request: Request) -> Response:
        body = await read_json(request, required=False) or dict(request.query_params)
        tensor = self.updates.store.get(str(body.get("name")))
        if tensor is None:
            raise ServerError(f"Get parameter by name failed: no parameter {body.get('name')!r}")
        rows = int(body.get("truncate_size", 100))
        job = self.scheduler.call(lambda: tensor[:rows].float().cpu().tolist())
        return answer(await asyncio.wrap_future(job))


def _deliver(deliveries: list[Delivery]) -> None:
    for seq, length, finished in deliveries:
        seq.call.deliver(seq, length, finished)


async def _disconnected(request: Request) -> None:
    """Returns when the client has closed its connection (its body is read already)."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


_ROUTES: dict[str, tuple[str, ...]] = {
    "health": ("GET",), "health_generate": ("GET",), "ready": ("GET",), "model_info": ("GET",),
    "server_info": ("GET",), "generate": ("POST", "PUT"), "abort_request": ("POST",),
    "pause_generation": ("POST",), "continue_generation": ("POST",),
    "flush_cache": ("GET", "POST"), "begin_weight_update": ("POST",),
    "end_weight_update": ("POST",), "init_weights_update_group": ("POST",),
    "destroy_weights_update_group": ("POST",), "update_weights_from_distributed": ("POST",),
    "update_weights_from_disk": ("POST",), "update_weight_version": ("POST",),
    "weights_checker": ("GET", "POST"), "get_weights_by_name": ("GET", "POST"),
}  # fmt: skip
_ALIASES = {"get_model_info": "model_info", "get_server_info": "server_info"}


def build_app(server: GenerationServer) -> FastAPI:
    app = FastAPI(title="megarl generation server", docs_url=None, redoc_url=None, openapi_url=None)
    for path, methods in _ROUTES.items():
        app.add_route(f"/{path}", _guarded(getattr(server, path)), methods=list(methods))
    for alias, path in _ALIASES.items():
        app.add_route(f"/{alias}", _guarded(getattr(server, path)), methods=list(_ROUTES[path]))

    async def unknown(request: Request) -> Response:
        have = ", ".join(f"/{p}" for p in _ROUTES)
        path = request.url.path
        message = f"{request.method} {path} is not supported by the embedded server; it has {have}"
        return answer({"error": {"message": message}}, 404)

    app.add_route("/{path:path}", unknown, methods=["GET", "POST", "PUT", "DELETE", "PATCH"])
    return app


def _guarded(handler: Handler) -> Handler:
    """Refusals as their status and body."""

    @functools.wraps(handler)
    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except ServerError as e:
            return answer(e.body(), e.status)

    return run


class _Uvicorn(uvicorn.Server):
    """Ends on the first signal with status 0, after the requests in flight were aborted."""

    def __init__(self, config: uvicorn.Config, server: GenerationServer) -> None:
        super().__init__(config)
        self._server = server

    async def startup(self, sockets: Any = None) -> None:
        self._server.start()
        await super().startup(sockets)
        if self.started:
            host, port = self._server.args.host, self._server.args.port
            logger.info("ready on http://%s:%d", host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        self.stopped = await asyncio.to_thread(self._server.scheduler.stop, _STOP_TIMEOUT)
        await super().shutdown(sockets)


def serve(args: ServerArgs) -> int:
    """Loads the model and serves until SIGTERM or SIGINT; the exit status."""
    sys.setswitchinterval(_SWITCH_INTERVAL)
    server = GenerationServer(args)
    config = uvicorn.Config(
        build_app(server), host=args.host, port=args.port, log_level="warning", access_log=False,
        # clients keep connections between steps; closing an idle one races with its next request
        timeout_keep_alive=600, timeout_graceful_shutdown=2, backlog=4096, lifespan="off",
    )  # fmt: skip
    http = _Uvicorn(config, server)
    server.on_death = lambda: setattr(http, "should_exit", True)
    http.run()
    status = 0 if http.started and not server.scheduler.error else 1
    if not getattr(http, "stopped", True):
        # the scheduler waits in a collective whose other members are gone; nothing ends that wait
        logging.shutdown()
        os._exit(status)
    return status
