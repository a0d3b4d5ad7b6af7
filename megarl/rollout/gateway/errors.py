"""Defines the refusals that the gateway answers with."""

from __future__ import annotations


class BadRequest(ValueError):
    """Refuses a request: `status` and `code` are what the client is told beside the message."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code
