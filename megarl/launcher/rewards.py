"""Computes rewards for a job's trainer, on a node without GPUs.

    python -m megarl.launcher.rewards --port P [--host H] [--workers N] [--timeout S]

    --host H       address to listen at (127.0.0.1)
    --workers N    rewards that are computed at once, each in a process of its own (2)
    --timeout S    seconds one reward may take (15)

The trainer calls it over a link (megarl.rpc.link), which both ends prove with the job's token
MEGARL_JOB_TOKEN. Rewards are imported from this process's working directory and PYTHONPATH.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from megarl.rollout.rewards import RewardPool
from megarl.rpc.group import LOOPBACK
from megarl.rpc.link import Link, Listener
from megarl.utils.importing import add_working_directory
from megarl.utils.stacks import dump_on_signal


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megarl.launcher.rewards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default=LOOPBACK)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=15.0)
    given = parser.parse_args(argv)
    dump_on_signal()
    add_working_directory()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        with RewardPool(given.workers, timeout=given.timeout) as pool:

            def score(verb: str, call: tuple[bytes, str], link: Link) -> Future[Any]:
                return pool.submit(*call)

            listener = Listener(score, host=given.host, port=given.port)
            ended.wait()
            listener.close()
    except (ValueError, OSError) as e:
        parser.error(str(e))
    return 0


if __name__ == "__main__":
    sys.exit(main())
