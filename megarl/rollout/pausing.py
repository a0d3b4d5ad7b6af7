"""Pauses generation for a weight update, by weight_sync.pause_mode, and has it go on.

| mode | requests under way |
| --- | --- |
| abort | come back with the tokens so far, and are sent again after the pause |
| drain | end first, which takes as long as the longest |
| retract | wait in the server, which computes their tokens anew with the new weights |
| in_place | wait in the server, and go on with the keys and values of the old weights |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from megarl.config.rollout import RolloutConfig, WeightSyncConfig
from megarl.observability.logging import get_logger
from megarl.rollout.generation import SETTLE_TIMEOUT
from megarl.rollout.loop_thread import LoopThread
from megarl.rollout.pipeline import Pipeline
from megarl.rollout.servers import (
    POLL_INTERVAL,
    PROBE_TIMEOUT,
    Server,
    ServerPool,
    listed_servers,
    silent,
)
from megarl.rollout.workers import WorkerPool
from megarl.utils.http import HttpError

if TYPE_CHECKING:
    from megarl.rollout.client import Connection

log = get_logger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"  # what servers may release
# SGLang's tags of each part: CUDA graphs are of use where there is a KV cache
_TAGS = {WEIGHTS: ("weights",), KV_CACHE: ("kv_cache", "cuda_graph")}


class Pauses:
    """Pauses the servers that `at` connects to, and what is sent to them; `memory` is what they may
    release meanwhile. Its methods are for other threads than the loop's."""

    def __init__(
        self,
        config: RolloutConfig,
        sync: WeightSyncConfig,
        *,
        at: Connection,
        pipeline: Pipeline,
        workers: WorkerPool | None = None,
    ) -> None:
        self._config, self._sync = config, sync
        self._loop, self._pool, self._samples = at.loop, at.pool, at.samples
        self._pipeline, self._workers = pipeline, workers
        self.memory = ServerMemory(at.pool, at.loop, timeout=sync.timeout)
        self._cut: Future[bool] | None = None  # of the answers, during a pause

    def begin(self) -> None:
        """Stops admitting requests, then pauses every server. Raises RuntimeError where none is
        left."""
        self._begin(self._sync.pause_mode, listed_servers(self._config))

    def cut(self) -> bool:
        """Has every request under way come back with its tokens so far, and then go on, whatever
        the mode: nothing changes but that the pipeline notes all answers as they are. Returns
        whether it could."""
        self._begin("abort", None)
        return self.end()

    def _begin(self, mode: str, listed: list[str] | None) -> None:
        self._pipeline.hold()
        drains = self._sync.timeout if mode == "drain" else 0.0
        limit = self._sync.timeout + drains + 2 * PROBE_TIMEOUT
        self._loop.run(self._pause(mode, listed), timeout=limit)
        if mode in ("abort", "drain"):  # the others bring no partial answers
            self._cut = self._loop.submit(self._take_cut())

    async def _pause(self, mode: str, listed: list[str] | None) -> None:
        self._samples.hold()
        if self._workers is not None:
            await self._workers.hold()
        if mode == "drain":
            await self._drain()
            mode = "abort"  # servers know no drain; what is left of it now is somebody else's
        await self._pool.pause({"mode": mode}, timeout=self._sync.timeout, listed=listed)

    async def _drain(self) -> None:
        """Waits for the answers under way, at most weight_sync.timeout seconds. A server that gives
        no sign of life meanwhile is lost, and its requests go to another."""
        patience = self._sync.server_timeout
        deadline = time.monotonic() + self._sync.timeout
        while (left := deadline - time.monotonic()) > 0:
            if await self._settled(min(patience, left)):
                return
            infos = await self._pool.everywhere("GET", "/model_info", timeout=patience)
            self._pool.drop(silent(infos), bound=f" (weight_sync.server_timeout={patience:g} s)")
        log.warning(
            "weight_sync.pause_mode=drain: answers took longer than weight_sync.timeout="
            "%g s; they are interrupted, and go on after the update",
            self._sync.timeout,
        )

    async def _take_cut(self) -> bool:
        """Has the pipeline note all answers as they are, once what the pause cut short is here;
        returns whether it came in time."""
        if not await self._settled(SETTLE_TIMEOUT):
            return False
        self._pipeline.cut()
        return True

    async def _settled(self, timeout: float) -> bool:
        """Returns whether no request of any process is under way, after `timeout` s at most."""
        if self._workers is None:
            return await self._samples.settled(timeout)
        both = self._samples.settled(timeout), self._workers.settled(timeout)
        return all(await asyncio.gather(*both))

    def end(self) -> bool:
        """Has the servers go on and sends requests again, also where the cut of the answers raises.
        Returns whether they were noted as of this pause."""
        cut, self._cut = self._cut, None
        try:
            return cut is not None and cut.result(SETTLE_TIMEOUT + PROBE_TIMEOUT)
        finally:
            self._go_on()

    def _go_on(self) -> None:
        async def work() -> None:
            await self._pool.control("/continue_generation", {}, timeout=self._sync.timeout)
            self._samples.release()
            if self._workers is not None:
                await self._workers.release()

        self._loop.run(work(), timeout=self._sync.timeout + PROBE_TIMEOUT)
        self._pipeline.release()


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
