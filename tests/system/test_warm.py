"""A program that starts warm (tests/warm.py) finds what one finds that starts cold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megarl.utils.child import Child
from tests.leftovers import Mark
from tests.warm import cold_starts

PROBE = """
import json, os, signal, subprocess, sys
def facts():
    main = sys.modules["__main__"]
    proc = lambda name: open(f"/proc/self/{name}").read().strip("\\0").split("\\0")
    return dict(
        argv=sys.argv, path=[p for p in sys.path if "__editable__" not in p], cwd=os.getcwd(),
        environ=dict(os.environ), shown=[proc("cmdline"), proc("environ")],
        parent=os.getppid(), leads=[os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        ignored=[n for n in range(1, 32) if signal.getsignal(n) == signal.SIG_IGN],
        blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        main=[main.__name__, main.__package__, getattr(main, "__file__", None), facts.__module__],
        files=[n for n in range(3, 40) if os.path.exists(f"/proc/self/fd/{n}")
               and os.get_inheritable(n)],
        sent=os.read(int(sys.argv[1]), 9).decode(),
    )
sys.stdout.write(json.dumps(facts()))
print("an error", file=sys.stderr)
"""
ENDS = {
    "sys.exit(7)": 7,
    "sys.exit()": 0,
    "sys.exit('why')": 1,
    "raise KeyError('why')": 1,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "os.kill(os.getpid(), 9)": -signal.SIGKILL,
    "os._exit(3)": 3,
    "import atexit; atexit.register(print, 'at exit')": 0,
    "import threading; threading.Timer(0.2, print, ['a thread']).start()": 0,
    "import subprocess; sys.exit(subprocess.call([sys.executable, __file__, 'sys.exit(5)']))": 5,
}


def probed(folder: Path, *, cold: bool) -> tuple[dict[str, Any], str]:
    script = folder / "probe.py"
    script.write_text(PROBE)
    read, write = os.pipe()
    os.write(write, b"some bytes")
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with cold_starts() if cold else nullcontext():
            process = subprocess.Popen(
                [sys.executable, str(script), str(read), "é"],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=os.environ | {"PYTHONPATH": str(folder), "WORD": "1"}, cwd=folder,
                pass_fds=[read], start_new_session=True,
            )  # fmt: skip
        out, err = process.communicate(timeout=60)
    finally:
        signal.signal(signal.SIGUSR1, before)
        os.close(read)
        os.close(write)
    assert process.returncode == 0, err
    return json.loads(out), err


def test_a_program_finds_the_same(tmp_path: Path) -> None:
    (cold, cold_errors), (warm, errors) = (probed(tmp_path, cold=c) for c in (True, False))
    assert errors == cold_errors == "an error\n"
    assert warm["parent"] == cold["parent"] == os.getpid()
    for name in cold:
        assert warm[name] == cold[name], name


@pytest.mark.parametrize("code", ENDS)
def test_a_program_ends_the_same(tmp_path: Path, code: str) -> None:
    script = tmp_path / "end.py"
    script.write_text("import os, sys\nexec(sys.argv[1])\n")
    ends = []
    for starts in (cold_starts, nullcontext):
        with starts():
            command = [sys.executable, str(script), code]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
        ends.append((ran.returncode, ran.stdout, ran.stderr))
    assert ends[0] == ends[1]
    assert ends[0][0] == ENDS[code]


def test_a_group_ends_by_a_signal_and_nothing_is_left(tmp_path: Path) -> None:
    script, mark = tmp_path / "wait.py", Mark()
    wait = "import subprocess, sys, time\n"
    wait += "if len(sys.argv) < 2: subprocess.Popen([sys.executable, __file__, 'x'])\n"
    script.write_text(wait + "print(1, flush=True)\ntime.sleep(300)\n")
    process = subprocess.Popen(
        [sys.executable, str(script)], env=os.environ | mark.env, start_new_session=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        for _ in range(2):
            assert process.stdout.readline() == b"1\n"
        assert len(mark.left()) == 2 and process.poll() is None
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
        assert process.stdout.read() == b""  # nobody holds the pipe
    mark.assert_none_left()


def test_a_start_is_warm_and_others_are_cold(tmp_path: Path) -> None:
    """A warm program finds modules that it did not import."""
    script = tmp_path / "modules.py"
    script.write_text("import sys\nprint('torch' in sys.modules)\n")
    for command, variables, warm in (
        ([str(script)], {}, True),
        ([str(script)], {"TORCHELASTIC_RUN_ID": "a rank of torchrun"}, True),
        ([str(script)], {"HF_HUB_OFFLINE": "0"}, False),
        (["-c", script.read_text()], {}, False),
        (["-B", str(script)], {}, False),
    ):
        out = subprocess.check_output(
            [sys.executable, *command], env=os.environ | variables, text=True, timeout=60
        )
        assert out == f"{warm}\n", (command, variables)


def test_a_child_of_a_job_is_warm(tmp_path: Path) -> None:
    script, log = tmp_path / "modules.py", tmp_path / "log"
    script.write_text("import os, sys\nprint('torch' in sys.modules, os.getpid() == os.getsid(0))")
    child = Child("modules", [sys.executable, str(script)], env=os.environ, log_path=log)
    child.wait(60)
    assert child.poll() == 0 and log.read_text() == "True True\n"
