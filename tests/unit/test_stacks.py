"""Where processes stand, seen from outside: with py-spy, or as they answer SIGUSR2."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from megarl.utils import stacks

BODY = """
import signal, sys, time
from megarl.utils.stacks import dump_on_signal
dump_on_signal()
def hang():
    print("there", flush=True)
    {act}
hang()
"""
LOOP, SLEEP = "while True: pass", "time.sleep(300)"


@contextlib.contextmanager
def process(act, err, *, body=BODY):
    with open(err, "w") as out:
        child = subprocess.Popen(
            [sys.executable, "-c", body.format(act=act), "wandb.key=hush"],
            stdout=subprocess.PIPE, stderr=out, text=True, start_new_session=True,
        )  # fmt: skip
    try:
        assert child.stdout is not None and child.stdout.readline() == "there\n"
        yield child.pid
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def reach(pid, letters):
    deadline = time.monotonic() + 10
    while stacks.state(pid) not in letters:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("act", [LOOP, SLEEP])
@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("spy", [False, True])
def test_a_process_that_hangs_is_shown_with_its_stacks(tmp_path, monkeypatch, act, stopped, spy):
    """py-spy may be there and not be allowed to look: then it is as if it were not there."""
    if not spy:
        monkeypatch.setattr(shutil, "which", lambda *args, **kw: None)
    with process(act, tmp_path / "log") as pid:
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        reach(pid, "T" if stopped else "RS")
        shown = stacks.show(pid)
    assert f"process {pid} (" in shown and ("T (stopped)" in shown) == stopped
    assert "hush" not in shown
    where = shown
    if "its own log" in shown or not spy:
        where = (tmp_path / "log").read_text()
        assert "most recent call first" in where
    assert "hang" in where


def test_one_that_does_not_listen_is_not_ended_by_being_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *args, **kw: None)
    silent = BODY.replace("dump_on_signal()", "")
    with process(SLEEP, tmp_path / "log", body=silent) as pid:
        assert "cannot be read" in stacks.show(pid)
        assert stacks.state(pid) in "RS"


def test_a_session_is_the_leader_and_what_it_started(tmp_path):
    act = "import subprocess; subprocess.run(['sleep', '300'], process_group=0)"
    with process(act, tmp_path / "log") as pid:
        deadline = time.monotonic() + 10
        while len(stacks.session(pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found = stacks.session(pid)
        assert found[0] == pid
        os.kill(found[1], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while stacks.session(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "ended" in stacks.show(pid) and not stacks.state(pid)
