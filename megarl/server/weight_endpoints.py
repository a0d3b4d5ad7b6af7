"""Routes for weight updates and their verification: every method is the route of its name."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from megarl.server.core import ServerCore
from megarl.server.protocol import (
    MAX_VERSION_LENGTH,
    ControlError,
    answer,
    is_waited_for,
    read_json,
)
from megarl.server.updates import group_name
from megarl.utils.http import in_thread


class WeightEndpoints:
    """Answers the calls that change weights or compare them. Errors are ControlErrors."""

    def __init__(self, core: ServerCore) -> None:
        self.core = core

    async def begin_weight_update(self, request: Request) -> Response:
        """Opens a session."""
        body = await read_json(request, required=False)
        if body.get("selector", "all") != "all":
            raise ControlError(f"selector={body['selector']!r}: only 'all' is supported")
        await self.core.run(self.core.updates.begin)
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
        body = await read_json(request)
        load = functools.partial(self.core.updates.from_distributed, body)
        suffix = await self._update(request, body, load)
        return answer(_success("Succeeded to update parameter online." + suffix))

    async def update_weights_from_tensor(self, request: Request) -> Response:
        """Loads one bucket that lies in the sender's memory on this machine."""
        body = await read_json(request)
        load = functools.partial(self.core.updates.from_tensor, body)
        suffix = await self._update(request, body, load)
        return answer(_success("Success" + suffix))

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
        """Answers the checksums of all weights, or of `names`."""
        body = await read_json(request, required=False)
        action, names = body.get("action", "checksum"), body.get("names")
        if action != "checksum":
            raise ControlError(f"action={action!r}: only 'checksum' is supported")
        if not (names is None or isinstance(names, list)) or not all(
            isinstance(name, str) for name in names or ()
        ):
            raise ControlError("names must be a list of strings")
        sums = await self.core.run(self._checksums, names)
        return answer(_success("Success.") | {"ranks": [{"checksums": sums}]})

    def _checksums(self, names: list[str] | None) -> dict[str, str]:
        self.core.occupation.check_weights()
        return self.core.updates.store.checksums(names)


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
