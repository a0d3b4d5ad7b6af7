"""Control calls to all generation servers at once, by SGLang's HTTP protocol."""

from __future__ import annotations

import concurrent.futures as cf
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from megarl.utils.http import HttpError, call_json, in_thread
from megarl.weight_sync.agreement import Deadline

LINGER = 2.0  # seconds


@dataclass(frozen=True)
class Answer:
    """A server's answer and the moment it came (time.monotonic)."""

    server: str
    value: Any
    at: float


@dataclass(frozen=True)
class ServerInfo:
    """tp: workers that receive; dtype: that of the weights held, None where only the server knows;
    hf_checksums: whether checksums there are of HF tensors, as ours are (the embedded server).
    applies_delta: whether it takes changes; then `weights_id` is the id of the update it holds,
    None where its weights are of another origin. weight_version: for messages.
    """

    tp: int
    dtype: torch.dtype | None
    hf_checksums: bool
    applies_delta: bool = False
    weights_id: str | None = None
    weight_version: str = ""

    @classmethod
    def parse(cls, server: str, answer: Mapping[str, Any]) -> ServerInfo:
        """From /server_info. RuntimeError for a server with several replicas or stages inside: it
        counts its ranks within one tensor-parallel group, so theirs would collide.
        """
        replicas = 1 if answer.get("enable_dp_attention") else int(answer.get("dp_size") or 1)
        stages = int(answer.get("pp_size") or 1)
        if replicas > 1 or stages > 1:
            raise RuntimeError(
                f"server {server} runs with dp_size={replicas}, pp_size={stages}: weights can be "
                "streamed to one replica with tp alone; start one server for each replica"
            )
        dtype = getattr(torch, str(answer.get("dtype")), None)
        return cls(
            tp=int(answer.get("tp_size") or 1),
            dtype=dtype if isinstance(dtype, torch.dtype) else None,
            hf_checksums=str(answer.get("version", "")).endswith("+megarl"),
            applies_delta="weights_id" in answer,
            weights_id=answer.get("weights_id"),
            weight_version=str(answer.get("weight_version", "")),
        )


class Servers:
    def __init__(self, addresses: Sequence[str]) -> None:
        if not addresses:
            raise ValueError(
                "weight sync has no server to send to: set WeightUpdateMeta.addresses "
                "(rollout.addresses)"
            )
        if len(set(addresses)) < len(addresses):
            raise ValueError(f"server addresses {list(addresses)}: one is given twice; remove it")
        self.addresses = tuple(addresses)

    def start(
        self,
        path: str,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        timeout: float,
        *,
        method: str = "POST",
    ) -> dict[str, Future[Answer]]:
        """Calls every server in a thread of its own; `body` is one for all or one per server. The
        caller waits `timeout` s and words the error; a thread ends a little later.
        """
        bodies = list(body) if isinstance(body, Sequence) else [body] * len(self.addresses)
        return {
            server: in_thread(_call, method, server, path, b, timeout + LINGER)
            for server, b in zip(self.addresses, bodies, strict=True)
        }

    def call(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        deadline: Deadline,
        *,
        method: str = "POST",
    ) -> dict[str, Any]:
        """Every server's answer. Raises one RuntimeError with the messages of all that failed."""
        return _finish(path, self.start(path, body, deadline.left, method=method), deadline)

    def info(self, deadline: Deadline) -> dict[str, ServerInfo]:
        answers = self.call("/server_info", None, deadline, method="GET")
        return {server: ServerInfo.parse(server, answer) for server, answer in answers.items()}

    def begin_update(self, deadline: Deadline) -> bool:
        """Opens an update session everywhere. False where the servers know no sessions (404)."""
        return self._session("/begin_weight_update", {"selector": "all"}, deadline)

    def end_update(self, deadline: Deadline) -> None:
        self._session("/end_weight_update", {}, deadline)

    def _session(self, path: str, body: Mapping[str, Any], deadline: Deadline) -> bool:
        calls = self.start(path, body, deadline.left)
        cf.wait(calls.values(), timeout=deadline.left)
        unknown = {s for s, f in calls.items() if _status(f) == 404}
        _finish(path, {s: f for s, f in calls.items() if s not in unknown}, deadline)
        return len(unknown) < len(calls)


def failures(calls: Mapping[str, Future[Answer]]) -> list[str]:
    """What went wrong at the servers whose call has failed so far."""
    return [str(e) for f in calls.values() if f.done() and (e := f.exception()) is not None]


def _finish(path: str, calls: Mapping[str, Future[Answer]], deadline: Deadline) -> dict[str, Any]:
    """Every server's answer, or one RuntimeError for all that failed or kept silent."""
    cf.wait(calls.values(), timeout=deadline.left)
    late = f"{path} gave no answer within weight_sync.timeout={deadline.timeout:g} s"
    said = [*failures(calls), *(f"server {s}: {late}" for s, f in calls.items() if not f.done())]
    if said:
        raise RuntimeError("; ".join(said))
    return {server: f.result().value for server, f in calls.items()}


def _call(
    method: str, server: str, path: str, body: dict[str, Any] | None, timeout: float
) -> Answer:
    value = call_json(method, server, path, body, timeout=timeout)
    return Answer(server, value, time.monotonic())


def _status(future: Future[Answer]) -> int | None:
    error = future.exception() if future.done() else None
    return error.status if isinstance(error, HttpError) else None
