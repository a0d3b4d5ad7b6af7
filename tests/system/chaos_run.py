"""megarl/run.py as the chaos test has the launcher start it: what is trained on is recorded,
and the disk is slow at times.

ROWS names a file that gets a line for every batch that was trained on: when, by which process, the
weights' version, the episode of every sample, and the rewards of every episode. TOKENS names one
that gets a line for every answer of a server: when, and how many tokens came. While the file of
SLOW exists, a sync to disk takes up to a second longer. Until that of PEACE does, a step takes at
least PACE seconds, and each of the last ones some more: the run must not end before it has met all
faults.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from tests.system.recover_run import patch

PACE, LAST, LAST_PACE = 0.2, 8, 4.0  # seconds, steps, seconds


def record_batches(path: Path) -> None:
    from megarl.trainer.session import RolloutDriver

    def make(real: Any) -> Any:
        def account(self: Any, episode_ids: Any, skipped: Any) -> Any:
            found = real(self, episode_ids, skipped)
            batch = {"version": self.client.get_version(), "episodes": episode_ids.tolist()}
            batch |= {"rewards": self.rewards}
            batch |= {"time": time.time(), "pid": os.getpid()}
            with path.open("a") as f:
                f.write(json.dumps(batch) + "\n")
            return found

        return account

    def keep_rewards(real: Any) -> Any:
        def next_batch(self: Any) -> Any:
            parts = real(self)
            self.rewards = {int(p["episode_ids"][0]): p["rewards"].tolist() for p in parts}
            return parts

        return next_batch

    patch(RolloutDriver, "account", make)
    patch(RolloutDriver, "next_batch", keep_rewards)


def record_tokens(path: Path) -> None:
    from megarl.rollout.generation import Sample

    def make(real: Any) -> Any:
        def absorb(self: Any, *args: Any, **kw: Any) -> int:
            gained: int = real(self, *args, **kw)
            with path.open("a") as f:
                f.write(json.dumps([time.time(), gained]) + "\n")
            return gained

        return absorb

    patch(Sample, "absorb", make)


def keep_pace(peace: Path, steps: int) -> None:
    from megarl.trainer.session import RolloutDriver

    def make(real: Any) -> Any:
        def next_batch(self: Any) -> Any:
            left = steps - self.client.get_version()
            until = time.monotonic() + (PACE if left > LAST else LAST_PACE)
            while time.monotonic() < until and not peace.exists():
                time.sleep(0.05)
            return real(self)

        return next_batch

    patch(RolloutDriver, "next_batch", make)


def slow_down(sign: Path) -> None:
    fsync = os.fsync

    def slow(fd: int) -> None:
        if sign.exists():
            time.sleep(random.uniform(0.0, 1.0))
        fsync(fd)

    os.fsync = slow


def main() -> int:
    from megarl.run import main as run

    record_batches(Path(os.environ["ROWS"]))
    record_tokens(Path(os.environ["TOKENS"]))
    keep_pace(Path(os.environ["PEACE"]), int(os.environ["STEPS"]))
    slow_down(Path(os.environ["SLOW"]))
    return run()


if __name__ == "__main__":
    sys.exit(main())
