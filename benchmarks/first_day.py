"""Probes of one GPU: behavior and speed that tests on CPUs cannot show.

    python benchmarks/first_day.py [PROBE ...] [--seconds 1800] [--out runs/first_day] [--again]

Without names all probes of the plan run (`--list`): first the checks, many at the same time, then
the timed probes, one by one. Each probe is a process with a limit, and a probe that fails or hangs
does not end the others. All limits grow with --seconds, which bounds the whole.

A folder receives results.jsonl (a line per number or row), summary.md, a file with the output of
each probe, and traces. The exit status is 1 if a probe failed. docs/gpu_first_day.md explains the
numbers. `--here` runs one probe in this process without a limit, for a debugger. `--small` runs the
same code at small sizes on a CPU, where numbers mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import first_calls as calls  # noqa: E402
import first_steps as steps  # noqa: E402
import first_tables as tables  # noqa: E402
from first_rows import RESULTS  # noqa: E402

SHORT_S = 560.0  # of a plan with the limits below; a longer one multiplies them
LEAST_S = 15.0  # a probe that has less does not start
RESERVE_S = 3.0
KILL_TIMEOUT_S = 10.0
POLL_S = 0.05
THREADS = "2"  # of each check
PYTEST = ("-m", "pytest", "-q", "--tb=short", "-rfE", "--timeout=120")
SPREAD = ("-n", "5") if importlib.util.find_spec("xdist") else ()
CUDNN = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "0"}  # torch's own order: cuDNN first on Hopper
RAGGED = CUDNN | {"TORCH_CUDNN_SDPA_AVOID_RECOMPILE": "1"}
TE_LOG = {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "1"}  # the attention that is chosen, and why
TE = "transformer_engine"


@dataclass(frozen=True)
class Job:
    """The setting of a probe: sizes for a CPU, seconds, and the folder of results."""

    small: bool
    limit: float
    out: Path


@dataclass(frozen=True)
class Probe:
    """A probe of the plan.

    run: a function, or arguments of pytest below tests/gpu.
    limit: seconds in a plan of SHORT_S.
    check: runs beside other checks.
    needs_te: runs only with Transformer Engine.
    planned: runs if no probe is named.
    """

    run: Callable[[Job], None] | tuple[str, ...]
    limit: float
    check: bool = False
    env: dict[str, str] = field(default_factory=dict)
    needs_te: bool = False
    planned: bool = True


def train(*shapes: str, traced: bool = False) -> Callable[[Job], None]:
    """Returns a probe of training steps of gpu_train's `shapes`."""
    return lambda job: steps.train(job.small, job.out, job.limit, *shapes, traced=traced)


def loop(sync: str, *overrides: str) -> Callable[[Job], None]:
    """Returns a probe of a GRPO run."""
    return lambda job: steps.loop(job.small, job.out, sync, *overrides)


def plain(probe: Callable[[bool], None]) -> Callable[[Job], None]:
    """Returns a probe that needs to know only its sizes."""
    return lambda job: probe(job.small)


FLAT = "actor.mb_spec.share_prefixes=false"  # FlexAttention would compile in the first steps
PROBES = {
    "env": Probe(plain(tables.env), 100, check=True),
    "adam": Probe(plain(tables.adam), 60, check=True),
    "calls": Probe(plain(calls.calls), 60, check=True),
    "numerics": Probe(plain(calls.numerics), 120, check=True),
    "kernels": Probe(("test_kernels_lm_head.py", "test_less_to_send.py"), 120, check=True),
    "ipc": Probe(("test_colocated.py",), 90, check=True),
    "engine": Probe(("test_engine.py",), 120, check=True),
    "flex": Probe(("test_trie_attention.py",), 120, check=True),
    "families": Probe(("test_invariance.py", "-k", "sdpa", *SPREAD), 150, check=True),
    "train": Probe(train("0.5b", traced=True), 100),
    "train_cudnn": Probe(train("0.5b"), 50, env=CUDNN),
    "loop": Probe(loop("colocated", FLAT), 160),
    "head": Probe(plain(tables.head), 45),
    "train_te": Probe(train("0.5b", "1.5b"), 90, needs_te=True),
    "train_large": Probe(train("1.5b", "7b"), 75),
    "syncs": Probe(plain(tables.syncs), 75),
    "tries": Probe(plain(tables.tries), 60),
    "te": Probe(
        ("test_invariance.py", "test_fp8.py", "-k", "not sdpa", *SPREAD),
        90,
        env=TE_LOG,
        needs_te=True,
    ),
    "connections": Probe(plain(tables.connections), 40),
    "offload": Probe(plain(tables.offload), 60),
    "loop_cudnn": Probe(loop("colocated", FLAT), 100, env=CUDNN),
    "loop_disk": Probe(loop("disk"), 90),
    "train_ragged": Probe(train("0.5b"), 50, env=RAGGED),
    "slices": Probe(plain(tables.slices), 190, planned=False),  # needs two GPUs
}
OK, LATE = "ok", "no time left"


@dataclass
class Running:
    """A process of a probe."""

    process: subprocess.Popen[bytes]
    start: float
    limit: float


class Day:
    """Runs probes within a limit, and stores their results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out
        self.deadline = time.monotonic() + args.seconds
        self.running: dict[str, Running] = {}
        self.failed: list[str] = []
        self.blocking: list[str] = []

    def run(self, names: list[str]) -> None:
        """Runs the probes: checks at the same time, the others one by one."""
        names.sort(key=lambda name: not self.is_check(name))
        try:
            while names or self.running:
                while names and self.has_room(names[0]):
                    self.start(names.pop(0))
                for name, running in list(self.running.items()):
                    late = time.monotonic() > running.start + running.limit
                    if late or running.process.poll() is not None:
                        self.end(name, f"no end after {running.limit:.0f} s")
                time.sleep(POLL_S)
        finally:
            for name in list(self.running):
                self.end(name, "stopped")

    def is_check(self, name: str) -> bool:
        """Returns whether a probe may run beside others; one that failed before runs alone."""
        return PROBES[name].check and name not in self.blocking

    def has_room(self, name: str) -> bool:
        """Returns whether a probe may start beside those that run."""
        if not self.running:
            return True
        checks = all(map(self.is_check, [name, *self.running]))
        return checks and len(self.running) < self.args.at_once

    def start(self, name: str) -> None:
        """Starts a probe, or stores why it does not run."""
        probe, seconds = PROBES[name], self.args.seconds
        limit = self.args.limit or probe.limit * max(1.0, seconds / SHORT_S)
        left = self.deadline - time.monotonic() - RESERVE_S
        if probe.needs_te and not (self.args.te or importlib.util.find_spec(TE)):
            return self.store(name, "needs Transformer Engine")
        if left < min(LEAST_S, limit / 2):
            return self.store(name, LATE)
        limit = min(limit, left)
        command = [sys.executable, str(Path(__file__).resolve()), "--here", name]
        command += ["--limit", str(limit), "--out", str(self.out), "--json", str(self.args.json)]
        env = {"PYTHONUNBUFFERED": "1"}
        if self.is_check(name):
            env["OMP_NUM_THREADS"] = THREADS
        if name in self.blocking:  # an illegal access ends at the line that started the kernel
            env["CUDA_LAUNCH_BLOCKING"] = "1"
        if probe.needs_te and self.args.te:
            before = os.environ.get("PYTHONPATH")
            env["PYTHONPATH"] = ":".join(filter(None, (str(self.args.te), before)))
        with open(self.out / f"{name}.txt", "wb") as log:
            process = subprocess.Popen(
                command + ["--small"] * self.args.small,
                env=os.environ | env, start_new_session=True, stdout=log, stderr=log,
            )  # fmt: skip
        self.running[name] = Running(process, time.monotonic(), limit)

    def end(self, name: str, unfinished: str) -> None:
        """Ends a probe with all that it started, prints its output and stores its status, or
        `unfinished` if it was still running."""
        running = self.running.pop(name)
        status = running.process.poll()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(KILL_TIMEOUT_S)
        how = OK if status == 0 else f"exit status {status}"
        if status is None:
            how = unfinished
        if how != OK:
            self.failed.append(name)
        text = (self.out / f"{name}.txt").read_text(errors="replace").strip()
        last = next((x for x in reversed(text.splitlines()) if x[:1] not in ("", "|")), "")
        print(f"\n## {name}\n\n{text}", flush=True)
        self.store(name, how, time.monotonic() - running.start, last)

    def store(self, name: str, status: str, seconds: float = 0.0, last: str = "") -> None:
        """Prints and stores the status of a probe, and renews the summary.

        last: line of its output.
        """
        print(f"\n{name}: {status}, {seconds:.0f} s", flush=True)
        RESULTS.probe = name
        RESULTS.append(dict(status=status, s=round(seconds, 1), last=last))
        write_summary(self.args.json, self.out / "summary.md")


def read_results(file: Path) -> list[dict[str, object]]:
    """Returns the lines of a file of results; a line that a killed probe cut is left out."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def write_summary(results: Path, file: Path) -> None:
    """Writes a table of statuses, then the main numbers of each probe."""
    rows = read_results(results)
    text = ["| probe | status | s | last line |", "|---|---|---|---|"]
    for r in rows:
        if "status" in r:
            last = str(r["last"])[:110].replace("|", "/")
            text.append(f"| {r['probe']} | {r['status']} | {r['s']} | {last} |")
    text.append("")
    for r in rows:
        if "status" not in r and "detail" not in r:
            numbers = (f"{k}={v}" for k, v in r.items() if k not in ("probe", "at"))
            text.append(f"- {r['probe']}: {', '.join(numbers)}")
    file.write_text("\n".join(text) + "\n")


def to_repeat(results: Path, names: list[str]) -> tuple[list[str], list[str]]:
    """Returns the probes that have not passed, failed ones first, and those that failed."""
    status = {str(r["probe"]): str(r["status"]) for r in read_results(results) if "status" in r}
    failed = [n for n in names if status.get(n, "").startswith("exit")]
    rest = [n for n in names if n not in failed]
    return failed + [n for n in rest if not status.get(n, "").startswith((OK, "needs"))], failed


def run_here(name: str, job: Job) -> None:
    """Runs a probe in this process."""
    probe = PROBES[name]
    os.environ.update(probe.env)
    if callable(probe.run):
        probe.run(job)
        return
    tests = [f"tests/gpu/{arg}" if arg.endswith(".py") else arg for arg in probe.run]
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, *PYTEST, *tests])


def read_arguments() -> argparse.Namespace:
    """Returns the command line's arguments; refuses a GPU's probes without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names, planned = list(PROBES), [name for name, probe in PROBES.items() if probe.planned]
    parser.add_argument("probes", nargs="*", metavar="PROBE")
    parser.add_argument("--seconds", type=float, default=1800, help="of all probes (1800)")
    parser.add_argument("--out", type=Path, default=Path("runs/first_day"), help="folder")
    parser.add_argument("--json", type=Path, help="file of results (results.jsonl in --out)")
    parser.add_argument("--again", action="store_true", help="what failed or had no time before")
    parser.add_argument("--skip", nargs="+", default=[], choices=names, metavar="PROBE")
    parser.add_argument("--at-once", type=int, default=8, help="checks at the same time (8)")
    parser.add_argument("--te", type=Path, help="folder of Transformer Engine, for its probes only")
    parser.add_argument("--limit", type=float, help="seconds, in place of each probe's own")
    parser.add_argument("--small", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--here", action="store_true", help="in this process, without a limit")
    parser.add_argument("--list", action="store_true", help="the probes and their limits")
    args = parser.parse_args()
    if unknown := sorted({*args.probes} - {*names}):
        parser.error(f"unknown probe {unknown[0]!r}; the probes are {', '.join(names)}")
    args.probes = [name for name in args.probes or planned if name not in args.skip]
    if args.small:
        os.environ["MEGARL_DEVICE"] = "cpu"
    elif args.probes != ["env"] and not args.list:
        if os.environ.get("MEGARL_DEVICE") == "cpu":
            parser.error("MEGARL_DEVICE=cpu is set: unset it (--small runs the code on a CPU)")
        if not torch.cuda.is_available():
            parser.error("torch sees no CUDA device (--small runs the code on a CPU)")
    return args


def main() -> None:
    args = read_arguments()
    if args.list:
        for name, probe in PROBES.items():
            print(f"{name:14} {'check' if probe.check else 'timed'} {probe.limit:4} s")
        return
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would cut the tables
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if args.here:
        for name in args.probes:
            RESULTS.probe, RESULTS.file = name, args.json
            run_here(name, Job(args.small, args.limit or float("inf"), args.out))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    args.json = RESULTS.file = args.json or args.out / "results.jsonl"
    day = Day(args)
    if args.again:
        args.probes, day.blocking = to_repeat(args.json, args.probes)
    elif args.json.exists():  # earlier results stay beside the new ones
        at = time.strftime("%Y%m%d-%H%M%S", time.localtime(args.json.stat().st_mtime))
        args.json.rename(args.json.with_suffix(f".{at}.jsonl"))
    # whoever ends this process ends the probes with it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    day.run(args.probes)
    if day.failed:
        sys.exit(f"failed: {', '.join(day.failed)}")


if __name__ == "__main__":
    main()
