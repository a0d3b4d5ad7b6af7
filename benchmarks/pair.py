"""Compares this tree with another revision: both run one benchmark in turns.

    python benchmarks/pair.py [BENCH] [--rev REV] [--turns 10] [--below 1.05] [-- ARGUMENTS]

BENCH is one of those below, or a benchmark of benchmarks/ by its name, which gets the ARGUMENTS and
whose seconds are those of its process:

    check       the checks of a start, before any process: `launcher.local --check`
    quickstart  a synchronous GRPO run of two trainers and a server: the median of its steps, and
                the whole run from the command line to its end
    sft         the same of SFT, without servers

REV is [tool.house] baseline in pyproject.toml unless given; its tree is kept in .cache/pair. In
every turn each side runs once, the first one changing, after a turn that is not counted and writes
the bytecode of both, as an installation has it. Printed are the medians of both sides, and the
median of the turns' ratios (this tree over REV) with the interval that holds it in at least 95 of
100 cases, whatever the seconds' distribution: the order
statistics of a binomial of one half. `--below` fails (status 1) where a median ratio is not below.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TURNS = 10
TIMEOUT = 1800.0  # seconds of one side's turn
WARM_UP = 2  # steps of a run that are not counted
MODEL = "model"
Seconds = dict[str, float]  # by what took them


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [BENCH] [--rev REV] [--turns N] [--below RATIO] [-- ARGUMENTS]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bench", nargs="?", default="quickstart", help="default: quickstart")
    parser.add_argument("--rev", help="a git revision; default: the baseline of pyproject.toml")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"default {TURNS}, the least 6")
    parser.add_argument("--below", type=float, help="fail where a median ratio is not below this")
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.arguments = words[end + 1 :]
    if args.turns < 6:
        parser.error(f"--turns {args.turns}: no interval of 95 % has fewer than 6")
    rev = args.rev or baseline()
    other = tree(rev)
    with tempfile.TemporaryDirectory() as work:
        make_model(Path(work) / MODEL)

        def run(side: Path) -> Seconds:
            return measured(args.bench, args.arguments, side, Path(work))

        turns = take_turns(run, other, ROOT, args.turns, say=print)
    print()
    print("\n".join(table(turns, rev)))
    ratios = [statistics.median(ratios_of(turns, what)) for what in turns[0][0]]
    return int(args.below is not None and max(ratios) >= args.below)


def baseline() -> str:
    """Returns the revision that pyproject.toml names."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return str(settings["tool"]["house"]["baseline"])


def tree(rev: str) -> Path:
    """Returns a tree of a revision, in .cache/pair. Exits where git does not know it."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run(
        [*git, "rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}"],
        capture_output=True, text=True,
    )  # fmt: skip
    if found.returncode:
        sys.exit(f"pair: git knows no revision {rev}; give another with --rev")
    commit = found.stdout.strip()
    there = ROOT / ".cache" / "pair" / commit[:12]
    if not (there / "megarl").is_dir():
        there.mkdir(parents=True, exist_ok=True)
        files = subprocess.Popen([*git, "archive", commit], stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", str(there)], stdin=files.stdout, check=True)
        if files.wait():
            shutil.rmtree(there)
            sys.exit(f"pair: git archive {commit} failed")
    return there


def make_model(path: Path) -> None:
    """Writes the random model of the quickstart."""
    code = "import sys; from pathlib import Path; from tiny_model import make_model; "
    code += "make_model(Path(sys.argv[1]), seed=1)"
    call([sys.executable, "-c", code, str(path)], ROOT, python_path=ROOT / "examples")


def measured(bench: str, arguments: Sequence[str], side: Path, work: Path) -> Seconds:
    """Runs a benchmark once in a tree; returns its seconds."""
    launch = [sys.executable, "-m", "megarl.launcher.local", "--nproc", "2", "--config"]
    out = Path(tempfile.mkdtemp(dir=work))
    common = [f"fileroot={out}", "experiment_name=pair", "trial_name=run"]
    actor = f"actor.path={work / MODEL}"
    if bench == "check":
        grpo = str(side / "configs" / "quickstart_grpo.yaml")
        return {"check": call([*launch, grpo, actor, *common, "--check"], side)}
    if bench == "quickstart":
        grpo = str(side / "configs" / "quickstart_grpo.yaml")
        synchronous = ["rollout.max_head_offpolicyness=0", "total_train_steps=10"]
        quiet = ["evaluator.freq_steps=null", "evaluator.at_start=false", "gconfig.seed=1"]
        return run_of([*launch, grpo, actor, *synchronous, *quiet, *common], side, out)
    if bench == "sft":
        sft = str(side / "configs" / "quickstart_sft.yaml")
        some = [f"model.path={work / MODEL}", "total_train_steps=40"]
        return run_of([*launch, sft, *some, *common], side, out)
    script = side / "benchmarks" / f"{bench}.py"
    if not script.is_file():
        sys.exit(f"pair: {side} has no benchmarks/{bench}.py; --help names what there is")
    return {bench: call([sys.executable, str(script), *arguments], side)}


def run_of(command: Sequence[str], side: Path, out: Path) -> Seconds:
    """Runs a job; returns the median seconds of its steps, and those of the whole run."""
    whole = call(command, side)
    (stats,) = out.rglob("stats.jsonl")
    rows = [json.loads(line) for line in stats.read_text().splitlines()]
    steps = [row["timing/step_s"] for row in rows if row["step"] > WARM_UP]
    return {"step": statistics.median(steps), "run": whole}


def call(command: Sequence[str], side: Path, *, python_path: Path | None = None) -> float:
    """Runs a command with a tree's megarl; returns the seconds. Exits with the end of its output
    where it fails."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, (side, python_path)))),
        "MEGARL_DEVICE": "cpu",
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(ROOT / ".cache" / "pair" / "bytecode"),
        "OMP_NUM_THREADS": "1",
    }
    started = time.monotonic()
    ran = subprocess.run(
        command, cwd=side, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=TIMEOUT,
    )  # fmt: skip
    took = time.monotonic() - started
    if ran.returncode:
        sys.exit(f"{ran.stdout[-4000:]}\npair: status {ran.returncode} in {side}")
    return took


def take_turns(
    run: Callable[[Path], Seconds],
    old: Path,
    new: Path,
    turns: int,
    *,
    say: Callable[[str], object],
) -> list[tuple[Seconds, Seconds]]:
    """Returns (old's, new's) seconds of every turn, after one that is not counted. The side that
    goes first changes with every turn."""
    counted = []
    for turn in range(turns + 1):
        order = (old, new) if turn % 2 else (new, old)
        took = {side: run(side) for side in order}
        if turn:
            counted.append((took[old], took[new]))
            each = (f"{k} {took[old][k]:.3f} -> {took[new][k]:.3f} s" for k in took[old])
            say(f"turn {turn} of {turns}: {', '.join(each)}")
    return counted


def ratios_of(turns: Sequence[tuple[Seconds, Seconds]], what: str) -> list[float]:
    """Returns new over old of every turn."""
    return [new[what] / old[what] for old, new in turns]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns two of at least 6 values between which the median of their distribution lies in at
    least 95 of 100 cases: with n values, k-th least and k-th largest for the largest k with
    P(Binomial(n, 1/2) < k) <= 0.025."""
    ordered, n = sorted(values), len(values)
    below, k = 0.0, 0
    while below + math.comb(n, k) / 2**n <= 0.025:
        below += math.comb(n, k) / 2**n
        k += 1
    return ordered[k - 1], ordered[n - k]


def table(turns: Sequence[tuple[Seconds, Seconds]], rev: str) -> list[str]:
    """Returns a Markdown table."""
    lines = [
        f"| seconds | {rev[:12]} | this tree | ratio | 95 % of it | turns |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for what in turns[0][0]:
        sides: Mapping[str, list[float]] = {
            "old": [old[what] for old, _ in turns],
            "new": [new[what] for _, new in turns],
        }
        ratios = ratios_of(turns, what)
        low, high = interval(ratios)
        old, new = (statistics.median(values) for values in sides.values())
        lines.append(
            f"| {what} | {old:.3f} | {new:.3f} | {statistics.median(ratios):.3f} | "
            f"{low:.3f} to {high:.3f} | {len(turns)} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
