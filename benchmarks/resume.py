"""Measures what a start takes, phase by phase, and what each kind of fault costs a run.

    python benchmarks/resume.py

Starts a small GRPO run (two trainers, two servers, synchronous, a checkpoint after every step) with
the local launcher, and hits one kind of process after the other. Prints two Markdown tables:

start     seconds from the command to the first step's end, of a new run and of one that goes on
faults    seconds from the blow to the end of the next step, tokens that had come from servers and
          were generated a second time, steps that were made a second time

and how many prompts are in the final model's training twice.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.system.chaos import Chaos  # noqa: E402
from tests.system.test_chaos import COMMON  # noqa: E402
from tests.system.test_recover import GRPO  # noqa: E402
from tests.tiny import save_tiny  # noqa: E402
from tests.tiny_tokenizer import save_tokenizer  # noqa: E402

FAULTS = (
    "kill a reward worker",
    "kill a server",
    "stop a server for long",
    "kill trainer 0",
    "kill trainer 1",
    "stop a trainer for good",
    "SIGTERM to the launcher",
    "kill the launcher",
    "kill everything",
)
STEPS_BETWEEN = 3  # that a run makes in peace before the next blow
TIMEOUT = 300.0
KEYS = (
    "collective_timeout=10",
    "weight_sync.timeout=10",
    "recover.async_save=false",
    "recover.answers_secs=0.2",
)


def lines(path: Path) -> list[Any]:
    """Returns the objects of a file of JSON lines; none where it is not there yet."""
    whole = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in whole]


def await_steps(run: Chaos, count: int) -> None:
    """Waits until `count` batches have been trained on, over all starts."""
    deadline = time.monotonic() + TIMEOUT
    while run.trained() < count:
        assert time.monotonic() < deadline, run.output()
        run.alive()
        run.pause(0.05)


def hit(run: Chaos, fault: str) -> tuple[str, float, int]:
    """Makes a run meet a fault and waits until it has trained again; returns its name, the seconds
    to the end of the next step, and how many batches had been trained before that."""
    await_steps(run, run.trained() + STEPS_BETWEEN)
    begun, before = time.time(), run.trained()
    run.strike(fault)
    killed = "server" not in fault and "reward" not in fault
    pids = {row["pid"] for row in lines(run.root / "rows")} if killed else set()
    while True:
        await_steps(run, run.trained() + 1)
        newest = lines(run.root / "rows")[-1]
        if newest["pid"] not in pids and newest["time"] > begun:
            break
    first = next(r for r in lines(run.root / "rows")[before:] if r["pid"] not in pids)
    return fault, first["time"] - begun, run.trained()


def start_phases(run: Chaos, begun: float, since: float) -> Iterator[tuple[str, float]]:
    """Yields the phases of the start whose command was given at `begun`, with their seconds."""
    watched = ("pid ", "healthy: ")
    seen: list[float] = []
    offset = 0 if since == 0.0 else len(run.output())
    deadline = time.monotonic() + TIMEOUT
    person, spans = run.run_dir / "processes" / "rank_0.json", run.run_dir / "timeline"
    while len(seen) < len(watched):
        assert time.monotonic() < deadline, run.output()
        if watched[len(seen)] in run.output()[offset:]:
            seen.append(time.time())
        time.sleep(0.02)
    yield "checks of the configuration", seen[0] - begun
    yield "servers start", seen[1] - seen[0]
    while True:
        assert time.monotonic() < deadline, run.output()
        new = [s for s in lines(spans / "rank_0.jsonl") if s["start"] > begun]
        steps = [s for s in new if s["name"] == "step"]
        if steps:
            break
        time.sleep(0.05)
    started = json.loads(person.read_text())["started"]
    sync = next(s for s in new if s["name"] == "upload")
    yield "trainers start, import, meet", started - seen[1]
    yield "data, model, checkpoint", sync["start"] - started
    yield "the first weight sync", sync["seconds"]
    yield "the first step", steps[0]["seconds"]
    yield "in all", steps[0]["start"] + steps[0]["seconds"] - begun


def costs(run: Chaos, hits: list[tuple[str, float, int]]) -> Iterator[tuple[str, float, int, int]]:
    """Yields for every fault its name, the seconds, the tokens generated again and the steps made
    again. Between two steps of a synchronous run all tokens that came belong to steps."""
    rows, came = lines(run.root / "rows"), lines(run.root / "tokens")
    by_step = {int(r["step"]): r["tokens/trained"] for r in run.stats() if r["step"]}
    extra_before = again_before = 0
    for fault, seconds, count in hits:
        last = rows[count - 1]
        needed = sum(by_step[step] for step in range(1, last["version"] + 2))
        extra = round(sum(n for when, n in came if when <= last["time"]) - needed)
        again = count - (last["version"] + 1)
        yield fault, seconds, extra - extra_before, again - again_before
        extra_before, again_before = extra, again


def trained_twice(run: Chaos) -> tuple[int, int]:
    """Returns how many prompts are in the final model's training more than once, of how many."""
    prompts = [e for batch in run.batches().values() for e in dict.fromkeys(batch)]
    return len(prompts) - len(set(prompts)), len(prompts)


def main() -> None:
    """Runs and prints both tables."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny(Path(folder) / "model", "qwen3", layers=2)
        save_tokenizer(model)
        command = (*GRPO, *COMMON, f"actor.path={model}", *KEYS)
        run = Chaos(Path(folder) / "run", command, steps=10_000, seed=0)
        run.root.mkdir()
        try:
            begun = time.time()
            run.start()
            new = dict(start_phases(run, begun, 0.0))
            hits = [hit(run, fault) for fault in FAULTS]
            run.kill_all()
            run.mark.assert_none_left()
            begun = time.time()
            run.start()
            resumed = dict(start_phases(run, begun, begun))
            table = list(costs(run, hits))
            twice = trained_twice(run)
        finally:
            run.close()
    print("| phase | a new run, s | one that goes on, s |\n| --- | --- | --- |")
    for phase in new:
        print(f"| {phase} | {new[phase]:.1f} | {resumed[phase]:.1f} |")
    print("\n| fault | seconds | tokens again | steps again |\n| --- | --- | --- | --- |")
    for fault, seconds, tokens, steps in table:
        print(f"| {fault} | {seconds:.1f} | {tokens} | {steps} |")
    print(f"\nprompts whose samples were trained twice: {twice[0]} of {twice[1]}")


if __name__ == "__main__":
    main()
