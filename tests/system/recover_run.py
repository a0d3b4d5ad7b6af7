"""megarl/run.py that is killed in the middle of something, for the launcher to start.

KILL="PHASE:STEP" in the environment: SIGKILL in that phase of that step. With KILL_ALL the launcher
and everything below it die at once, as a host does; else only the rank that is in the phase. It
happens once: KILLED names the file that remembers it, with the process ids there were. With NUMBER
the launcher gets that signal instead, with INSTEAD that shell command is run, and nobody is killed.
ROWS names a file that gets the rows of every batch that is trained on, ASKED one that gets a line
for every request of training.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def even(prompt: str, completion: str, prompt_ids: Any, completion_ids: Any, **row: Any) -> float:
    """A reward that differs between any model's samples: the share of even token ids."""
    return sum(t % 2 == 0 for t in completion_ids) / max(1, len(completion_ids))


def broken(config: Any) -> Any:
    """A loss that cannot be computed."""
    from megarl.algos.specs import LossSpec

    return LossSpec(fn=lambda outputs, batch: 1 / 0, weight=lambda batch: 1.0)


def main() -> int:
    from megarl.run import main as run

    if "KILL" in os.environ and not Path(os.environ["KILLED"]).exists():
        phase, _, step = os.environ["KILL"].partition(":")
        PHASES[phase](int(step))
    if "ROWS" in os.environ:
        record_rows(Path(os.environ["ROWS"]))
    if "ASKED" in os.environ:
        record_requests(Path(os.environ["ASKED"]))
    return run()


def record_requests(path: Path) -> None:
    from megarl.rollout import generation
    from megarl.rollout.episode_context import current_episode

    def make(real: Any) -> Any:
        def batch_body(samples: Any, *args: Any) -> Any:
            episode = current_episode.get()
            if episode is not None and episode.answers is not None:  # else it is an evaluation's
                with path.open("a") as f:
                    f.write(json.dumps([s.response.output_len for s in samples]) + "\n")
            return real(samples, *args)

        return batch_body

    patch(generation, "batch_body", make)


def record_rows(path: Path) -> None:
    from megarl.rollout.episodes import Episodes

    def make(real: Any) -> Any:
        def take(self: Any, batch: Any) -> Any:
            with path.open("a") as f:
                f.write(json.dumps([e.row["row_id"] for e in batch]) + "\n")
            return real(self, batch)

        return take

    patch(Episodes, "take", make)


def die() -> None:
    killed = Path(os.environ["KILLED"])
    if killed.exists():
        return  # a signal has been sent
    pids = descendants(os.getppid())
    killed.write_text(json.dumps(pids))
    if "INSTEAD" in os.environ:
        subprocess.run(os.environ["INSTEAD"], shell=True, check=True, timeout=60)
        return
    if "NUMBER" in os.environ:
        os.kill(os.getppid(), int(os.environ["NUMBER"]))
        return
    if "KILL_ALL" in os.environ:
        for pid in [os.getppid(), *(p for p in pids if p != os.getpid())]:
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue  # it has ended
    found = [pid]
    for above in found:
        found += [p for p, parent in parents.items() if parent == above]
    return found[1:]


def patch(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def in_rollout(step: int) -> None:
    """Rank 0, with one group of the batch generated and the others under way."""
    from megarl.rollout.executor import RolloutExecutor
    from megarl.rollout.workflows.rlvr import RLVRWorkflow

    training = False

    def prepare(real: Any) -> Any:
        def prepare_parts(self: Any, *args: Any, **kw: Any) -> Any:
            nonlocal training
            training = True
            return real(self, *args, **kw)

        return prepare_parts

    def make(real: Any) -> Any:
        async def arun_episode(self: Any, engine: Any, data: Any) -> Any:
            batch = await real(self, engine, data)
            if training and engine.get_version() >= step - 1:
                die()
                await asyncio.sleep(300)  # where it got a signal and lives
            return batch

        return arun_episode

    patch(RolloutExecutor, "prepare_parts", prepare)
    patch(RLVRWorkflow, "arun_episode", make)


def in_update(step: int) -> None:
    """The last rank, after the first mini-batch's update."""
    from megarl.engine import MegatronEngine

    def make(real: Any) -> Any:
        def train_batch(self: Any, *args: Any, **kw: Any) -> Any:
            stats = real(self, *args, **kw)
            if _last_rank() and self.state.schedule.num_steps == step:
                die()
            return stats

        return train_batch

    patch(MegatronEngine, "train_batch", make)


def in_sync(step: int) -> None:
    """The last rank, while the weights of this step are gathered for the servers."""
    from megarl.engine import MegatronEngine
    from megarl.transfer.gather import BucketGatherer

    version = -1

    def upload(real: Any) -> Any:
        def upload_weights(self: Any, meta: Any) -> Any:
            nonlocal version
            version = meta.version
            return real(self, meta)

        return upload_weights

    def make(real: Any) -> Any:
        def gather(*args: Any, **kw: Any) -> Any:
            if _last_rank() and version == step:
                die()
            return real(*args, **kw)

        return gather

    patch(MegatronEngine, "upload_weights", upload)
    patch(BucketGatherer, "gather", make)


def in_checkpoint(step: int) -> None:
    """Rank 0, with all files of the checkpoint written but not in place."""
    from megarl.trainer import recover

    def make(real: Any) -> Any:
        def put_in_place(staging: Path, target: Path) -> None:
            if target.name == f"step_{step:06d}":
                die()
            real(staging, target)

        return put_in_place

    patch(recover, "put_in_place", make)


def in_engine_save(step: int) -> None:
    """The last rank, while the engine's part of the checkpoint is written."""
    from torch.distributed.checkpoint import FileSystemWriter

    def make(real: Any) -> Any:
        def write_data(self: Any, *args: Any, **kw: Any) -> Any:
            if _last_rank() and f".step_{step:06d}." in str(self.path):
                die()
            return real(self, *args, **kw)

        return write_data

    patch(FileSystemWriter, "write_data", make)


def while_writing(step: int) -> None:
    """The last rank, in the update after this step's, with the checkpoint of this step half
    written behind it: rank 0's files are there, the last rank's are not."""
    from torch.distributed.checkpoint import FileSystemWriter

    begun = threading.Event()

    def make(real: Any) -> Any:
        def write_data(self: Any, *args: Any, **kw: Any) -> Any:
            if _last_rank() and f".step_{step:06d}." in str(self.path):
                begun.set()
                threading.Event().wait()  # for ever
            return real(self, *args, **kw)

        return write_data

    def wait_for_it(real: Any) -> Any:
        def train_batch(self: Any, *args: Any, **kw: Any) -> Any:
            if _last_rank() and self.state.schedule.num_steps == step + 1:
                assert begun.wait(60)
            return real(self, *args, **kw)

        return train_batch

    from megarl.engine import MegatronEngine

    patch(FileSystemWriter, "write_data", make)
    in_update(step + 1)
    patch(MegatronEngine, "train_batch", wait_for_it)


def in_hf_save(step: int) -> None:
    """Rank 0, with the weights of the HF directory written; step 0 is the final one."""
    from megarl.ckpt import hf

    def make(real: Any) -> Any:
        def write_config(staging: Path, *args: Any) -> None:
            if staging.name.startswith(f".step_{step:06d}." if step else ".final."):
                die()
            real(staging, *args)

        return write_config

    patch(hf, "write_config", make)


def in_eval(step: int) -> None:
    """Rank 0, after the answers came."""
    from megarl.trainer.evaluation import HeldOut

    def make(real: Any) -> Any:
        def evaluate(self: Any, client: Any, *args: Any) -> Any:
            stats = real(self, client, *args)
            if client.get_version() == step:
                die()
            return stats

        return evaluate

    patch(HeldOut, "evaluate", make)


def _last_rank() -> bool:
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


PHASES = {
    "rollout": in_rollout, "update": in_update, "sync": in_sync, "checkpoint": in_checkpoint,
    "engine_save": in_engine_save, "writing": while_writing, "hf_save": in_hf_save, "eval": in_eval,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
