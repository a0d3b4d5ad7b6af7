"""Has a process of its own answer every request at once, for what measures a client."""

from __future__ import annotations

import asyncio
import json
import multiprocessing as mp
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web


def stub(port: Any, group: int, answer: int) -> None:
    """Serves in this process; sends its port through the pipe `port`."""
    entries = [[-1.0, 5 + i, None] for i in range(answer)]
    meta = {
        "finish_reason": {"type": "length"},
        "weight_version": "default",
        "output_token_logprobs": entries,
    }
    one = {"output_ids": [t for _, t, _ in entries], "meta_info": meta}
    raw = json.dumps([one] * group).encode()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=raw, content_type="application/json")

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": "default"})

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        for path in ("/health", "/model_info"):
            app.router.add_get(path, info)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


@contextmanager
def stub_server(*, group: int, answer: int) -> Iterator[str]:
    """Yields the address of a stub whose answers are `group` samples of `answer` tokens."""
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=stub, args=(theirs, group, answer))
    process.daemon = True
    process.start()
    try:
        assert ours.poll(60), "the stub did not start"
        yield f"127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()
