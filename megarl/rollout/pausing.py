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
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from megarl.config.rollout import RolloutConfig, WeightSyncConfig
from megarl.observability.logging import get_logger
from megarl.rollout.executor import RolloutExecutor
from megarl.rollout.generation import SETTLE_TIMEOUT, Connection
from megarl.rollout.loop_thread import LoopThread
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
        executor: RolloutExecutor,
        workers: WorkerPool | None = None,
    ) -> None:
        self._config, self._sync = config, sync
        self._loop, self._pool, self._samples = at.loop, at.pool, at.samples
        self._executor, self._workers = executor, workers
        self.memory = ServerMemory(at.pool, at.loop, timeout=sync.timeout)
        self._cut: Future[bool] | None = None  # of the answers, during a pause

    def begin(self) -> None:
        """Stops admitting requests, then pauses every server. Raises RuntimeError where none is
        left."""
        self._begin(self._sync.pause_mode, listed_servers(self._config))

    def cut(self) -> bool:
        """Has every request under way come back with its tokens so far, and then go on, whatever
        the mode: nothing changes but that the executor notes all answers as they are. Returns
        whether it could."""
        self._begin("abort", None)
        return self.end()

    def _begin(self, mode: str, listed: list[str] | None) -> None:
        self._executor.hold()
        drains = self._sync.timeout if mode == "drain" else 0.0
        limit = self._sync.timeout + drains + 2 * PROBE_TIMEOUT
        self._loop.run(self._pause(mode, listed), timeout=limit)
        if mode in ("abort", "drain"):  # the others bring no partial answers
            self._cut = self._loop.submit(self._take_cut())

    async def _pause(self, mode: str, listed: list[str] | None) -> None:
        self._samples.hold()
        if self._workers is not None:
            await self._workers.agree()
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
        """Has the executor note all answers as they are, once what the pause cut short is here;
        returns whether it came in time."""
        if not await self._settled(SETTLE_TIMEOUT):
            log.warning("answers under way did not come in time: a checkpoint has earlier ones")
            return False
        self._executor.episodes.cut()
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
            await self._pool.go_on(timeout=self._sync.timeout)
            self._samples.release()
            if self._workers is not None:
                await self._workers.agree()

        self._loop.run(work(), timeout=self._sync.timeout + PROBE_TIMEOUT)
        self._executor.release()


class ServerMemory:
    """Has the servers of `pool`, all of which are paused, give parts of their memory back while
    others use the devices, and take it again. Its methods are for other threads than the loop's.

    It goes by SGLang's rules: memory is released when nothing runs, weights come back empty, and a
    server that is asked to release what it has released ends with an error. So it is remembered of
    every server what it has released, also while it is lost.

    timeout: seconds that a call may take (weight_sync.timeout). Servers that give no answer are
    lost; RuntimeError is raised where none is left, and where one refuses.
    """

    def __init__(self, pool: ServerPool, loop: LoopThread, *, timeout: float) -> None:
        self._pool, self._loop, self._timeout = pool, loop, timeout
        self._looked_at: set[str] = set()  # servers of which the log says whether they keep it

    def release(self, parts: Collection[str]) -> None:
        """Has the servers release `parts`, as far as they have not; first their caches are flushed,
        which shows that nothing runs."""
        self._loop.run(self._release(frozenset(parts)), timeout=2 * (self._timeout + PROBE_TIMEOUT))

    def resume(self, parts: Collection[str]) -> None:
        """Has the servers take `parts` again that they have released; a KV cache is flushed."""
        self._loop.run(self._resume(frozenset(parts)), timeout=2 * (self._timeout + PROBE_TIMEOUT))

    def usage(self) -> dict[str, int]:
        """Returns the bytes of each part on the device that has most of it. (SGLang tells what it
        took at its start; of that, what is released is not counted.)"""
        infos = self._loop.run(self._infos(), timeout=2 * PROBE_TIMEOUT)
        used = [_used(infos.get(s.address), s.released or ()) for s in self._pool.present]
        return {part: max((u[part] for u in used), default=0) for part in _TAGS}

    async def _release(self, parts: frozenset[str]) -> None:
        held = {s: parts - (s.released or frozenset()) for s in self._pool.present}
        if any(held.values()):
            await self._flush([s.address for s in held if held[s]])
            await self._warn_of_keepers()
        for server in self._pool.present:  # the flush may have lost some
            server.empty |= WEIGHTS in held[server]
        await self._change("/release_memory_occupation", held, frozenset.union)

    async def _resume(self, parts: frozenset[str]) -> None:
        away = {s: parts & (s.released or frozenset()) for s in self._pool.present}
        await self._change("/resume_memory_occupation", away, frozenset.difference)
        await self._flush([s.address for s in away if KV_CACHE in away[s]])

    async def _change(
        self,
        path: str,
        chosen: Mapping[Server, frozenset[str]],
        after: Callable[[frozenset[str], frozenset[str]], frozenset[str]],
    ) -> None:
        """Asks each server for the parts that are `chosen` for it, and notes what it then has
        released: `after` of what it had and of these. A call without an answer leaves that open."""
        for parts in set(chosen.values()) - {frozenset()}:
            before = {s: s.released for s in self._pool.present if chosen.get(s) == parts}
            for server in before:
                server.released = None
            tags = [tag for part in _TAGS if part in parts for tag in _TAGS[part]]
            only = [server.address for server in before]
            await self._pool.control(path, {"tags": tags}, timeout=self._timeout, only=only)
            for server in self._pool.present:
                if server in before:
                    server.released = after(before[server] or frozenset(), parts)

    async def _flush(self, servers: Sequence[str]) -> None:
        """Returns when the caches of `servers` are flushed: when nothing runs there."""
        deadline = time.monotonic() + self._timeout
        while servers:
            answers = await self._pool.everywhere(
                "POST", "/flush_cache", {}, timeout=self._timeout, only=servers
            )
            self._pool.drop(silent(answers))
            errors = [e for e in answers.values() if isinstance(e, HttpError) and e.status]
            servers = [e.server for e in errors]
            if servers and time.monotonic() > deadline:
                raise RuntimeError(
                    f"{errors[0]}: it is paused, and yet it works; nobody else may use servers "
                    "that share the trainers' devices"
                )
            if servers:
                await asyncio.sleep(POLL_INTERVAL)

    async def _infos(self) -> dict[str, Any]:
        return await self._pool.everywhere("GET", "/server_info", timeout=PROBE_TIMEOUT)

    async def _warn_of_keepers(self) -> None:
        """Logs once which servers keep their memory whatever they answer."""
        new = {s.address for s in self._pool.present} - self._looked_at
        self._looked_at |= new
        infos = await self._infos() if new else {}
        if keepers := [address for address in infos if address in new and _keeps(infos[address])]:
            log.warning(
                "%s keep(s) its memory while the trainers work: SGLang gives it back where it was "
                "started with --enable-memory-saver, and never on a CPU",
                ", ".join(keepers),
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
    usage = {} if _keeps(info) else dict.fromkeys(released, 0)
    gib = state.get("memory_usage") or {}
    names = {WEIGHTS: "weight", KV_CACHE: "kvcache"}
    return {p: int(float(gib.get(name) or 0) * 2**30) for p, name in names.items()} | usage
