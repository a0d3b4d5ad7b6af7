"""Control calls to all generation servers at once, by SGLang's HTTP protocol."""

from __future__ import annotations

import concurrent.futures as cf
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from megarl.utils.http import HttpError, call_json, in_thread
from megarl.weight_sync.agreement import Deadline


@dataclass(frozen=True)
class Answer:
    """A server's answer and the moment it came (time.monotonic)."""

    server: str
    value: Any
    at: float


class Servers:
    def __init__(self, addresses: Sequence[str]) -> None:
        if not addresses:
            raise ValueError(
                "weight sync has no server to send to: set WeightUpdateMeta.addresses "
                "(rollout.addresses)"
            )
        self.addresses = tuple(addresses)

    def start(
        self, path: str, body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        timeout: float, *, method: str = "POST",
    ) -> dict[str, Future[Answer]]:
        """Calls every server in a thread of its own; `body` is one for all or one per server."""
        bodies = list(body) if isinstance(body, Sequence) else [body] * len(self.addresses)
        return {
            server: in_thread(_call, method, server, path, b, timeout)
            for server, b in zip(self.addresses, bodies, strict=True)
        }

    def call(
        self, path: str, body: Mapping[str, Any] | None, deadline: Deadline, *,
        method: str = "POST",
    ) -> dict[str, Any]:
        """Every server's answer. Raises one HttpError with the messages of all that failed."""
        calls = self.start(path, body, deadline.left, method=method)
        cf.wait(calls.values(), timeout=deadline.left + 1)
        raise_failures(calls)
        return {server: f.result().value for server, f in calls.items()}

    def tp_sizes(self, deadline: Deadline) -> list[int]:
        infos = self.call("/server_info", None, deadline, method="GET")
        return [int(info.get("tp_size") or 1) for info in infos.values()]

    def begin_update(self, deadline: Deadline) -> bool:
        """Opens an update session everywhere. False where the servers know no sessions (404)."""
        return self._session("/begin_weight_update", {"selector": "all"}, deadline)

    def end_update(self, deadline: Deadline) -> None:
        self._session("/end_weight_update", {}, deadline)

    def _session(self, path: str, body: Mapping[str, Any], deadline: Deadline) -> bool:
        calls = self.start(path, body, deadline.left)
        cf.wait(calls.values(), timeout=deadline.left + 1)
        unknown = {s for s, f in calls.items() if _status(f) == 404}
        raise_failures({s: f for s, f in calls.items() if s not in unknown})
        return len(unknown) < len(calls)


def raise_failures(calls: Mapping[str, Future[Answer]]) -> None:
    """One error with every failed or silent server's message, if there is any."""
    said = [str(e) for f in calls.values() if f.done() and (e := f.exception()) is not None]
    said += [f"server {server}: gave no answer in time" for server, f in calls.items()
             if not f.done()]  # fmt: skip
    if said:
        raise RuntimeError("; ".join(said))


def _call(
    method: str, server: str, path: str, body: dict[str, Any] | None, timeout: float
) -> Answer:
    value = call_json(method, server, path, body, timeout=timeout)
    return Answer(server, value, time.monotonic())


def _status(future: Future[Answer]) -> int | None:
    error = future.exception() if future.done() else None
    return error.status if isinstance(error, HttpError) else None
