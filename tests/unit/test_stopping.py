"""Signals as wishes: seen at once, fulfilled by the loop, and final the second time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

LOOP = """
import signal, sys, time
from megarl.utils import stopping
signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in sys.argv else signal.SIG_DFL)
if "background" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
with stopping.listening():
    if "working" in sys.argv:
        stopping.work_begins()
    print("ready", flush=True)
    while not stopping.wish():
        time.sleep(0.01)
    print("seen", flush=True)
    if "stuck" in sys.argv:
        time.sleep(60)
    if "ends anyway" not in sys.argv:
        stopping.honour(stopping.wish())
sys.exit(stopping.status())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "how, sent, seen",
    [("working", 1, True), ("stuck working", 2, True), ("setting up", 1, False)],
    ids=["a step", "twice", "before the first step"],
)
def test_a_signal_is_a_wish_while_there_is_something_to_lose(number, how, sent, seen):
    command = [sys.executable, "-c", LOOP, *how.split()]
    with subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        if seen:
            assert process.stdout.readline() == "seen\n"
        if sent == 2:
            process.send_signal(signal.SIGTERM)
        last = number if sent == 1 else signal.SIGTERM
        assert process.wait(30) == 128 + last
        said = process.stderr.read()
    assert "Traceback" not in said and signal.Signals(number).name in said
    assert ("ends with a checkpoint" in said) == seen
    assert ("ending at once" in said) == (sent == 2 or not seen)


def test_a_schedulers_signal_and_the_launchers_are_one_wish():
    command = [sys.executable, "-c", LOOP, "stuck", "working"]
    env = os.environ | {"MEGARL_SIGNAL_SETTLE": "60"}
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "seen\n"
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.kill()


def test_a_run_that_ends_by_itself_after_a_signal_ended_well():
    command = [sys.executable, "-c", LOOP, "working", "ends anyway"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_a_run_that_a_shell_put_in_the_background_takes_sigint():
    command = [sys.executable, "-c", LOOP, "working", "background"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT


def test_a_hang_up_that_nohup_turned_off_stays_off():
    command = [sys.executable, "-c", LOOP, "working", "nohup"]
    with subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
        assert process.stderr is not None and "SIGHUP" not in process.stderr.read()


FORK = """
import os, signal, sys, time
from megarl.utils import stopping

def fork():
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, b"1")
        time.sleep(20)
        os._exit(0)
    os.read(read, 1)
    return child

with stopping.listening():
    stopping.work_begins()
    left = fork()  # holds the pipe of signals for as long as it lives
    child = fork()
    os.kill(child, signal.SIGTERM)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(ended == -signal.SIGTERM, stopping.wish(), flush=True)
os.kill(left, signal.SIGKILL)
"""


def test_a_signal_to_a_forked_child_is_the_child_s_alone():
    """As multiprocessing's pools send when they end."""
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True 0\n"), done.stderr
