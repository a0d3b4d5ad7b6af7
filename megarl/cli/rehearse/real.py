"""Runs the small job for real: the local launcher, servers, trainers, a checkpoint, a resume."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.cli.rehearse.job import STEPS
from megarl.config.earlier_run import checkpoints
from megarl.observability.report.runs import load_run

TERM_TIMEOUT = 60.0  # seconds the launcher has to end what it started
_TAIL = 30  # lines of its output that a failure shows
_NUMBERS = ("reward/mean", "loss", "grad_norm", "weight_sync/bytes")


class RehearsalFailed(RuntimeError):
    """Says which part of a rehearsal failed, and why."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Says that one start of the job ended well: its steps, seconds and the last step's numbers."""

    steps: int
    seconds: float
    numbers: dict[str, float] = field(default_factory=dict)


def start(config: Path, run: Path, *, processes: int, steps: int, timeout: float) -> Ran:
    """Starts the job of `config`, whose run directory is `run`, up to step `steps`, and returns
    what it did. Raises RehearsalFailed where it ends badly, where its metrics are not finite
    numbers of those steps, or after `timeout` seconds."""
    begun = time.monotonic()
    log = config.with_name(f"to_step_{steps}.log")
    command = [sys.executable, "-m", "megarl.launcher.local", "--config", str(config)]
    command += ["--nproc", str(processes), f"total_train_steps={steps}"]
    status = _run(command, log, timeout)
    if status:
        why = f"no end within {timeout:g} s" if status is True else f"exit status {status}"
        raise RehearsalFailed(f"{why}; end of {log}:\n{_tail(log)}")
    rows = [row for row in load_run(run).rows if row["step"] > 0]
    if [row["step"] for row in rows] != list(range(1, steps + 1)):
        raise RehearsalFailed(f"stats.jsonl has steps {[row['step'] for row in rows]}; see {log}")
    if bad := list(_not_finite(rows)):
        raise RehearsalFailed(f"not a finite number: {', '.join(bad)}; see {log}")
    last = {name: rows[-1][name] for name in _NUMBERS if name in rows[-1]}
    return Ran(steps=steps, seconds=time.monotonic() - begun, numbers=last)


def check_saved(run: Path) -> None:
    """Raises RehearsalFailed unless the run has a whole checkpoint of its last step and a final
    model."""
    whole, broken = checkpoints(run)
    if broken or not whole or whole[-1].step != STEPS:
        found = [c.path.name for c in whole] + [f"{p.name} (broken)" for p in broken]
        raise RehearsalFailed(f"no checkpoint of step {STEPS} in {run / 'recover'}: {found}")
    if not any((run / "final").glob("*.safetensors")):
        raise RehearsalFailed(f"{run / 'final'} has no weights")


def _run(command: list[str], log: Path, timeout: float) -> int | bool:
    """Returns the exit status of the command, True where it did not end in time."""
    env = os.environ | {"MEGARL_DEVICE": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    env.setdefault("OMP_NUM_THREADS", "1")
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return True
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the launcher, which ends what it started."""
    process.terminate()
    try:
        process.wait(TERM_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()  # its reaper ends the rest
        process.wait()


def _not_finite(rows: Iterable[dict[str, Any]]) -> Iterable[str]:
    for row in rows:
        for name in _NUMBERS:
            value = row.get(name, 0.0)
            if value is None or not math.isfinite(value):
                yield f"{name} of step {row['step']}"


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_TAIL:])
