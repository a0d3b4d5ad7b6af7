"""Signals as wishes: seen at once, fulfilled by the loop, and final the second time."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

LOOP = """
import sys, time
from megarl.utils import stopping
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


def test_a_run_that_ends_by_itself_after_a_signal_ended_well():
    command = [sys.executable, "-c", LOOP, "working", "ends anyway"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
