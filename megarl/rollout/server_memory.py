"""Has the servers give their memory back while others use the devices, and take it again.

It goes by SGLang's tags, and by SGLang's rules: memory is released when nothing runs, weights come
back empty, and a server that is asked to release what it has released ends with an error. So it is
remembered of every server what it has released, also while it is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from megarl.observability.logging import get_logger
from megarl.rollout.loop_thread import LoopThread
from megarl.rollout.server_choice import Server
from megarl.rollout.server_pool import POLL_INTERVAL, PROBE_TIMEOUT, ServerPool
from megarl.utils.http import HttpError

log = get_logger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"
# the tags of each part: CUDA graphs are of use where there is a KV cache
_TAGS = {WEIGHTS: ("weights",), KV_CACHE: ("kv_cache", "cuda_graph")}


class ServerMemory:
    """Releases and resumes parts of the memory of the servers of `pool`, all of which are paused.
    Its methods are for other threads than the loop's.

    timeout: seconds that a call may take (weight_sync.timeout). Servers that give no answer are
    lost; RuntimeError is raised where none is left, and where one refuses.
    """

    def __init__(self, pool: ServerPool, loop: LoopThread, *, timeout: float) -> None:
        self._pool, self._loop, self._timeout = pool, loop, timeout
        self._told: set[str] = set()  # servers that keep their memory, and the log has it

    def release(self, parts: Collection[str]) -> None:
        """Has the servers release `parts`, as far as they have not; first their caches are flushed,
        which shows that nothing runs."""
        self._loop.run(self._release(parts), timeout=2 * (self._timeout + PROBE_TIMEOUT))

    def resume(self, parts: Collection[str]) -> None:
        """Has the servers take `parts` again that they have released; a KV cache is flushed."""
        self._loop.run(self._resume(parts), timeout=2 * (self._timeout + PROBE_TIMEOUT))

    def usage(self) -> dict[str, int]:
        """Returns the bytes of each part on the device that has most of it. (SGLang tells what it
        took at its start; of that, what is released is not counted.)"""
        infos = self._loop.run(self._infos(), timeout=2 * PROBE_TIMEOUT)
        used = [_used(info, self._released(address)) for address, info in infos.items()]
        return {part: max((u[part] for u in used), default=0) for part in _TAGS}

    async def _release(self, parts: Collection[str]) -> None:
        def held(server: Server) -> list[str]:
            return [part for part in parts if part not in (server.released or ())]

        if busy := [s.address for s in self._pool.present if held(s)]:
            await self._flush(busy)
            await self._tell_who_keeps()
        for server in self._pool.present:
            server.empty |= WEIGHTS in held(server)
        await self._change("/release_memory_occupation", held, lambda was, now: was | now)

    async def _resume(self, parts: Collection[str]) -> None:
        def away(server: Server) -> list[str]:
            return [part for part in parts if part in (server.released or ())]

        flushed = [s.address for s in self._pool.present if KV_CACHE in away(s)]
        await self._change("/resume_memory_occupation", away, lambda was, now: was - now)
        if flushed:
            await self._flush(flushed)

    async def _change(
        self,
        path: str,
        chosen: Callable[[Server], list[str]],
        after: Callable[[frozenset[str], frozenset[str]], frozenset[str]],
    ) -> None:
        """Asks every server for the parts that are `chosen` for it, and notes what it then has
        released: `after` of what it had and of these. A call without an answer leaves that open."""
        bodies: dict[tuple[str, ...], list[Server]] = {}
        for server in self._pool.present:
            if found := chosen(server):
                bodies.setdefault(tuple(found), []).append(server)
        for parts, servers in bodies.items():
            before = {s.address: s.released or frozenset() for s in servers}
            for server in servers:
                server.released = None
            tags = [tag for part in parts for tag in _TAGS[part]]
            only = [s.address for s in servers]
            await self._pool.control(path, {"tags": tags}, timeout=self._timeout, only=only)
            for server in servers:
                if server in self._pool.present:
                    server.released = after(before[server.address], frozenset(parts))

    async def _flush(self, servers: Iterable[str]) -> None:
        """Returns when the caches of `servers` are flushed: when nothing runs there."""
        left, deadline = list(servers), time.monotonic() + self._timeout
        while left:
            answers = await self._pool.everywhere(
                "POST", "/flush_cache", {}, timeout=self._timeout, only=left
            )
            errors = {a: e for a, e in answers.items() if isinstance(e, HttpError)}
            self._pool.drop({a: e for a, e in errors.items() if e.status is None})
            left = [a for a, e in errors.items() if e.status is not None]
            if left and time.monotonic() > deadline:
                raise RuntimeError(
                    f"{errors[left[0]]}: it is paused, and yet it works; nobody else may use "
                    "servers that share the trainers' devices"
                )
            if left:
                await asyncio.sleep(POLL_INTERVAL)

    async def _infos(self) -> dict[str, Any]:
        return await self._pool.everywhere("GET", "/server_info", timeout=PROBE_TIMEOUT)

    def _released(self, address: str) -> frozenset[str]:
        known = {s.address: s.released for s in self._pool.present}
        return known.get(address) or frozenset()

    async def _tell_who_keeps(self) -> None:
        """Logs once which servers keep their memory whatever they answer."""
        new = [s.address for s in self._pool.present if s.address not in self._told]
        self._told |= set(new)
        infos = await self._infos() if new else {}
        if keep := [a for a in new if _keeps(infos.get(a))]:
            log.warning(
                "%s keep(s) its memory while the trainers work: SGLang gives it back where it was "
                "started with --enable-memory-saver, and never on a CPU",
                ", ".join(keep),
            )


def _keeps(info: Any) -> bool:
    """Returns whether a server of this /server_info only seems to release memory."""
    return isinstance(info, Mapping) and info.get("enable_memory_saver") is False


def _used(info: Any, released: Collection[str]) -> dict[str, int]:
    """Returns the bytes of each part by an answer of /server_info, 0 for what it does not tell."""
    states = info.get("internal_states") if isinstance(info, Mapping) else None
    state = states[0] if isinstance(states, list) and states else {}
    if isinstance(exact := state.get("memory_bytes"), Mapping):  # the embedded server's
        return {part: int(exact.get(part) or 0) for part in _TAGS}
    told = state.get("memory_usage") or {}
    away = () if _keeps(info) else released
    names = {WEIGHTS: "weight", KV_CACHE: "kvcache"}
    return {
        part: 0 if part in away else int(float(told.get(name) or 0) * 2**30)
        for part, name in names.items()
    }
