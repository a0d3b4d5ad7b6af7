"""Computes rewards for a job's trainer, on a node without GPUs.

    python -m megarl.rollout.rewards.node --port P [--host H] [--workers N] [--timeout S]

    --host H       address to listen at (127.0.0.1)
    --workers N    rewards that are computed at once, each in a process of its own (2)
    --timeout S    seconds one reward may take (15)

The trainer's RewardNode calls it over a link (megarl.rpc.link), which both ends prove with the
job's token MEGARL_JOB_TOKEN. Rewards are imported from this process's working directory and
PYTHONPATH.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from megarl.rollout.rewards.pool import RewardPool
from megarl.rollout.rewards.results import RewardError, RewardTimeout, RewardUnavailable, WorkerLost
from megarl.rpc.errors import Refused, RemoteError, RpcError
from megarl.rpc.group import LOOPBACK
from megarl.rpc.link import Link, Listener, connect
from megarl.utils.http import in_thread
from megarl.utils.importing import add_working_directory
from megarl.utils.stacks import dump_on_signal

SCORE = "score"  # the call: a pickled reward, and its name in messages
IMPORT_TIMEOUT = 120.0  # seconds a node has beside the reward's own, to start and import it
_ERRORS = {kind.__name__: kind for kind in (RewardError, RewardTimeout, RewardUnavailable)}


class RewardNode:
    """Has the node at host:port compute one reward at a time."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._link: Link | None = None
        self._ended: Future[Any] = Future()

    def run(self, reward: bytes, what: str, timeout: float) -> float:
        """Returns the value of a pickled reward, computed there. Raises RewardError, of the kind
        that the node raised; WorkerLost where it gives no answer within `timeout` seconds, beside
        IMPORT_TIMEOUT."""
        try:
            if self._link is None:
                name = f"reward node {self.address}"
                self._link = self._wait(in_thread(connect, self.address, name))
            call = self._link.call_async(SCORE, (reward, what))
            value: float = self._wait(call, timeout + IMPORT_TIMEOUT)
            return value
        except RemoteError as e:
            kind = _ERRORS.get(e.kind, RewardError)
            raise kind(f"{e.text} (at reward node {self.address})") from e
        except (Refused, ValueError) as e:  # it is of another job, or this one has no token
            raise RewardError(f"{what}: {e}") from e
        except (RpcError, TimeoutError) as e:
            self.free()
            raise WorkerLost(f"{what}: {e}") from e

    def _wait(self, future: Future[Any], timeout: float | None = None) -> Any:
        wait([future, self._ended], timeout, FIRST_COMPLETED)
        if self._ended.done():
            raise RewardError("the reward pool is closed")
        if not future.done():
            raise TimeoutError(f"reward node {self.address}: no answer after {timeout:g} s")
        return future.result()

    def end(self) -> None:
        """Ends the call in progress, and refuses others."""
        if not self._ended.done():
            self._ended.set_result(None)

    def free(self) -> None:
        """Ends the link; the next reward makes another."""
        if self._link is not None:
            self._link.close()
            self._link = None


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megarl.rollout.rewards.node",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=15.0)
    options = parser.parse_args(argv)
    dump_on_signal()
    add_working_directory()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        with RewardPool(options.workers, timeout=options.timeout) as pool:

            def score(verb: str, call: tuple[bytes, str], link: Link) -> Future[Any]:
                return pool.submit(*call)

            listener = Listener(score, host=options.host, port=options.port)
            ended.wait()
            listener.close()
    except (ValueError, OSError) as e:
        parser.error(str(e))
    return 0


if __name__ == "__main__":
    sys.exit(main())
