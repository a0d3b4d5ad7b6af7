"""Compares a GRPO step with TRL's GRPOTrainer: same model, prompts, rewards, optimizer, cores.

    python benchmarks/grpo_vs_trl.py [--rounds 2] [--steps 10] [--lengths equal ragged]
                                     [--only SUBSTRING ...] [--root runs/grpo_vs_trl]

A step has 64 samples (8 prompts x 8) of up to 64 tokens, float32, on the CPU. Every contender gets
all cores: one process of many threads, or many processes of one. They take turns `--rounds` times;
seconds are medians over all steps after the warm-up. Prints Markdown tables: seconds per step and
the ratio to TRL's fastest, tokens per step (the same work on both sides), and where our step's time
goes. Needs trl (`pip install trl==1.16.0`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_task import (
    BETAS,
    CLIP,
    CLIP_NORM,
    EPS,
    GROUP,
    LENGTHS,
    LEVEL,
    LR,
    MAX_NEW_TOKENS,
    PROMPTS,
    ROOT,
    WEIGHT_DECAY,
    make_model,
)

CORES = len(os.sched_getaffinity(0))
HERE = Path(__file__).resolve().parent
RUN_TIMEOUT = 900.0
TRL_VERSION = "1.16.0"
Row = dict[str, Any]

# TRL makes no pass for the old logprobs: it uses the update's own, as `auto` does
SAME_WORK, WITH_PASS = (f"actor.recompute_logprob={way}" for way in ("auto", "true"))
WHOLE, ONCE = (f"actor.mb_spec.share_prefixes={how}" for how in ("false", "auto"))


@dataclass(frozen=True)
class Contender:
    """One side; `overrides` None is TRL. `split`: processes of one thread, else one process."""

    name: str
    overrides: tuple[str, ...] | None
    split: bool = False
    trainers: int = CORES
    rows: list[Row] = field(default_factory=list)

    @property
    def processes(self) -> int:
        return self.trainers if self.split else 1

    @property
    def threads(self) -> int:
        return 1 if self.split else CORES


def contenders() -> list[Contender]:
    """Returns all contenders. A synchronous run has as many servers as trainers, of as many
    threads: they compute in turns. In an asynchronous run they compute at the same time: every
    process has one thread, and half of the processes are servers.
    """
    asynchronous = ("rollout.max_head_offpolicyness=1", "actor.use_decoupled_loss=true")
    found = []
    for split, layout in ((False, f"1x{CORES}"), (True, f"{CORES}x1")):
        count, threads = (CORES, 1) if split else (1, CORES)
        servers = (f"server.count={count}", f"server.threads={threads}", WHOLE)
        found += [
            Contender(f"TRL {layout}", None, split),
            Contender(f"megarl {layout} sync, TRL's work", (*servers, SAME_WORK), split),
            Contender(
                f"megarl {layout} sync, TRL's work, prompts once",
                (*servers, SAME_WORK, ONCE),
                split,
            ),
            Contender(f"megarl {layout} sync", (*servers, WITH_PASS), split),
        ]
    half = max(1, CORES // 2)
    beside = (f"server.count={CORES - half or 1}", "server.threads=1", WHOLE)
    name = f"megarl {half}x1 async 1"
    found += [
        Contender(name, (*beside, *asynchronous, WITH_PASS), True, half),
        Contender(f"{name}, TRL's work", (*beside, asynchronous[0], SAME_WORK), True, half),
    ]
    return found if CORES > 1 else [c for c in found if not c.split]


def run_trl(contender: Contender, model: Path, root: Path, steps: int) -> list[Row]:
    out = root / "steps"
    command = [str(HERE / "trl_grpo.py"), str(model), "--steps", str(steps), "--out", str(out)]
    if contender.split:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command = [*launch, str(contender.processes), *command]
    execute(command, root / "log", OMP_NUM_THREADS=str(contender.threads), GLOO_SOCKET_IFNAME="lo")
    ranks = [read(path) for path in sorted(out.glob("*.jsonl"))]
    return [join_ranks(rows) for rows in zip(*ranks, strict=True)]


def join_ranks(rows: Sequence[Row]) -> Row:
    tokens, samples = (sum(row[key] for row in rows) for key in ("tokens", "samples"))
    when = max(row["time"] for row in rows)
    return {"time": when, "tokens": tokens, "response_len": tokens / samples}


def run_megarl(contender: Contender, model: Path, root: Path, steps: int) -> list[Row]:
    assert contender.overrides is not None
    command = [
        "-m", "megarl.launcher.local", "--nproc", str(contender.processes), "recipe=grpo",
        f"fileroot={root.parent}", f"experiment_name={root.name}", "trial_name=run",
        f"actor.path={model}", "total_train_epochs=1000", f"total_train_steps={steps}",
        "train_dataset.type=arithmetic", f"train_dataset.size={PROMPTS * 64}",
        f"train_dataset.batch_size={PROMPTS}", f"train_dataset.options.level={LEVEL}",
        "train_dataset.reward=grpo_task:reward", f"gconfig.n_samples={GROUP}",
        f"gconfig.max_new_tokens={MAX_NEW_TOKENS}", f"actor.eps_clip={CLIP}",
        f"actor.optimizer.lr={LR}", f"actor.optimizer.weight_decay={WEIGHT_DECAY}",
        f"actor.optimizer.beta1={BETAS[0]}", f"actor.optimizer.beta2={BETAS[1]}",
        f"actor.optimizer.eps={EPS}", f"actor.optimizer.gradient_clipping={CLIP_NORM}",
        "server.context_length=128", "evaluator.at_start=false", "evaluator.at_end=false",
        "saver.final=false", "recover.mode=disabled", "stats_logger.report=false",
        "stats_logger.table=false", *contender.overrides,
    ]  # fmt: skip
    execute(command, root / "log", OMP_NUM_THREADS=str(contender.threads))
    rows = read(root / "run" / "stats.jsonl")
    for row in rows:
        row["tokens"], row["response_len"] = row["tokens/trained"], row["response_len/mean"]
    return rows


def execute(command: list[str], log: Path, **env: str) -> None:
    """Runs python in its own process group and ends the group with it; shows the log on failure."""
    path = os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"MEGARL_DEVICE": "cpu", "PYTHONPATH": path} | env
    env |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(RUN_TIMEOUT)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if status:
        sys.exit(f"{' '.join(command)}\nended with {status}:\n{log.read_text()[-4000:]}")


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steady(rows: list[Row], warmup: int) -> list[Row]:
    """Returns the rows after the warm-up, each with the seconds since the row before it."""
    pairs = zip(rows[warmup - 1 :], rows[warmup:], strict=False)
    return [row | {"seconds": row["time"] - before["time"]} for before, row in pairs]


def median(rows: list[Row], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def mean(rows: list[Row], key: str) -> float:
    return statistics.fmean(row.get(key, 0.0) for row in rows)


def summary(done: list[Contender]) -> None:
    trl = [median(c.rows, "seconds") for c in done if c.overrides is None]
    best = min(trl) if trl else float("nan")
    print(f"\n| processes x threads | s/step | times {best:.2f} s | tokens/step | mean answer |")
    print("| --- | --- | --- | --- | --- |")
    for c in done:
        seconds = median(c.rows, "seconds")
        spread = statistics.quantiles([r["seconds"] for r in c.rows], n=4)
        print(
            f"| {c.name} | {seconds:.3f} ({spread[0]:.2f} to {spread[2]:.2f}) "
            f"| {best / seconds:.2f} | {mean(c.rows, 'tokens'):.0f} "
            f"| {mean(c.rows, 'response_len'):.1f} |"
        )


def breakdown(c: Contender) -> None:
    """Prints mean times by phase (medians do not add up); "everything else" is in no phase."""
    whole = mean(c.rows, "seconds")
    phases = [k for k in c.rows[-1] if k.startswith("timing/") and k != "timing/step_s"]
    parts = {k.removeprefix("timing/").removesuffix("_s"): mean(c.rows, k) for k in phases}
    parts = {k: v for k, v in parts.items() if v > 0}
    parts["everything else"] = whole - sum(parts.values())
    print(f"\n| {c.name} | ms | % |\n| --- | --- | --- |")
    for name, seconds in parts.items():
        print(f"| {name} | {1e3 * seconds:.0f} | {100 * seconds / whole:.1f} |")
    print(f"| step | {1e3 * whole:.0f} | 100 |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="of a run, warm-up included")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--only", nargs="+", default=[""], help="contenders whose name has one")
    parser.add_argument("--root", type=Path, default=Path("runs/grpo_vs_trl"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends child processes, too
    if version("trl") != TRL_VERSION:
        print(f"note: trl {version('trl')}; written for {TRL_VERSION}")
    print(f"{CORES} cores, trl {version('trl')}, transformers {version('transformers')}, "
          f"torch {version('torch')}")  # fmt: skip
    for lengths in args.lengths:
        root = args.root.absolute() / lengths
        shutil.rmtree(root, ignore_errors=True)
        size = make_model(root / "model", lengths=lengths)
        print(f"\n{lengths} lengths, {size / 1e6:.1f}M parameters", flush=True)
        running = [c for c in contenders() if any(word in c.name for word in args.only)]
        for number in range(args.rounds):
            for i, c in enumerate(running):
                where = root / f"{i}-{number}"
                where.mkdir()
                run = run_trl if c.overrides is None else run_megarl
                new = steady(run(c, root / "model", where, args.steps), args.warmup)
                c.rows.extend(new)
                print(f"  {c.name}: {median(new, 'seconds'):.3f} s/step", flush=True)
        summary(running)
        for c in running:
            if c.overrides is not None:
                breakdown(c)


if __name__ == "__main__":
    main()
