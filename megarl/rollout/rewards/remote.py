"""Sends rewards to reward workers on other machines (megarl.launcher.rewards), over a link."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from megarl.rollout.rewards.errors import (
    RewardError,
    RewardTimeout,
    RewardUnavailable,
    WorkerLost,
)
from megarl.rpc.errors import Refused, RemoteError, RpcError
from megarl.rpc.link import Link, connect
from megarl.utils.http import in_thread

SCORE = "score"  # the call: a pickled reward, and its name in messages
IMPORT_TIMEOUT = 120.0  # seconds a worker has beside the reward's own, to start and import it
_ERRORS = {kind.__name__: kind for kind in (RewardError, RewardTimeout, RewardUnavailable)}


class RemoteWorker:
    """Has a reward worker at host:port compute one reward at a time."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._link: Link | None = None
        self._closed: Future[None] = Future()

    def run(self, reward: bytes, what: str, timeout: float) -> float:
        """Returns the value of a pickled reward, computed there. Raises RewardError, of the kind
        that the worker raised; WorkerLost where it gives no answer within `timeout` seconds, beside
        IMPORT_TIMEOUT."""
        try:
            link = self._connected()
            value: float = link.call(SCORE, (reward, what), timeout + IMPORT_TIMEOUT)
            return value
        except RemoteError as e:
            kind = _ERRORS.get(e.kind, RewardError)
            raise kind(f"{e.text} (at reward worker {self.address})") from e
        except (Refused, ValueError) as e:  # it is of another job, or this one has no token
            raise RewardError(f"{what}: {e}") from e
        except (RpcError, TimeoutError) as e:
            self.discard()
            if self._closed.done():
                raise RewardError("the reward pool is closed") from e
            raise WorkerLost(f"{what}: {e}") from e

    def _connected(self) -> Link:
        if self._link is None:
            connecting = in_thread(connect, self.address, f"reward worker {self.address}")
            pending: list[Future[Any]] = [connecting, self._closed]
            wait(pending, return_when=FIRST_COMPLETED)
            if self._closed.done():
                raise RpcError(f"link to {self.address} is not needed any more")
            self._link = connecting.result()
        return self._link

    def discard(self) -> None:
        """Ends the link; the next reward makes another."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def end(self) -> None:
        """Ends the call in progress, and refuses others."""
        if not self._closed.done():
            self._closed.set_result(None)
        if (link := self._link) is not None:
            link.close()
