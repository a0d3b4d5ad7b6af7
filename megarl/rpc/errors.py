"""Defines what a call to a worker may raise."""

from __future__ import annotations


class RpcError(RuntimeError):
    """Tells that a call failed. Its subclasses say how; by itself it is a lost link."""


class Refused(RpcError):
    """Tells that the two ends of a connection are not of one job, or that a frame was changed."""


class WorkerDied(RpcError):
    """Tells that a worker has ended, with its exit status and the end of its log where known."""


class RemoteError(RpcError):
    """Tells that a worker raised: `worker` is its name, `kind` the type of the exception, `text`
    its message, `traceback` that of the worker."""

    def __init__(self, worker: str, kind: str, text: str, traceback: str) -> None:
        super().__init__(worker, kind, text, traceback)
        self.worker, self.kind, self.text, self.traceback = worker, kind, text, traceback

    def __str__(self) -> str:
        return f"worker {self.worker}: {self.kind}: {self.text}\n{self.traceback.rstrip()}"
