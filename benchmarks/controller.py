"""Measures what a step costs more under a single controller than with one loop on every rank.

    python benchmarks/controller.py [--samples 64 512 2048] [--rounds 7] [--trainers 2] [--quick]
    python benchmarks/controller.py --calls [--rounds 7]

Two runs of the GRPO recipe stand side by side, with the same tiny model, the same seed and the same
made-up batches: two ranks, and a controller with two trainers and a driver. They make their steps
in turns, one waiting while the other works, so that both see the same machine. A step is
RLTrainer's own, with its checks, fingerprints and metrics, but for generation and weight updates,
which need servers: a batch is made where the driver is. Prints Markdown: the median step of each,
the median of the rounds' differences and ratios, the controller's calls of a step, and whether the
weights are the same to the bit.

--calls: a controller's call that computes nothing, beside a bare round trip of
multiprocessing.connection to as many processes, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

GROUP, PROMPT, ANSWER = 8, 16, (8, 40)  # samples of a prompt, tokens of it, and of an answer
WAYS = ("ranks", "controller")


def make_batch(samples: int, step: int) -> Any:
    """Returns a batch of made-up samples, whose tokens rank 0 holds. Collective."""
    import torch
    import torch.distributed as dist

    from megarl.api.batch import Batch

    if dist.get_rank():
        return Batch.from_local(None)
    rng = torch.Generator().manual_seed(step)
    lengths = PROMPT + torch.randint(*ANSWER, (samples,), generator=rng)
    at = torch.arange(int(lengths.max()))
    real = at < lengths[:, None]
    written = real & (at >= PROMPT)
    ids = torch.randint(3, 100, real.shape, generator=rng) * real
    groups = torch.arange(samples) // GROUP
    return Batch.from_local(
        {
            "input_ids": ids,
            "attention_mask": real,
            "loss_mask": written,
            "logprobs": -4.0 * written,
            "versions": torch.where(written, step, -1).int(),
            "rewards": (ids * written).sum(1).remainder(7).float(),
            "group_ids": groups,
            "episode_ids": groups,
        }
    )


def work(way: str, folder: Path, trainers: int) -> None:
    """Is a process of one way: reads numbers of samples from rank 0's standard input, makes a step
    of each, and answers with a line of JSON."""
    from megarl.controlled import ControllerContext
    from megarl.trainer.context import RunContext
    from megarl.trainer.rl import RLTrainer

    class Session:
        dataset_size, step_recorder, client, samples = 1 << 20, None, None, 0

        def __init__(self, ctx: Any) -> None:
            self.ctx, self.steps = ctx, 0

        def start(self) -> None: ...

        def prepare_batch(self) -> Any:
            self.steps += 1
            batch = self.ctx.rollout.run(make_batch, self.samples, self.steps - 1)
            self.step_recorder.handed_out(batch)
            return batch

        def account(self, batch: Any) -> dict[str, float]:
            self.step_recorder.computed(batch)
            return {}

        def addresses(self) -> list[str]:
            return []

    class Publisher:
        def __init__(self, actor: Any) -> None:
            self.actor = actor

        def publish(self, version: int) -> dict[str, float]:
            self.actor.set_version(version)
            return {}

    class Trainer(RLTrainer):
        def make_session(self) -> Any:
            return Session(self.ctx)

        def make_publisher(self) -> Any:
            return Publisher(self.actor)

        def fit(self) -> None:
            step, calls = 0, _counted()
            while line := self.ctx.ranks.from_zero(sys.stdin.readline):
                self.session.samples = int(line)
                before, begun = calls(), time.perf_counter()
                self.whole_step(step)
                self.ctx.gathered()
                seconds, made = time.perf_counter() - begun, calls() - before
                step += 1
                norm = sum(f.norm for f in self.actor.engine.fingerprints().values())
                if self.ctx.ranks.is_zero:
                    print(json.dumps([seconds, made, norm]), flush=True)

    cfg = _config(way, folder, trainers)
    with (ControllerContext if way == "controller" else RunContext)(
        cfg, model_path=cfg.actor.path
    ) as ctx:
        trainer = Trainer(cfg, ctx)
        trainer.set_up()
        trainer.fit()
        trainer.destroy()


def _counted() -> Any:
    """Returns what tells how many calls the controller has made."""
    from megarl.controller.group import WorkerGroup

    real, made = WorkerGroup.submit, [0]

    def submit(self: Any, *args: Any, **kw: Any) -> Any:
        made[0] += 1
        return real(self, *args, **kw)

    WorkerGroup.submit = submit  # type: ignore[method-assign]
    return lambda: made[0]


def _config(way: str, folder: Path, trainers: int) -> Any:
    from megarl.config.loader import load_config

    return load_config(
        None,
        [
            *("recipe=grpo", f"fileroot={folder}", f"trial_name={way}", "stats_logger.table=false"),
            *(f"actor.path={folder / 'model'}", "actor.optimizer.lr=1e-3", "gconfig.n_samples=8"),
            *("train_dataset.batch_size=8", "total_train_steps=100000", "recover.mode=disabled"),
            *("saver.final=false", "self_check.on_failure=off"),
            *(["trainer.mode=controller", f"trainer.workers={trainers}"] * (way == "controller")),
        ],
    )


class Side:
    """Is one of the two ways, from the outside."""

    def __init__(self, way: str, folder: Path, trainers: int, port: int) -> None:
        env = os.environ | {"MEGARL_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
        command = [sys.executable, __file__, "--work", way, "--folder", str(folder)]
        command += ["--trainers", str(trainers)]
        self.processes, self.log = [], folder / f"{way}_0.log"
        for rank in range(trainers if way == "ranks" else 1):
            own = dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(trainers))
            own |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            self.processes.append(
                subprocess.Popen(
                    command,
                    env=env | (own if way == "ranks" else {}),
                    stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=(folder / f"{way}_{rank}.log").open("w"),
                    text=True,
                )
            )

    def step(self, samples: int) -> list[float]:
        """Makes a step; returns its seconds, the controller's calls, a number of the weights.
        Raises RuntimeError with the end of rank 0's log where that has ended."""
        from megarl.utils.child import log_tail

        first = self.processes[0]
        assert first.stdin and first.stdout
        first.stdin.write(f"{samples}\n")
        first.stdin.flush()
        while line := first.stdout.readline():
            if line.startswith("["):
                found: list[float] = json.loads(line)
                return found
        raise RuntimeError(f"a process ended:\n{log_tail(self.log)}")

    def close(self) -> None:
        if self.processes[0].stdin:
            self.processes[0].stdin.close()
        for process in self.processes:
            process.wait(60)


def answer_bare(pipe: Any) -> None:
    """Answers whatever comes over a connection of multiprocessing, until it ends."""
    from multiprocessing.connection import Listener

    with Listener(("127.0.0.1", 0), authkey=b"bench") as listener:
        pipe.send(listener.address)
        with listener.accept() as connection:
            try:
                while True:
                    connection.send(connection.recv())
            except EOFError:
                return


def calls(rounds: int, count: int = 300) -> None:
    """Prints what a call to one worker and to two takes, beside bare round trips."""
    import multiprocessing
    from multiprocessing.connection import Client

    from megarl.controller.group import WorkerGroup
    from megarl.controller.worker import SERVE
    from megarl.rpc.group import GroupSpec, LocalScheduler

    spawn, scheduler = multiprocessing.get_context("spawn"), LocalScheduler()
    print("| workers | bare, ms | a call, ms | ratio |\n" + "| --- " * 4 + "|")
    try:
        for size in (1, 2):
            options = {"group": f"group{size}"}
            spec = GroupSpec(name=f"group{size}", count=size, serve=SERVE, options=options)
            started = scheduler.start(spec)
            group = WorkerGroup(spec.name, started.workers, started.clients)
            links = []
            for _ in range(size):
                here, there = spawn.Pipe()
                spawn.Process(target=answer_bare, args=(there,), daemon=True).start()
                links.append(Client(here.recv(), authkey=b"bench"))

            ways = partial(_bare, links), partial(group.call, int)
            pairs = [[_each(fn, count) for fn in ways] for _ in range(rounds)]
            ratio = statistics.median(b / a for a, b in pairs)
            medians = [statistics.median(pair[i] for pair in pairs) for i in (0, 1)]
            print(f"| {size} | {medians[0]:.3f} | {medians[1]:.3f} | {ratio:.2f} |", flush=True)
            for link in links:
                link.close()
    finally:
        scheduler.close()


def _bare(links: list[Any]) -> None:
    """Sends a message to each process, and takes the answers."""
    for link in links:
        link.send(("call", int, (), {}))
    for link in links:
        link.recv()


def _each(fn: Callable[[], Any], count: int) -> float:
    """Returns the milliseconds that one of `count` calls takes."""
    begun = time.perf_counter()
    for _ in range(count):
        fn()
    return 1e3 * (time.perf_counter() - begun) / count


ROOT = str(Path(__file__).resolve().parent.parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="2 rounds of 64 samples")
    parser.add_argument("--calls", action="store_true", help="a call beside a bare round trip")
    parser.add_argument("--work", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.calls:
        return calls(args.rounds)
    if args.work:
        return work(args.work, args.folder, args.trainers)
    from megarl.utils.env import ensure_job_token, free_port
    from tests.tiny import save_tiny
    from tests.tiny_tokenizer import save_tokenizer

    ensure_job_token()
    sizes, rounds = ([64], 2) if args.quick else (args.samples, args.rounds)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_tokenizer(save_tiny(folder / "model", "qwen3", layers=2))
        sides = [Side(way, folder, args.trainers, free_port("127.0.0.1")) for way in WAYS]
        try:
            print("| samples | ranks, ms | controller, ms | more, ms | ratio | calls | weights |")
            print("| --- " * 7 + "|")
            for samples in sizes:
                print(_row(samples, rounds, sides), flush=True)
        finally:
            for side in sides:
                side.close()


def _row(samples: int, rounds: int, sides: list[Side]) -> str:
    for side in sides:
        side.step(samples)  # warms up
    pairs = [[side.step(samples) for side in sides] for _ in range(rounds)]
    ranks, controlled = ([1e3 * pair[i][0] for pair in pairs] for i in (0, 1))
    more = [b - a for a, b in zip(ranks, controlled)]
    ratio = [b / a for a, b in zip(ranks, controlled)]
    same = all(a[2] == b[2] for a, b in pairs)
    median = statistics.median
    return (
        f"| {samples:,} | {median(ranks):.0f} | {median(controlled):.0f} | {median(more):.0f} | "
        f"{median(ratio):.2f} | {median(p[1][1] for p in pairs):.0f} | "
        f"{'the same' if same else 'differ'} |"
    )


if __name__ == "__main__":
    main()
