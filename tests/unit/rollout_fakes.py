"""What the rollout tests need in place of servers: an engine without any, and an SGLang double."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from aiohttp import web

from megarl.api.batch import Padded
from megarl.api.inference import RolloutWorkflow
from megarl.api.tokens import concat_padded
from megarl.rollout.executor import RolloutExecutor
from megarl.rollout.loop_thread import LoopThread


class FakeEngine:
    """Only what the executor and workflows read: a version."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def get_version(self) -> int:
        return self.version


def prepare_batch(executor: RolloutExecutor, *args: Any, **kw: Any) -> Padded:
    """Returns one training batch as one padded dict."""
    return concat_padded(executor.prepare_parts(*args, **kw))


def trajectory(tokens: list[int], *, version: int, reward: float = 0.0, n: int = 1):
    """A batch [n, 1 + len(tokens)]: one prompt token, then `tokens`."""
    ids = torch.tensor([[9, *tokens]] * n)
    mask = torch.ones_like(ids, dtype=torch.bool)
    loss_mask = mask.clone()
    loss_mask[:, 0] = False
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "loss_mask": loss_mask,
        "logprobs": -loss_mask.float(),
        "versions": torch.where(loss_mask, version, -1).to(torch.int32),
        "rewards": torch.full((n,), reward),
    }


class Scripted(RolloutWorkflow):
    """Row keys steer it: `sleep` s, `error` to raise, `reject`, `n` samples, `age` of its weights
    (the first time). The trajectory's tokens are [row_id].
    """

    def __init__(self) -> None:
        self.running = self.peak = 0
        self.started: list[tuple[int, int, int]] = []  # (row_id, version, episode_id)

    async def arun_episode(self, engine: Any, data: dict[str, Any]):
        version = engine.get_version()
        self.started.append((data["row_id"], version, data["episode_id"]))
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await asyncio.sleep(data.get("sleep", 0.0))
        finally:
            self.running -= 1
        if "error" in data:
            raise data["error"]
        if data.get("reject"):
            return None
        again = sum(row_id == data["row_id"] for row_id, _, _ in self.started) > 1
        age = 0 if again else data.get("age", 0)
        return trajectory([data["row_id"]], version=version - age, n=data.get("n", 1))


def rows(count: int, **special: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows 0..count-1; special: r3={...} adds keys to row 3."""
    return [{"row_id": i} | special.get(f"r{i}", {}) for i in range(count)]


def row_ids(batch: dict[str, torch.Tensor]) -> list[int]:
    return batch["input_ids"][:, 1].tolist()


class FakeServer:
    """Speaks /generate, pause, continue, /health and /model_info. It writes tokens 100, 101, ...
    (100 + position of the token in the sequence), logprob -token, and ends at max_new_tokens.

    abort_after: number of tokens after which the next requests are aborted, one entry a sample.
    versions: the weight version of the next requests, `weight_version` after them.
    fail: HTTP answers (status, body, perhaps headers) or "drop" (the connection) for the next
        /generate calls. As SGLang does, it keeps the rids of a dropped one for a while.
    written: tokens that a request has when an abort ends it, before `delay` does; None: no abort
        ends it.
    """

    def __init__(self) -> None:
        self.loop = LoopThread("fake-server")
        self.requests: list[dict[str, Any]] = []
        self.calls: list[tuple[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.fail: list[Any] = []
        self.abort_after: list[int | None] = []
        self.versions: list[str] = []
        self.weight_version = "default"
        self.healthy = True
        self.pause_answer: Any = None
        self.delay = 0.0
        self.written: int | None = None
        self.rids: set[str] = set()  # under way
        self.aborted: set[str] = set()
        self.hang = False  # no /model_info and no flush is answered
        self.busy = 0  # flushes that it refuses
        self.info: dict[str, Any] = {}
        self.address = self.loop.run(self._start(), timeout=60)

    async def _start(self) -> str:
        app = web.Application(middlewares=[self._note])
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._info)
        app.router.add_post("/set_version", self._set_version)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/flush_cache", self._flush)
        memory = ("release_memory_occupation", "resume_memory_occupation")
        app.router.add_post("/abort_request", self._abort)
        for name in ("pause_generation", "continue_generation", *memory):
            app.router.add_post(f"/{name}", self._control)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, shutdown_timeout=0.1).start()
        host, port = self._runner.addresses[0]
        return f"{host}:{port}"

    def close(self) -> None:
        """May be called twice."""
        if self.loop.alive:
            self.loop.run(self._runner.cleanup(), timeout=60)
            self.loop.close()

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.authorizations.append(request.headers.get("Authorization"))
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _info(self, _: web.Request) -> web.Response:
        while self.hang:
            await asyncio.sleep(0.01)
        return web.json_response({"weight_version": self.weight_version})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _flush(self, request: web.Request) -> web.Response:
        self.calls.append((request.path, await request.json()))
        while self.hang:
            await asyncio.sleep(0.01)
        self.busy -= 1
        return web.Response(text="Cache", status=400 if self.busy >= 0 else 200)

    async def _set_version(self, _: web.Request) -> web.Response:
        """For tests in other processes: version 1."""
        self.weight_version = "1"
        return web.json_response({})

    async def _control(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append((request.path, body))
        if request.path == "/pause_generation" and body["mode"] == "abort":
            self.aborted |= self.rids
        if self.pause_answer is not None:
            return self.pause_answer
        return web.json_response({"status": "ok"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if twice := self.rids.intersection(body["rid"]):
            return web.json_response({"message": f"Duplicate request ID {twice}"}, status=400)
        if self.fail:
            failure = self.fail.pop(0)
            if failure == "drop":
                self.rids.update(body["rid"])
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            status, said, *headers = failure
            return web.json_response(said, status=status, headers=headers[0] if headers else {})
        until = asyncio.get_running_loop().time() + self.delay
        self.rids.update(body["rid"])
        try:
            await self._write(body["rid"], until)
        finally:
            self.rids.difference_update(body["rid"])
        if self.versions:
            self.weight_version = self.versions.pop(0)
        answers = [
            self.answer(rid, ids, params)
            for rid, ids, params in zip(body["rid"], body["input_ids"], body["sampling_params"])
        ]
        return web.json_response(answers)

    async def _write(self, rids: list[str], until: float) -> None:
        """Returns at the loop's time `until`, or once all of a request are aborted."""
        while (left := until - asyncio.get_running_loop().time()) > 0:
            if self.written is not None and self.aborted.issuperset(rids):
                return
            await asyncio.sleep(min(left, 0.01))

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append((request.path, body))
        self.aborted |= self.rids & {body["rid"]}
        return web.Response()

    def answer(self, rid: str, ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        count = params["max_new_tokens"]
        finish: dict[str, Any] = {"type": "length", "length": count}
        if rid in self.aborted and self.written is not None:
            count, finish = self.written, {"type": "abort", "message": "Aborted"}
        if self.abort_after and (limit := self.abort_after.pop(0)) is not None:
            count, finish = limit, {"type": "abort", "message": "Aborted"}
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": len(ids),
            "weight_version": self.weight_version,
        }
        tokens = [100 + len(ids) + i for i in range(count)]
        if tokens:
            meta["output_token_logprobs"] = [[-float(t), t, None] for t in tokens]
            meta["weight_versions"] = [{"version": self.weight_version, "start": 0, "end": count}]
        return {"text": "", "output_ids": tokens, "meta_info": meta}
