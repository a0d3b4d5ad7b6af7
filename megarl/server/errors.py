"""Refusals, each with the status and the body that SGLang's clients expect."""

from __future__ import annotations

from typing import Any

from megarl.server.limits import MAX_MESSAGE


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
