"""Defines what a call to a worker may raise."""

from __future__ import annotations

from megarl.utils.user_errors import RemoteTrace


class RpcError(RuntimeError):
    """Tells that a call failed. Its subclasses say how; by itself it is a lost link."""


class Refused(RpcError):
    """Tells that the two ends of a connection are not of one job, or that a frame was changed."""


class WorkerDied(RpcError):
    """Tells that a worker has ended, with its exit status and the end of its log where known."""


class RemoteError(RpcError):
    """Tells that a worker raised: `worker` is its name, `kind` the type of the exception, `text`
    its message, and `trace` the cause of this error."""

    def __init__(self, worker: str, kind: str, text: str, trace: RemoteTrace | None = None) -> None:
        super().__init__(worker, kind, text, trace)
        self.worker, self.kind, self.text, self.__cause__ = worker, kind, text, trace

    def __str__(self) -> str:
        return f"worker {self.worker}: {self.kind}: {self.text}"
