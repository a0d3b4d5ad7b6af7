"""Helper processes end with whoever started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.utils.child import Child, Signals
from tests.leftovers import Mark

ROOT = Path(__file__).parents[2]
# the leader starts another process, which has none of its files, and ends
STARTER = """
import os, resource, sys, time
from megarl.utils.child import Child, Signals
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
files = [open(os.devnull) for _ in range(int(sys.argv[1]))]
first = Child("first", ["true"], env=os.environ)
leader = "import subprocess, sys; subprocess.Popen(['sleep', '300']); print('started', flush=True)"
child = Child("leader", [sys.executable, "-c", leader], env=os.environ)
while child.poll() is None:
    time.sleep(0.05)
print("leader ended", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("files", [0, 600])
def test_what_a_dead_leader_left_ends_with_its_starter(files: int) -> None:
    """Also of a starter that has more files open than half of what it may."""
    mark = Mark()
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(files)],
        env={**os.environ, **mark.env, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert starter.stdout is not None
        assert [starter.stdout.readline() for _ in range(2)] == ["started\n", "leader ended\n"]
        assert len(mark.left()) == 2  # the starter, and what the leader left
        starter.send_signal(signal.SIGKILL)
        starter.wait(30)
        mark.assert_none_left()
    finally:
        mark.kill()
        starter.communicate(timeout=30)


# killed by itself as soon as its child is there
KILLED = """
import os, signal, subprocess
class Popen(subprocess.Popen):
    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        print(self.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
subprocess.Popen = Popen
from megarl.utils.child import Child
Child("sleeper", ["sleep", "300"], env=os.environ)
"""


def test_a_child_ends_with_a_starter_that_is_killed_as_it_starts_it() -> None:
    mark = Mark()
    env = {**os.environ, **mark.env, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", KILLED], env=env, capture_output=True, text=True, timeout=20
        )
        assert done.returncode == -signal.SIGKILL and int(done.stdout)
        mark.assert_none_left()
    finally:
        mark.kill()


def test_a_child_that_cannot_start_leaves_no_file_open() -> None:
    files = Path("/proc/self/fd")
    Child("true", ["true"], env={}).wait(30)
    before = len(list(files.iterdir()))
    with pytest.raises(FileNotFoundError):
        Child("nothing", ["/no/such/program"], env={})
    Child("true", ["true"], env={}).wait(30)
    assert len(list(files.iterdir())) == before


def test_a_command_starts_as_its_caller_says(tmp_path: Path) -> None:
    """With that environment alone and without the signals that Python ignores, though a Python
    starts it."""
    log = tmp_path / "log"
    env = {"B": "", "A": "x=y\nz"}
    for command in (["env", "-0"], ["grep", "SigIgn", "/proc/self/status"]):
        child = Child("command", command, env=env, log_path=log)
        child.wait(30)
        assert child.poll() == 0
    *entries, ignored = log.read_bytes().split(b"\0")
    assert entries == [b"B=", b"A=x=y\nz"]
    of_python = sum(1 << number - 1 for number in (signal.SIGPIPE, signal.SIGXFSZ))
    assert not int(ignored.split()[1], 16) & of_python


def test_a_file_that_cannot_be_run_is_not_said_to_be_missing(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    with pytest.raises(PermissionError, match=str(program)):
        Child("program", [str(program)], env={})


def test_a_child_that_ends_before_its_command_has_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kw: Any) -> None:
            super().__init__(*args, **kw)
            self.kill()
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(subprocess, "Popen", Killed)
    assert Child("killed", ["true"], env={}).poll() == 128 + signal.SIGKILL


TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


@pytest.mark.parametrize(
    ("sent", "settle", "wishes"),
    [
        ([TERM, TERM], 0.0, [TERM, TERM]),
        ([TERM, TERM], 60.0, [TERM]),
        (
            [TERM, USR1, TERM],
            60.0,
            [TERM],
        ),  # all processes get one, and the batch script passes it on
        ([USR1, USR1], 60.0, [USR1]),
        ([USR1, TERM], 60.0, [USR1]),  # the script's, then the one that all processes get
        ([USR1, TERM], 0.0, [USR1, TERM]),
        ([TERM, INT], 60.0, [TERM, INT]),
    ],
)
def test_a_signal_that_comes_twice_is_one_wish_and_another_is_a_second(
    sent: list[signal.Signals], settle: float, wishes: list[signal.Signals]
) -> None:
    with Signals(USR1, settle=settle) as signals:
        for number in sent:
            os.kill(os.getpid(), number)
    assert signals.received == wishes
