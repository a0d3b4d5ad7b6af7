"""A controller and its workers as tasks of one node: whose end is the run's, and its status."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.launcher.command import start_again
from megarl.launcher.job import CONTROLLER, DRIVER, TRAINER, Job, Task
from megarl.launcher.names import Names
from megarl.launcher.node import run_node
from megarl.launcher.workers import group_job
from megarl.rpc.group import GroupSpec
from megarl.utils.child import Signals, wait_until
from tests.leftovers import Mark

WAIT = "import time; time.sleep(300)"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Mark:
    mark = Mark()
    for name, value in mark.env.items():
        monkeypatch.setenv(name, value)
    return mark


def job(folder: Path, codes: dict[str, str]) -> Job:
    """A job of one node whose processes run these programs."""
    spec = GroupSpec(name="g", count=1, serve="m:f", log_dir=str(folder))
    tasks = tuple(
        Task(
            role=role, index=0, node=0, gpus=None, command=(sys.executable, "-c", code), env={},
            ports=(f"{role}.place",) if role == CONTROLLER else (),
            log=str(folder / f"{role}.log"),
        )
        for role, code in codes.items()
    )  # fmt: skip
    return replace(group_job(spec, "h:1"), tasks=tasks)


def run(folder: Path, codes: dict[str, str], signals: Signals | None = None) -> int:
    names = Names()
    given = signals or Signals()
    return run_node(job(folder, codes), 0, host="127.0.0.1", names=names, signals=given)


def test_the_end_of_the_controller_is_that_of_the_run(tmp_path: Path, mark: Mark) -> None:
    codes = {TRAINER: WAIT, DRIVER: "pass", CONTROLLER: "import time; time.sleep(1)"}
    assert run(tmp_path, codes) == 0
    assert run(tmp_path, codes | {CONTROLLER: "raise SystemExit(7)"}) == 7
    mark.assert_none_left()


def test_a_worker_that_dies_ends_the_run_with_its_name_and_log(
    tmp_path: Path, mark: Mark, caplog: pytest.LogCaptureFixture
) -> None:
    dies = "import os; print('it was the disk', flush=True); os.kill(os.getpid(), 9)"
    assert run(tmp_path, {TRAINER: dies, DRIVER: WAIT, CONTROLLER: WAIT}) == 137
    assert "trainer 0 exited with status 137 (SIGKILL" in caplog.text
    assert "it was the disk" in caplog.text
    mark.assert_none_left()


def test_one_that_was_killed_is_named_before_those_that_lost_it(
    tmp_path: Path, mark: Mark, caplog: pytest.LogCaptureFixture
) -> None:
    """Where both have ended when the launcher looks for the first time."""

    class Late(Signals):
        """The launcher looks at signals, then at processes."""

        @property
        def received(self) -> list[int]:
            wait_until(lambda: len(mark.left()) == 0, timeout=30)
            return []

        @received.setter
        def received(self, value: list[int]) -> None:
            pass

    dies = "import os; os.kill(os.getpid(), 9)"
    assert run(tmp_path, {TRAINER: "raise SystemExit(1)", CONTROLLER: dies}, Late()) == 137
    assert "controller exited with status 137" in caplog.text
    mark.assert_none_left()


def test_a_signal_is_for_the_controller(tmp_path: Path, mark: Mark) -> None:
    """Workers hear of it by their calls, and end by the controller or with it."""
    ready = tmp_path / "ready"
    saves = "import pathlib, signal, sys, time\n"
    saves += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    saves += f"pathlib.Path({str(ready)!r}).touch()\ntime.sleep(300)"

    class Signalled(Signals):
        """SIGUSR1 comes when the controller is ready."""

        @property
        def received(self) -> list[int]:
            return [signal.SIGUSR1] if ready.exists() else []

        @received.setter
        def received(self, value: list[int]) -> None:
            pass

    assert run(tmp_path, {TRAINER: WAIT, CONTROLLER: saves}, Signalled()) == 0
    mark.assert_none_left()


def test_a_signal_between_two_attempts_is_the_reason_of_the_end() -> None:
    signals = Signals(signal.SIGUSR1)
    statuses = iter((7, 137))

    def attempt() -> int:
        status = next(statuses)
        if status == 137:  # of a trainer, while the signal comes
            signals.received.append(signal.SIGUSR1)
        return status

    assert start_again(3, signals, attempt) == 128 + signal.SIGTERM
    assert start_again(0, Signals(), lambda: 137) == 137
