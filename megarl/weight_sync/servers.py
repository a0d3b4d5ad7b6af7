"""Control calls to all generation servers at once, by SGLang's HTTP protocol.

A server is lost (ServersLost) when its connection breaks, or when it keeps us waiting and gives no
sign of life either for `Deadline.patience` seconds. Its loss may show as another's failure first (a
broadcast passed on by servers), so the others are looked at before anyone is blamed.
"""

from __future__ import annotations

import concurrent.futures as cf
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from megarl.api.records import INITIAL_VERSION, ServersLost
from megarl.utils.http import STRANGER, HttpError, as_object, call_json, in_thread, shown
from megarl.weight_sync.agreement import Deadline

LINGER = 2.0  # seconds
LOOK_EVERY = 1.0  # seconds between looks after servers that keep us waiting
# answered by a server's HTTP side alone, whatever its workers do
SIGN_OF_LIFE = "/model_info"


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
    def parse(cls, server: str, answer: Any) -> ServerInfo:
        """From /server_info. RuntimeError for a server with several replicas or stages inside: it
        counts its ranks within one tensor-parallel group, so theirs would collide.
        """
        answer = as_object(server, "/server_info", answer)
        sizes = {k: answer.get(f"{k}_size") or 1 for k in ("dp", "pp", "tp")}
        if wrong := [f"{k}_size={shown(n)}" for k, n in sizes.items() if type(n) is not int]:
            raise RuntimeError(f"server {server}: /server_info answered {wrong[0]}: {STRANGER}")
        replicas = 1 if answer.get("enable_dp_attention") else sizes["dp"]
        stages = sizes["pp"]
        if replicas > 1 or stages > 1:
            raise RuntimeError(
                f"server {server} runs with dp_size={replicas}, pp_size={stages}: weights can be "
                "streamed to one replica with tp alone; start one server for each replica"
            )
        dtype = getattr(torch, str(answer.get("dtype")), None)
        return cls(
            tp=sizes["tp"],
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

    def started_again(self, deadline: Deadline) -> list[str]:
        """Of servers that have been updated, those that hold their first weights: they are new
        processes at old addresses, in no group.
        """
        # what SGLang's /server_info says of it is what the process was started with
        path, key = "/model_info", "weight_version"
        answers = self.call(path, None, deadline, method="GET")
        return [s for s, a in answers.items() if as_object(s, path, a, key)[key] == INITIAL_VERSION]

    def begin_update(self, deadline: Deadline) -> bool:
        """Opens an update session everywhere. False where the servers know no sessions (404). What
        a trainer that died has left open is ended first.
        """
        path, body = "/begin_weight_update", {"selector": "all"}
        calls = self.start(path, body, deadline.left)
        raise_if_lost(wait_for(calls, deadline), path)
        if stale := [s for s, f in calls.items() if _is_open(f)]:
            others = Servers(stale)
            others.end_update(deadline)
            calls |= others.start(path, body, deadline.left)
        return _finish_session(path, calls, deadline)

    def end_update(self, deadline: Deadline) -> None:
        path = "/end_weight_update"
        _finish_session(path, self.start(path, {}, deadline.left), deadline)


def failures(calls: Mapping[str, Future[Answer]]) -> list[str]:
    """What went wrong at the servers whose call has failed so far."""
    return [str(e) for f in calls.values() if f.done() and (e := f.exception()) is not None]


def wait_for(
    calls: Mapping[str, Future[Answer]],
    deadline: Deadline,
    *,
    also: Sequence[Future[Any]] = (),
    return_when: str = cf.ALL_COMPLETED,
) -> dict[str, str]:
    """cf.wait for the calls and `also`, but not for lost servers: why they are, by server."""
    asked: dict[str, Future[Any]] = {}
    while not deadline.over:
        sides, left = [*calls.values(), *also], min(LOOK_EVERY, deadline.left)
        done, pending = cf.wait(sides, left, return_when=return_when)
        failed = any(f.exception() is not None for f in done)
        if not pending or (failed and return_when == cf.FIRST_EXCEPTION):
            break
        for server in _silent(calls):
            if server not in asked or (asked[server].done() and not _no_answer(asked[server])):
                asked[server] = in_thread(sign_of_life, server, deadline.patience)
        if lost := {s: str(asked[s].exception()) for s in _silent(calls) if _no_answer(asked[s])}:
            return lost
    return broken(calls)


def absent(calls: Mapping[str, Future[Answer]], deadline: Deadline) -> dict[str, str]:
    """The servers whose call broke, and those still silent that give no sign of life either: why,
    by server.
    """
    patience = max(1.0, min(deadline.patience, deadline.left))
    asked = {s: in_thread(sign_of_life, s, patience) for s in _silent(calls)}
    cf.wait(asked.values(), patience + LINGER)
    return broken(calls) | {s: str(f.exception()) for s, f in asked.items() if _no_answer(f)}


def broken(calls: Mapping[str, Future[Answer]]) -> dict[str, str]:
    """The servers whose connection failed, at or in the middle of their call: why, by server."""
    gone = {s: f.exception() for s, f in calls.items() if _no_answer(f)}
    return {s: str(e) for s, e in gone.items() if e and not isinstance(e.__cause__, TimeoutError)}


def sign_of_life(server: str, patience: float) -> None:
    """HttpError without a status where there is none."""
    call_json("GET", server, SIGN_OF_LIFE, timeout=patience)


def _silent(calls: Mapping[str, Future[Answer]]) -> list[str]:
    return [s for s, f in calls.items() if not f.done()]


def _no_answer(call: Future[Any]) -> bool:
    """Whether a call has ended without any answer, not even a refusal."""
    error = call.exception() if call.done() else None
    return isinstance(error, HttpError) and error.status is None


def raise_if_lost(lost: Mapping[str, str], what: str) -> None:
    """lost: why, by server; `what` was going on."""
    if lost:
        reasons = {server: f"{why} ({what})" for server, why in lost.items()}
        raise ServersLost("; ".join(reasons.values()), reasons)


def _finish(path: str, calls: Mapping[str, Future[Answer]], deadline: Deadline) -> dict[str, Any]:
    """Every server's answer, or one RuntimeError for all that failed or kept silent."""
    raise_if_lost(wait_for(calls, deadline), path)
    late = f"{path} gave no answer within weight_sync.timeout={deadline.timeout:g} s"
    said = [*failures(calls), *(f"server {s}: {late}" for s, f in calls.items() if not f.done())]
    if said:
        raise RuntimeError("; ".join(said))
    return {server: f.result().value for server, f in calls.items()}


def _finish_session(path: str, calls: Mapping[str, Future[Answer]], deadline: Deadline) -> bool:
    """Whether any of the servers knows sessions."""
    raise_if_lost(wait_for(calls, deadline), path)
    unknown = {s for s, f in calls.items() if _status(f) == 404}
    _finish(path, {s: f for s, f in calls.items() if s not in unknown}, deadline)
    return len(unknown) < len(calls)


def _is_open(begin: Future[Answer]) -> bool:
    """Whether SGLang refused to begin a session because there is one."""
    error = begin.exception() if begin.done() else None
    return isinstance(error, HttpError) and "already open" in error.reason


def _call(
    method: str, server: str, path: str, body: dict[str, Any] | None, timeout: float
) -> Answer:
    value = call_json(method, server, path, body, timeout=timeout)
    return Answer(server, value, time.monotonic())


def _status(future: Future[Answer]) -> int | None:
    error = future.exception() if future.done() else None
    return error.status if isinstance(error, HttpError) else None
