"""Routes for state, generation, pause and weights: every method is the route of its name, see
app.py."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from megarl.observability.prometheus import MEDIA_TYPE, exposition
from megarl.server.core import ServerCore
from megarl.server.protocol import (
    MAX_VERSION_LENGTH,
    ControlError,
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
from megarl.server.updates import group_name
from megarl.utils.http import authorization, in_thread
from megarl.weight_sync.receiver import LOADER

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
        # slices come through a store that is read with the job's token
        knows = request.headers.get("authorization") == authorization().get("Authorization")
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
                "custom_weight_loader": [LOADER] if knows else [],
                "max_total_num_tokens": runner.max_total_tokens,
                "internal_states": [state],
            }
        )

    async def metrics(self, request: Request) -> Response:
        """Answers with its counts in Prometheus' text form."""
        scheduler, memory = self.core.scheduler, self.core.occupation.usage()
        counts = {
            "requests": scheduler.requests_ended,
            "tokens": scheduler.tokens_written,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "paused": scheduler.paused,
            "cache_tokens": self.core.runner.max_total_tokens,
        } | {f"{tag}_bytes": n for tag, n in memory.items()}
        page = exposition({f"server/{name}": n for name, n in counts.items()})
        return Response(page, media_type=MEDIA_TYPE)

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


class WeightEndpoints:
    """Answers the calls that change weights or compare them. Errors are ControlErrors."""

    def __init__(self, core: ServerCore) -> None:
        self.core = core

    async def begin_weight_update(self, request: Request) -> Response:
        """Opens a session."""
        body = await read_json(request, required=False)
        if body.get("selector", "all") != "all":
            raise ControlError(f"selector={body['selector']!r}: only 'all' is supported")
        await self.core.run(self.core.updates.begin, self.core.occupation.check_weights)
        return answer(_success("Success"))

    async def end_weight_update(self, request: Request) -> Response:
        """Closes the session."""
        await self.core.run(self.core.updates.end)
        return answer(_success("Success"))

    async def init_weights_update_group(self, request: Request) -> Response:
        """Joins a process group; answers when all its members have come."""
        body = await read_json(request)
        # a thread of its own: such a wait fills no pool, and holds up no exit
        await asyncio.wrap_future(in_thread(self.core.updates.init_group, body))
        return answer(_success("Succeeded to initialize custom process group."))

    async def destroy_weights_update_group(self, request: Request) -> Response:
        """Leaves a process group, also while it waits for tensors."""
        name = group_name(await read_json(request, required=False))
        await asyncio.wrap_future(in_thread(self.core.updates.interrupt, name))
        await self.core.run(self.core.updates.destroy_group, name)
        return answer(_success("Succeeded to destroy custom process group."))

    async def update_weights_from_distributed(self, request: Request) -> Response:
        """Loads one bucket that rank 0 of a group broadcasts."""
        load = self.core.updates.from_distributed
        return await self._bucket(request, load, "Succeeded to update parameter online.")

    async def update_weights_from_tensor(self, request: Request) -> Response:
        """Loads one bucket that lies in the sender's memory on this machine."""
        return await self._bucket(request, self.core.updates.from_tensor, "Success")

    async def _bucket(self, request: Request, load: Callable[..., None], done: str) -> Response:
        body = await read_json(request)
        suffix = await self._update(request, body, functools.partial(load, body))
        return answer(_success(done + suffix))

    async def update_weights_from_disk(self, request: Request) -> Response:
        """Loads a whole HF directory."""
        body = await read_json(request)
        try:
            path = _disk_path(body)
            load = functools.partial(self.core.updates.from_disk, path)
            suffix = await self._update(request, body, load)
        except ControlError as e:
            e.extra.setdefault("num_paused_requests", 0)
            raise
        self.core.model_path = path  # SGLang renames itself, too
        done = _success("Succeeded to update model weights." + suffix)
        return answer(done | {"num_paused_requests": 0})

    async def load_lora_adapter(self, request: Request) -> Response:
        """Loads a PEFT directory and merges it."""
        body = await read_json(request)
        name, path = _text(body, "lora_name"), _text(body, "lora_path")
        updates = self.core.updates
        await self._update(request, {}, lambda check: updates.load_adapter(name, path, check))
        return answer(self._loaded_adapters())

    async def unload_lora_adapter(self, request: Request) -> Response:
        """Unloads an adapter."""
        name = _text(await read_json(request), "lora_name")
        updates = self.core.updates
        await self._update(request, {}, lambda check: updates.unload_adapter(name, check))
        return answer(self._loaded_adapters())

    def _loaded_adapters(self) -> dict[str, Any]:
        paths = dict(self.core.updates.adapters.paths)
        return {"success": True, "error_message": None, "loaded_adapters": paths}

    async def _update(
        self, request: Request, body: dict[str, Any], load: Callable[[Callable[[], None]], None]
    ) -> str:
        """Runs `load` between requests, then sets the version; returns the end of the answer's
        text. `load` gets a check to call before it changes anything. A client that goes away before
        takes its update with it, for whose tensors the server would wait."""
        scheduler = self.core.scheduler
        version, flush = _version(body, "weight_version"), body.get("flush_cache", True)

        def check() -> None:
            self.core.occupation.check_weights()
            if flush and scheduler.running:
                raise ControlError(
                    "the cache cannot be flushed while requests hold it: pause with mode 'abort' "
                    "or 'retract', or send flush_cache=false"
                )

        def run() -> None:
            load(check)
            if version is not None:
                scheduler.set_version(version)
            if flush:
                scheduler.drop_cache()

        job = scheduler.call_exclusive(run, abort_all=bool(body.get("abort_all_requests")))
        done = asyncio.wrap_future(job)
        if not await is_waited_for(request, done) and job.cancel():
            raise ClientDisconnect
        await done
        return "" if version is None else f" Weight version updated to {version}."

    async def release_memory_occupation(self, request: Request) -> Response:
        """Gives memory back: that of `tags`, or all. Refuses while anything runs."""
        tags, core = (await read_json(request)).get("tags"), self.core
        await core.run(core.occupation.release, tags, core.scheduler)
        return answer(None)

    async def resume_memory_occupation(self, request: Request) -> Response:
        """Takes memory again that was given back. Weights come back empty, and nothing is generated
        with them before they are updated."""
        tags = (await read_json(request)).get("tags")
        await self.core.run(self.core.occupation.resume, tags)
        return answer(None)

    async def update_weight_version(self, request: Request) -> Response:
        """Sets the version that the tokens from here on are stamped with."""
        body = await read_json(request)
        version = _version(body, "new_version")
        if version is None:
            raise ControlError("new_version is missing")
        if body.get("abort_all_requests", True):
            self.core.scheduler.abort(lambda s: True)
        await self.core.run(self.core.scheduler.set_version, version)
        done = _success(f"Weight version updated to {version}")
        return answer(done | {"new_version": body["new_version"]})

    async def weights_checker(self, request: Request) -> Response:
        """Answers the checksums of all weights."""
        action = (await read_json(request, required=False)).get("action", "checksum")
        if action != "checksum":
            raise ControlError(f"action={action!r}: only 'checksum' is supported")
        sums = await self.core.run(self._checksums)
        return answer(_success("Success.") | {"ranks": [{"checksums": sums}]})

    def _checksums(self) -> dict[str, str]:
        self.core.occupation.check_weights()
        return self.core.updates.store.checksums()


def _success(message: str) -> dict[str, Any]:
    return {"success": True, "message": message}


def _version(body: dict[str, Any], key: str) -> str | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ControlError(f"{key}={value!r}: must be a string")
    if len(str(value)) > MAX_VERSION_LENGTH:
        raise ControlError(f"{key} has more than {MAX_VERSION_LENGTH} characters")
    return str(value)


def _text(body: dict[str, Any], key: str) -> str:
    if not isinstance(body.get(key), str) or not body[key]:
        raise ControlError(f"{key} must be a string")
    return str(body[key])


def _disk_path(body: dict[str, Any]) -> str:
    """Returns a request's `model_path`. Raises ControlError where it asks for what this server does
    not do."""
    path = body.get("model_path")
    if not isinstance(path, str):
        raise ControlError("model_path must be a string")
    if body.get("load_format") not in (None, "auto", "safetensors"):
        raise ControlError(f"load_format={body['load_format']!r}: use null")
    for flag in ("is_async", "keep_pause"):
        if body.get(flag):
            raise ControlError(f"{flag}=true is not supported by the embedded server")
    return path
