"""Refusals, each with the status and the body that SGLang's clients expect, and the bounds of a
request.

A bound is far above what a trainer needs; each keeps a single request from holding up the event
loop, the scheduler or the machine's memory.
"""

from __future__ import annotations

from typing import Any

MAX_BODY = 256 << 20  # bytes
MAX_SEQUENCES = 8192  # of one /generate call
MAX_STOPS = 1024  # stop strings, and stop token ids, of one sequence
MAX_STOP_LENGTH = 4096  # characters of one stop string
MAX_JOINS = 64  # groups for weight updates whose other members are waited for
MAX_GROUP_SIZE = 65536  # ranks
MAX_VERSION_LENGTH = 256  # characters of a weight version
MAX_MESSAGE = 2000  # characters of an error; it may quote what was sent


def described(e: BaseException) -> str:
    """Returns the error's type and message in one line."""
    return f"{type(e).__name__}: {e}"


class ServerError(Exception):
    """Refuses a request with `status` and SGLang's {"error": {"message": ...}}."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]} ..."
        super().__init__(message)
        self.status = status

    def body(self) -> dict[str, Any]:
        """Returns the JSON to answer with."""
        return {"error": {"message": str(self)}}


class ControlError(ServerError):
    """Tells that a control call failed: {"success": false, "message": ...}."""

    def __init__(self, message: str, *, status: int = 400, **extra: Any) -> None:
        super().__init__(message, status=status)
        self.extra = extra

    def body(self) -> dict[str, Any]:
        """Returns the JSON to answer with."""
        return {"success": False, "message": str(self), **self.extra}
