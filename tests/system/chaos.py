"""Does harm to a run: kills, stops and slow disks, against every kind of process, in an order drawn
from a seed. `Chaos.survive` starts the run again whenever the launcher itself was hit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.cli.status import status
from megarl.config.errors import ConfigError
from tests.leftovers import Mark

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "system" / "chaos_run.py"
LAUNCHER, TRAINER, SERVER, REWARD = "launcher", "trainer", "server", "reward"
# what a process of each kind has in its command line
COMMANDS = {
    LAUNCHER: "megarl.launcher.local",
    TRAINER: SCRIPT.name,
    SERVER: "megarl.server",
    REWARD: "multiprocessing.spawn",
}
# how the launcher ends that was hit; it may not have begun to listen
ENDED_BY_US = (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)
EAGER = 0.2  # share of faults that do not wait for a step: they hit the start of the run, perhaps
PROGRESS = 300.0  # seconds that a run may take to make a step after a fault
PRESENT = 120.0  # seconds that a fault waits for somebody to hit
DEADLINE = 900.0  # seconds for what is left of the run after the last fault
MOMENT = (0.3, 3.0)  # seconds that a stop lasts if it goes unnoticed
LONG = (8.0, 12.0)  # seconds of one that servers are given up for


class Chaos:
    """A run in `root`, given by the launcher's command line, and the harm that it meets."""

    def __init__(self, root: Path, command: tuple[str, ...], *, steps: int, seed: int) -> None:
        self.root, self.steps, self.mark = root, steps, Mark()
        self.command = (*command, f"total_train_steps={steps}")
        self.rng = random.Random(seed)
        self.run_dir, self.slow, self.peace = root / "e" / "t", root / "slow", root / "peace"
        self.starts = 0
        self.struck: list[str] = []
        self.states: list[str] = []  # what `megarl status` said after every fault
        self.process: subprocess.Popen[bytes] | None = None
        self.later: list[tuple[float, Callable[[], None]]] = []  # when, and what is done then
        self.faults: dict[str, Callable[[], None]] = {
            "kill trainer 0": lambda: self.kill(TRAINER, 0),
            "kill trainer 1": lambda: self.kill(TRAINER, 1),
            "kill a server": lambda: self.kill(SERVER),
            "kill a reward worker": lambda: self.kill(REWARD),
            "kill the launcher": lambda: self.kill(LAUNCHER),
            "kill everything": self.kill_all,
            "SIGTERM to the launcher": lambda: os.kill(self.one(LAUNCHER), signal.SIGTERM),
            "stop a trainer for a moment": lambda: self.stop(TRAINER, MOMENT),
            "stop a server for a moment": lambda: self.stop(SERVER, MOMENT),
            "stop a server for long": lambda: self.stop(SERVER, LONG),
            "stop the launcher for a moment": lambda: self.stop(LAUNCHER, MOMENT),
            "stop a trainer for good": lambda: self.stop(TRAINER, None),
            "a slow disk": self.slow_disk,
        }

    def survive(self, faults: list[str], *, seconds: float) -> None:
        """Has the run meet `faults`, in a drawn order and again as long as `seconds` are not over,
        and then end in peace."""
        end = time.monotonic() + seconds
        while True:
            order = self.rng.sample(faults, len(faults))
            for name in order:
                self.await_moment()
                self.strike(name)
            if time.monotonic() > end:
                break
        self.peace.touch()
        deadline = time.monotonic() + DEADLINE
        while self.alive() != 0:
            assert time.monotonic() < deadline, f"it hangs: {self.mark.left()}\n{self.output()}"
            self.pause(0.5)
        self.mark.assert_none_left()

    def await_moment(self) -> None:
        """Waits until the run has trained since the last fault, mostly, and then a little."""
        if self.rng.random() < EAGER:
            return self.pause(self.rng.uniform(0.0, 8.0))
        trained, deadline = self.trained(), time.monotonic() + PROGRESS
        while self.trained() == trained:
            assert self.alive() is None, f"it ended too early: give it more steps\n{self.output()}"
            assert time.monotonic() < deadline, f"no step for {PROGRESS} s\n{self.output()}"
            self.pause(0.1)
        self.pause(self.rng.uniform(0.0, 1.5))

    def strike(self, name: str) -> None:
        """Does one harm, once there is somebody to do it to."""
        deadline = time.monotonic() + PRESENT
        while True:
            self.alive()
            try:
                self.faults[name]()
                break
            except LookupError:
                assert time.monotonic() < deadline, f"{name}: nobody is there\n{self.output()}"
                self.pause(0.2)
            except ProcessLookupError:  # it ended in this moment
                continue
        self.say(name)
        self.struck.append(name)
        try:
            self.states.append(status(self.run_dir)["state"])
        except ConfigError:
            self.states.append("none")  # before the first trainer was there

    def alive(self) -> int | None:
        """Starts the run if it was ended by what hit the launcher. Returns its status once it has
        ended well; any other end is an error."""
        if self.process is not None and (code := self.process.poll()) is None:
            return None
        if self.process is not None and code == 0:
            return 0
        if self.process is not None:
            assert code in ENDED_BY_US, f"{code}\n{self.output()}"
            self.mark.assert_none_left(within=20.0)
        self.start()
        return None

    def start(self) -> None:
        env = os.environ | self.mark.env | {
            "OMP_NUM_THREADS": "1", "MEGARL_DEVICE": "cpu", "PYTHONPATH": str(ROOT),
            "ROWS": str(self.root / "rows"), "TOKENS": str(self.root / "tokens"),
            "SLOW": str(self.slow), "PEACE": str(self.peace), "STEPS": str(self.steps),
        }  # fmt: skip
        with (self.root / "output").open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", COMMANDS[LAUNCHER], str(SCRIPT), "--nproc", "2",
                 f"fileroot={self.root}", *self.command],
                cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.starts += 1
        self.say(f"start {self.starts}")

    def pause(self, seconds: float) -> None:
        """Sleeps, and meanwhile undoes what was to last until now."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            now = time.monotonic()
            for due in [d for d in self.later if d[0] <= now]:
                self.later.remove(due)
                due[1]()
            time.sleep(0.05)

    # who is there

    def found(self, kind: str) -> list[int]:
        """The process ids of a kind; trainers in the order of their ranks."""
        pids = [p for p, line in self.mark.left().items() if COMMANDS[kind] in line]
        if kind == LAUNCHER:
            return [self.process.pid] if self.process and self.process.poll() is None else []
        if kind == TRAINER:
            pids = [p for p in pids if COMMANDS[LAUNCHER] not in _text(p, "cmdline")]
            return sorted(pids, key=_rank)
        return sorted(pids)

    def one(self, kind: str, index: int | None = None) -> int:
        """One process of a kind. Raises LookupError where it is not there."""
        pids = self.found(kind)
        return self.rng.choice(pids) if index is None else pids[index]

    # harm

    def kill(self, kind: str, index: int | None = None) -> None:
        os.kill(self.one(kind, index), signal.SIGKILL)

    def kill_all(self) -> None:
        """As a host does that loses its power."""
        self.one(TRAINER)
        while pids := self.mark.left():  # one may be born while the others are killed
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def stop(self, kind: str, seconds: tuple[float, float] | None) -> None:
        """SIGSTOP; `seconds`, drawn between two bounds, until SIGCONT, None for ever."""
        pid = self.one(kind)
        os.kill(pid, signal.SIGSTOP)
        if seconds is not None:
            self.after(self.rng.uniform(*seconds), lambda: _go_on(pid))

    def slow_disk(self) -> None:
        self.slow.touch()
        self.after(self.rng.uniform(3.0, 6.0), lambda: self.slow.unlink(missing_ok=True))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.later.append((time.monotonic() + seconds, act))

    # what came of it

    def say(self, what: str) -> None:
        """Writes into the run's output, so that it can be read in its place."""
        with (self.root / "output").open("a") as f:
            f.write(f"---- {time.strftime('%H:%M:%S')} {what}\n")

    def output(self) -> str:
        return (self.root / "output").read_text(errors="replace")

    def trained(self) -> int:
        """How many batches were trained on, over all starts."""
        path = self.root / "rows"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def batches(self) -> dict[int, list[int]]:
        """The episodes of every step, by the version they were trained under: of the last time that
        it was made, for what came after the newest checkpoint is made again."""
        lines = (self.root / "rows").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return {row["version"]: row["episodes"] for row in rows}

    def stats(self) -> list[dict[str, Any]]:
        path = self.run_dir / "stats.jsonl"  # which is there with the first step
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def close(self) -> None:
        self.mark.kill()
        if self.process is not None:
            self.process.wait()


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
        os.kill(pid, signal.SIGCONT)


def _text(pid: int, name: str) -> str:
    try:
        return (
            Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


def _rank(pid: int) -> str:
    return next((w for w in _text(pid, "environ").split() if w.startswith("RANK=")), "")
