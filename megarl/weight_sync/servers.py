"""Control calls to all generation servers at once, by SGLang's HTTP protocol.

A server is lost when the connection of its call breaks, or when it keeps its caller waiting and
gives no sign of life for `Deadline.patience` seconds. One that is only slow has the whole deadline.
The loss of one server may show as another's failure first (a broadcast passed on by servers), so
the others are looked at before anyone is blamed.
"""

from __future__ import annotations

import concurrent.futures as cf
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from megarl.api.records import INITIAL_VERSION, ServersLost
from megarl.utils.env import address_towards, is_loopback
from megarl.utils.http import (
    LOOK_EVERY,
    SIGN_OF_LIFE,
    STRANGER,
    HttpError,
    as_object,
    call_json,
    in_thread,
    shown,
    split_address,
)
from megarl.weight_sync.receiver import LOADER

# A broken broadcast shows sooner than the server's own words about it; wait this long for them.
GRACE = 5.0
LINGER = 2.0  # seconds a thread may outlive the wait for its call
CLOSE_TIMEOUT = 30.0  # seconds for servers to leave a group at the end of a run


# ---- what a server is


@dataclass(frozen=True)
class ServerInfo:
    """Holds the facts about a server that a sync depends on.

    tp: workers that receive, in each of `replicas`; stages: those of a pipeline.
    embedded: whether it is megarl's own. version: SGLang's or megarl's.
    loaders: its --custom-weight-loader; moves_experts, drafts (the algorithm) and shares_weights:
    what it does with weights by itself.
    """

    tp: int
    embedded: bool
    version: str = ""
    replicas: int = 1
    stages: int = 1
    loaders: tuple[str, ...] = ()
    moves_experts: bool = False
    drafts: str = ""
    shares_weights: bool = False

    @classmethod
    def parse(cls, server: str, answer: Any) -> ServerInfo:
        """Reads the answer of /server_info. Raises RuntimeError for one that is no server's."""
        answer = as_object(server, "/server_info", answer)
        sizes = {k: answer.get(f"{k}_size") or 1 for k in ("dp", "pp", "tp")}
        if wrong := [f"{k}_size={shown(n)}" for k, n in sizes.items() if type(n) is not int]:
            raise RuntimeError(f"server {server}: /server_info answered {wrong[0]}: {STRANGER}")
        version = str(answer.get("version", ""))
        return cls(
            tp=sizes["tp"],
            embedded=version.endswith("+megarl"),
            version=version,
            replicas=1 if answer.get("enable_dp_attention") else sizes["dp"],
            stages=sizes["pp"],
            loaders=tuple(answer.get("custom_weight_loader") or ()),
            moves_experts=bool(answer.get("enable_eplb")),
            drafts=str(answer.get("speculative_algorithm") or ""),
            shares_weights=answer.get("weight_cache_mode", "off") not in (None, "off"),
        )

    @property
    def refuses_slices(self) -> str:
        """Returns why the server cannot receive slices, or say what it holds of them, "" where it
        can."""
        if LOADER not in self.loaders and self.embedded:
            return "has another MEGARL_JOB_TOKEN than the trainers, or none"
        if LOADER not in self.loaders:
            return f"was not started with --custom-weight-loader {LOADER}"
        if self.replicas > 1 or self.stages > 1:
            return f"runs with dp_size={self.replicas}, pp_size={self.stages}"
        if self.moves_experts:
            return "moves experts while it runs (enable_eplb)"
        if self.drafts:
            return f"has a draft model (speculative_algorithm={self.drafts}), which loads by itself"
        if self.shares_weights:
            return "shares its weights with others (weight_cache_mode)"
        return ""


# ---- calls to all servers at once


class Deadline:
    """Ends `timeout` seconds from now. patience: seconds that a server may give no sign of life.
    text: what errors say of the bound."""

    def __init__(self, timeout: float, *, patience: float = 30.0) -> None:
        self.timeout, self.patience = timeout, patience
        self.text = f"weight_sync.timeout={timeout:g} s"
        self._end = time.monotonic() + timeout

    @property
    def over(self) -> bool:
        """Returns whether the time is up."""
        return time.monotonic() >= self._end

    @property
    def left(self) -> float:
        """Returns the seconds left, never less than a hair, so that it can serve as a timeout."""
        return max(0.001, self._end - time.monotonic())


@dataclass(frozen=True)
class Answer:
    """Holds a server's answer and the moment it came (time.monotonic)."""

    value: Any
    at: float


Calls = Mapping[str, Future[Answer]]  # by server


class Servers:
    """The servers of one update. Raises ValueError for no address, or one given twice."""

    def __init__(self, addresses: Sequence[str]) -> None:
        if not addresses:
            raise ValueError(
                "weight sync has no server to send to: set WeightUpdateMeta.addresses "
                "(rollout.addresses)"
            )
        if len(set(addresses)) < len(addresses):
            raise ValueError(f"server addresses {list(addresses)}: one is given twice; remove it")
        self.addresses = tuple(addresses)
        self._in_session = False

    def start(
        self,
        path: str,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        timeout: float,
        *,
        method: str = "POST",
    ) -> dict[str, Future[Answer]]:
        """Calls every server in a thread of its own; `body` is one for all or one per server. The
        caller waits `timeout` s and words the error; a thread ends a little later."""
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
        """Returns every server's answer. Raises one RuntimeError with the messages of all that
        failed, ServersLost where some are lost.
        """
        return finish(path, self.start(path, body, deadline.left, method=method), deadline)

    def info(self, deadline: Deadline) -> dict[str, ServerInfo]:
        """Returns what every server says of itself. Raises RuntimeError as `call` and
        `ServerInfo.parse` do."""
        answers = self.call("/server_info", None, deadline, method="GET")
        return {server: ServerInfo.parse(server, answer) for server, answer in answers.items()}

    def receivers(self, deadline: Deadline) -> dict[str, ServerInfo]:
        """Returns `info` of servers that take weights by streams or from memory. Raises
        RuntimeError for one that does not: SGLang asserts that it has no replicas
        (srt/managers/tokenizer_control_mixin.py, init_weights_update_group), and its pipeline
        stages would count the same ranks."""
        found = self.info(deadline)
        for server, info in found.items():
            if info.replicas > 1 or info.stages > 1:
                raise RuntimeError(
                    f"server {server} runs with dp_size={info.replicas}, pp_size={info.stages}: "
                    "SGLang takes weights from a trainer with dp_size=1 and pp_size=1 alone; use "
                    "weight_sync.type=disk, or start one server for each replica"
                )
        return found

    def started_again(self, deadline: Deadline) -> list[str]:
        """Returns the servers that hold the weights they started with, though they have been
        updated: they are new processes at old addresses, in no group."""
        # SGLang's /server_info gives the version that the process was started with
        path, key = "/model_info", "weight_version"
        answers = self.call(path, None, deadline, method="GET")
        return [s for s, a in answers.items() if as_object(s, path, a, key)[key] == INITIAL_VERSION]

    def begin_update(self, deadline: Deadline) -> bool:
        """Opens an update session on every server that knows sessions (others answer 404), and
        returns whether any does. A session that a dead trainer has left open is ended first.
        """
        self._in_session = True  # until the answers say that there is none
        path, body = "/begin_weight_update", {"selector": "all"}
        calls = self.start(path, body, deadline.left)
        raise_if_lost(wait_for(calls, deadline), path)
        if stale := [s for s, e in _refused(calls) if "already open" in e.reason]:
            others = Servers(stale)
            _finish_session("/end_weight_update", others._end(deadline.left), deadline)
            calls |= others.start(path, body, deadline.left)
        self._in_session = _finish_session(path, calls, deadline)
        return self._in_session

    def end_update(self, deadline: Deadline) -> None:
        """Ends the session that `begin_update` opened, if it opened one."""
        if self._in_session:
            self._in_session = False
            _finish_session("/end_weight_update", self._end(deadline.left), deadline)

    def abandon_update(self, timeout: float) -> dict[str, Future[Answer]]:
        """Starts to end the session of an update that failed, if there is one, or the servers would
        refuse the next one. The caller waits for the calls that it returns."""
        calls = self._end(timeout) if self._in_session else {}
        self._in_session = False
        return calls

    def _end(self, timeout: float) -> dict[str, Future[Answer]]:
        return self.start("/end_weight_update", {}, timeout)


def address_for(servers: Iterable[str]) -> str:
    """Returns this process's address for all servers: loopback only if all of them are here."""
    hosts = [split_address(a)[0] for a in servers]
    far = [h for h in hosts if not is_loopback(h)]
    return address_towards((far or hosts)[0])


def finish(
    what: str, calls: Calls, deadline: Deadline, failed: dict[str, str] | None = None
) -> dict[str, Any]:
    """Returns every server's answer. Raises one RuntimeError for all that failed or kept silent, or
    notes why in `failed`; ServersLost where some are lost. what: the path or the command."""
    raise_if_lost(wait_for(calls, deadline), what)
    late = f"{what} gave no answer within {deadline.text}"
    ended = {s: f.exception() for s, f in calls.items() if f.done()}
    errors = {s: str(error) for s, error in ended.items() if error is not None}
    errors |= {s: f"server {s}: {late}" for s in calls if s not in ended}
    if failed is not None:
        failed.update(errors)
    elif errors:
        raise RuntimeError("; ".join(errors.values()))
    return {s: f.result().value for s, f in calls.items() if s not in errors}


def _finish_session(path: str, calls: Calls, deadline: Deadline) -> bool:
    """Returns whether any of the servers knows sessions."""
    raise_if_lost(wait_for(calls, deadline), path)
    unknown = {s for s, e in _refused(calls) if e.status == 404}
    finish(path, {s: f for s, f in calls.items() if s not in unknown}, deadline)
    return len(unknown) < len(calls)


def _call(
    method: str,
    server: str,
    path: str,
    body: dict[str, Any] | None,
    timeout: float,
) -> Answer:
    return Answer(call_json(method, server, path, body, timeout=timeout), time.monotonic())


# ---- what this rank and every server do at the same time


@dataclass(frozen=True)
class BucketTransfer:
    """Something that both this rank and every server must do, at the same time, for either to
    succeed.

    ours: gives the moment (time.monotonic, s) at which this side was done.
    """

    what: str
    ours: Future[Any]
    theirs: Calls
    begun: float = field(default_factory=time.monotonic)

    def wait(self, deadline: Deadline) -> None:
        """Returns when all sides are done. At the first failure, or at the deadline, raises a
        RuntimeError with what the failed servers said: ServersLost where some said nothing.
        """
        how = cf.FIRST_EXCEPTION
        lost = wait_for(self.theirs, deadline, also=[self.ours], return_when=how)
        sides: list[Future[Any]] = [self.ours, *self.theirs.values()]
        if not lost and all(f.done() and f.exception() is None for f in sides):
            return
        if not lost and not deadline.over:
            if not failures(self.theirs):
                patience = min(GRACE, deadline.left)
                cf.wait(self.theirs.values(), patience, return_when=cf.FIRST_EXCEPTION)
            lost = absent(self.theirs, deadline)
        raise_if_lost(lost, self.what)
        raise RuntimeError(f"{self.what}: {self._reason(deadline)}")

    def answered(self) -> float:
        """Returns when the last server answered (time.monotonic)."""
        return max(f.result().at for f in self.theirs.values())

    def _reason(self, deadline: Deadline) -> str:
        if said := failures(self.theirs):
            return "; ".join(said)
        silent = ", ".join(s for s, f in self.theirs.items() if not f.done())
        error = self.ours.exception() if self.ours.done() else None
        if error is not None:
            return f"{type(error).__name__}: {error}" + (f" (silent: {silent})" if silent else "")
        waiting = silent or "the collective, though every server answered"
        return f"no answer within {deadline.text} from {waiting}"


# ---- which servers are lost


def wait_for(
    calls: Calls,
    deadline: Deadline,
    *,
    also: Sequence[Future[Any]] = (),
    return_when: str = cf.ALL_COMPLETED,
) -> dict[str, HttpError]:
    """Waits like `cf.wait` for the calls and `also`, but not for lost servers. Returns the lost
    ones with the reasons.
    """
    probes: dict[str, Future[Any]] = {}
    while not deadline.over:
        sides, left = [*calls.values(), *also], min(LOOK_EVERY, deadline.left)
        done, pending = cf.wait(sides, left, return_when=return_when)
        failed = any(f.exception() is not None for f in done)
        if not pending or (failed and return_when == cf.FIRST_EXCEPTION):
            break
        dead = _failed(probes)
        for server in _silent(calls):
            if server not in probes or (probes[server].done() and server not in dead):
                probes[server] = in_thread(sign_of_life, server, deadline.patience)
        if lost := _failed({s: probes[s] for s in _silent(calls)}):
            return lost
    return broken(calls)


def absent(calls: Calls, deadline: Deadline) -> dict[str, HttpError]:
    """Returns the servers whose call broke, and the silent ones that give no sign of life either,
    with the reasons.
    """
    patience = max(1.0, min(deadline.patience, deadline.left))
    probes = {s: in_thread(sign_of_life, s, patience) for s in _silent(calls)}
    cf.wait(probes.values(), patience + LINGER)
    return broken(calls) | _failed(probes)


def broken(calls: Calls) -> dict[str, HttpError]:
    """Returns the servers whose connection failed before or during their call, with the reasons."""
    failed = _failed(calls)
    return {s: e for s, e in failed.items() if not isinstance(e.__cause__, TimeoutError)}


def failures(calls: Calls) -> list[str]:
    """Returns the errors of the servers whose call has failed so far."""
    return [str(e) for f in calls.values() if f.done() and (e := f.exception()) is not None]


def raise_if_lost(lost: Mapping[str, object], what: str) -> None:
    """Raises ServersLost where there are any. lost: why, by server; `what` was going on."""
    if lost:
        reasons = {server: f"{why} ({what})" for server, why in lost.items()}
        raise ServersLost("; ".join(reasons.values()), reasons)


def sign_of_life(server: str, patience: float) -> None:
    """Asks a server for a sign of life. Raises an HttpError, whose status is None where no answer
    comes within `patience` s."""
    call_json("GET", server, SIGN_OF_LIFE, timeout=patience)


def _silent(calls: Mapping[str, Future[Any]]) -> list[str]:
    return [s for s, f in calls.items() if not f.done()]


def _refused(calls: Calls) -> Iterator[tuple[str, HttpError]]:
    """Yields the servers whose call has ended with an error, and the error."""
    for server, call in calls.items():
        if call.done() and isinstance(error := call.exception(), HttpError):
            yield server, error


def _failed(calls: Mapping[str, Future[Any]]) -> dict[str, HttpError]:
    """Returns the errors of calls that have ended without any answer, not even a refusal."""
    return {server: error for server, error in _refused(calls) if error.status is None}
