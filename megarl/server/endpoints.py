"""Routes for state, generation and pause: every method is the route of its name, see app.py."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from megarl.server.core import ServerCore
from megarl.server.protocol import (
    GenerateBody,
    ServerError,
    answer,
    is_waited_for,
    read,
    read_chat,
    read_json,
    read_prompts,
)
from megarl.server.scheduler import PAUSE_MODES
from megarl.server.sequence import ServedSequence, chat_answer, render

VERSION = "0.5.23+megarl"  # the SGLang release whose protocol this is
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or "
    "waiting requests, the operation will not be performed.)\n"
)


class Endpoints:
    """Answers the calls that ask for state or tokens, or that pause generation."""

    def __init__(self, core: ServerCore) -> None:
        self.core = core
        self._rids: set[str] = set()  # of the sequences under way

    async def health(self, request: Request) -> Response:
        """Answers 200 while the generation loop runs, else 503."""
        return Response(status_code=200 if self.core.scheduler.alive else 503)

    async def ready(self, request: Request) -> Response:
        """Answers 200 while the server generates, 503 while it is paused or dead."""
        up = self.core.scheduler.alive and not self.core.scheduler.paused
        return Response(status_code=200 if up else 503)

    async def model_info(self, request: Request) -> Response:
        """Answers which model is served, with which version of its weights."""
        config = self.core.runner.config
        return answer(
            {
                "model_path": self.core.model_path,
                "served_model_name": self.core.model_path,
                "weight_version": self.core.scheduler.version,
                "model_type": config.model_type,
                "architectures": config.architectures,
            }
        )

    async def server_info(self, request: Request) -> Response:
        """Answers with the flags, the cache's size and what is running now."""
        runner, scheduler = self.core.runner, self.core.scheduler
        state = {
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "paused": scheduler.paused,
            "memory_bytes": self.core.occupation.usage(),
            "released": sorted(self.core.occupation.released),
        }
        return answer(
            asdict(self.core.args)
            | {
                "model_path": self.core.model_path,
                "context_length": runner.context_length,
                "dtype": str(runner.dtype).removeprefix("torch."),
                "device": runner.device.type,
                "tp_size": 1,
                "version": VERSION,
                "weight_version": scheduler.version,
                "weights_id": self.core.updates.weights_id,
                "max_total_num_tokens": runner.max_total_tokens,
                "internal_states": [state],
            }
        )

    # ---- generation

    async def generate(self, request: Request) -> Response:
        """Answers with what was generated: one object, or a list for a list of prompts. A client
        that goes away aborts its sequences."""
        prompts, batched = read_prompts(await read_json(request))
        answers = [render(s, self.core.text) for s in await self._written(request, prompts)]
        return answer(answers if batched else answers[0])

    async def chat_completions(self, request: Request) -> Response:
        """Answers a chat as OpenAI's API does, with the text of one message."""
        body = await read_json(request)
        messages, params = read_chat(body)
        ids = self.core.text.chat_ids(messages)
        prompt = read(GenerateBody, {"input_ids": ids, "sampling_params": params})
        (sequence,) = await self._written(request, [prompt])
        name = body.get("model") or self.core.model_path
        return answer(chat_answer(sequence, self.core.text, name))

    async def _written(self, request: Request, prompts: list[GenerateBody]) -> list[ServedSequence]:
        """Returns the sequences of a request once they have ended. A client that goes away aborts
        them."""
        core = self.core
        core.check_alive()
        sequences = core.sequences(prompts)
        for prompt in prompts:
            core.updates.adapters.check_named(prompt.lora_path)
        rids = [s.rid for s in sequences]
        if len(set(rids)) < len(rids) or not self._rids.isdisjoint(rids):
            raise ServerError(f"Duplicate request ID: of {rids}, one is under way")
        self._rids.update(rids)
        try:
            core.scheduler.submit(sequences)
            if not await is_waited_for(request, asyncio.gather(*(s.done for s in sequences))):
                core.scheduler.abort(set(sequences).__contains__)
                raise ClientDisconnect
        finally:
            self._rids.difference_update(rids)
        for s in sequences:
            if s.error:
                raise ServerError(s.error, status=500)
        return sequences

    async def abort_request(self, request: Request) -> Response:
        """Aborts the sequences whose rid begins with `rid`, or all."""
        body = await read_json(request)
        everything = bool(body.get("abort_all"))
        rid = "" if everything else body.get("rid")
        if not isinstance(rid, str) or not (rid or everything):
            raise ServerError("abort_request needs rid, or abort_all=true")
        self.core.scheduler.abort(lambda s: s.rid.startswith(rid))
        return Response(status_code=200)

    async def pause_generation(self, request: Request) -> Response:
        """Stops generation in one of PAUSE_MODES; answers when it has stopped."""
        mode = (await read_json(request, required=False)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise ServerError(f"mode={mode!r}: use one of {', '.join(PAUSE_MODES)}")
        await self.core.run(self.core.scheduler.pause, mode)
        return answer({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: Request) -> Response:
        """Goes on after a pause."""
        await read_json(request)  # SGLang requires a body; so does this server
        await self.core.run(self.core.scheduler.resume)
        return answer({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, request: Request) -> Response:
        """Gives the KV memory back; answers 400 while sequences hold it."""
        if await self.core.run(self.core.scheduler.flush_cache):
            return PlainTextResponse(_FLUSHED)
        return PlainTextResponse("Flush cache failed.\n", status_code=400)
