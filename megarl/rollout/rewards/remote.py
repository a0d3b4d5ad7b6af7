"""Sends rewards to reward workers on other machines: by name, with their arguments as JSON.

Nothing is pickled: a worker imports the reward by its module's name.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from megarl.rollout.rewards.errors import (
    RewardError,
    RewardTimeout,
    RewardUnavailable,
    WorkerLost,
    titled,
)
from megarl.rollout.rewards.parts import Scored, finite
from megarl.utils.http import (
    HttpError,
    accepted,
    as_object,
    authorization,
    decode_answer,
    split_address,
)
from megarl.utils.importing import load_object

SCORE = "/score"
CONNECT_TIMEOUT = 10.0  # seconds
IMPORT_TIMEOUT = 120.0  # seconds a worker has beside the reward's own, to start and import it


def described(fn: Callable[..., Any]) -> dict[str, Any]:
    """Returns how another machine finds a reward: `reward` (module:name) and the `options` bound to
    it. Raises ValueError for one that is not at the top level of an importable module."""
    options: dict[str, Any] = {}
    if isinstance(fn, partial) and not fn.args:
        options, fn = dict(fn.keywords), fn.func
    module, name = getattr(fn, "__module__", ""), getattr(fn, "__qualname__", "")
    home = sys.modules.get(module or "")
    if module == "__main__" or getattr(home, name, None) is not fn:
        raise ValueError(
            "a reward must be a function at the top level of a module that reward workers can "
            "import, which is not the script itself"
        )
    return {"reward": f"{module}:{name}", "options": options}


def found(task: dict[str, Any]) -> Callable[..., Any]:
    """Returns the reward that `described` has described. Raises ValueError where there is none."""
    fn: Callable[..., Any] = load_object(str(task["reward"]), what="reward")
    if not task.get("options"):
        return fn
    return update_wrapper(partial(fn, **task["options"]), fn, ("__module__", "__name__"), ())


class RemoteWorker:
    """Has a reward worker at host:port compute one reward at a time."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._host, self._port = split_address(address)
        self._lock = threading.Lock()
        self._ended = False
        self._connection: http.client.HTTPConnection | None = None

    def run(
        self,
        fn: Callable[..., float],
        args: tuple[Any, ...],
        kw: dict[str, Any],
        *,
        timeout: float,
        row_id: object,
    ) -> float:
        """Returns fn(*args, **kw), computed there. Raises RewardError naming the row, RewardTimeout
        where the reward took longer than the worker's time limit, which is `timeout` s, too,
        WorkerLost where the worker gives no answer."""
        what = titled(fn, row_id)
        try:
            body = _json({**described(fn), "args": list(args), "kw": kw, "row_id": str(row_id)})
        except (TypeError, ValueError) as e:
            raise RewardError(f"{what} cannot be sent to a reward worker: {e}") from e
        try:
            answer = as_object(self.address, SCORE, self._call(body, timeout + IMPORT_TIMEOUT))
            if "reward" in answer:
                reward = finite(answer["reward"])
                parts, notes = answer.get("parts") or {}, answer.get("notes") or {}
                return Scored(reward, parts, notes) if parts or notes else reward
        except HttpError as e:
            raise (WorkerLost if e.status is None else RewardError)(f"{what}: {e}") from e
        except (TypeError, ValueError) as e:
            raise RewardError(f"{what}: {e}") from e
        kind = RewardUnavailable if answer.get("unavailable") else RewardError
        kind = RewardTimeout if answer.get("late") else kind
        raise kind(f"{answer.get('error')} (at reward worker {self.address})")

    def discard(self) -> None:
        """Does nothing: there is no process here."""

    def end(self) -> None:
        """Ends the call in progress, and refuses others."""
        with self._lock:
            self._ended = True
            if self._connection is not None and self._connection.sock is not None:
                with contextlib.suppress(OSError):
                    self._connection.sock.shutdown(socket.SHUT_RDWR)

    def _check_open(self) -> None:
        if self._ended:
            raise RewardError("the reward pool is closed")

    def _call(self, body: bytes, timeout: float) -> Any:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT)
        headers = {"Content-Type": "application/json"} | authorization()
        self._check_open()
        try:
            connection.connect()
            connection.sock.settimeout(timeout)
            with self._lock:
                self._check_open()
                self._connection = connection
            connection.request("POST", SCORE, body, headers)
            response = connection.getresponse()
            status, raw = response.status, response.read()
        except TimeoutError as e:
            raise HttpError(self.address, SCORE, f"gave no answer within {timeout:g} s") from e
        except (OSError, http.client.HTTPException) as e:
            raise HttpError(self.address, SCORE, f"failed: {type(e).__name__}: {e}") from e
        finally:
            connection.close()
        return accepted(self.address, SCORE, status, decode_answer(raw))


def _json(task: dict[str, Any]) -> bytes:
    """Returns the task as JSON. Raises TypeError or ValueError for what JSON would change."""
    text = json.dumps(task, allow_nan=False)
    read = json.loads(text)
    if read != task:
        changed = [k for k in task["kw"] if read["kw"].get(k) != task["kw"][k]]
        raise ValueError(
            f"JSON does not carry {', '.join(map(str, changed)) or 'its arguments'} unchanged; "
            "use text, numbers, lists and dicts with text for keys"
        )
    return text.encode()
