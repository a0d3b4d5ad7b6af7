"""What an agent of examples/cli_agent.py and code under test can do to the machine, in real
namespaces: as the user who runs the tests, and as an ordinary user if that user is root."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import escaping

ROOT = Path(__file__).parents[2]
NOBODY = 65534
DRIVER = """
import asyncio, json, pathlib, sys, tempfile
from examples.cli_agent import isolated, lay_out, own_directory, own_environment, share_of_passed

HOME, SOURCE = pathlib.Path.home(), pathlib.Path("tests/escaping.py").read_text()
TESTS = f'''
import pathlib, unittest, escaping

class T(unittest.TestCase):
    def test_escapes(self):
        escaping.run(pathlib.Path({str(HOME)!r}), pathlib.Path("by_tests"))
'''
LITTER = '''
import os
os.makedirs("closed/inner")
os.chmod("closed", 0)
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
'''

async def main():
    async def run(*command):
        job = {"command": [sys.executable, *command], "env": own_environment()}
        return await isolated(top, job, 60.0, gateway=("127.0.0.1", 5))

    async with own_directory() as top:
        lay_out(top / "agent", {"files": {"escaping.py": SOURCE}, "tests": {}}, {})
        said = await run("escaping.py", str(HOME), "by_agent")
        said += await run("-c", LITTER)
        earned = await share_of_passed(top, {"test_x.py": TESTS})
        at = top / "agent" / "repository"
        found = {name: json.loads((at / name).read_text()) for name in ("by_agent", "by_tests")}
    return found | {"said": said, "earned": earned}

print(json.dumps(asyncio.run(main())))
"""


@pytest.fixture
def outside() -> Iterator[Path]:
    """A home that is in none of the directories that namespaces hide, with the example in it."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        for name in ("examples/cli_agent.py", "megarl/rollout/tools/confine.py"):
            (Path(path, name)).parent.mkdir(parents=True)
            shutil.copy(ROOT / name, Path(path, name))
        Path(path, "tests").mkdir()
        shutil.copy(escaping.__file__, Path(path, "tests"))
        Path(path, "tmp").mkdir()
        Path(path, ".bashrc").write_text("")
        yield Path(path)
    # a segment that left the namespaces would stay for ever
    subprocess.run(["ipcrm", "-M", str(escaping.SHM_KEY)], capture_output=True)


def drive(outside: Path, user: list[str], python: str) -> dict[str, Any]:
    env = {"PATH": os.environ["PATH"], "HOME": str(outside), "TMPDIR": str(outside / "tmp")}
    done = subprocess.run(
        [*user, python, "-B", "-c", DRIVER],
        env=env | {"PYTHONPATH": str(outside)},
        cwd=outside,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(outside: Path, user: list[str], python: str) -> None:
    found = drive(outside, user, python)
    for name in ("by_agent", "by_tests"):
        seen = found[name]
        assert seen["capabilities"] == ["0" * 16], name
        assert escaping.refused(seen["remounts"]) and escaping.refused(seen["nested"]), seen
        assert seen["write"] == errno.EROFS
        assert escaping.refused({k: seen[k] for k in ("mknod", "device outside", "first process")})
        assert {"null", "zero", "full", "random", "urandom", "tty", "shm", "pts"} <= set(
            seen["devices"]
        )
        others = {"fd", "ptmx", "stdin", "stdout", "stderr"}
        assert len(set(seen["devices"]) - others) == 8, seen["devices"]
        assert set(seen["sockets"].values()) == {errno.EPERM} and seen["datagrams"] == errno.EPERM
        assert seen["io_uring"] == seen["keyring"] == errno.EPERM
        assert seen["works"] == {"random": 3, "pool": 4}
        assert seen["shm"]
    segments = Path("/proc/sysvipc/shm").read_text().split()
    assert str(escaping.SHM_KEY) not in segments
    assert (outside / ".bashrc").read_text() == ""
    assert found["earned"] == 1.0
    assert [line for line in found["said"] if "status" in line] == ["ended with status 0: ''"] * 2
    assert list((outside / "tmp").iterdir()) == []  # deep and closed directories, too


def test_neither_an_agent_nor_tests_leave_their_namespaces(outside: Path) -> None:
    if os.getuid() == 0:  # a device that a mount without nodev would open
        os.mknod(outside / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    check(outside, [], sys.executable)


@pytest.mark.skipif(os.getuid() != 0, reason="the test above is this one for an ordinary user")
def test_nor_do_those_of_an_ordinary_user(outside: Path) -> None:
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "env"]
    mine = subprocess.run([*user, sys.executable, "-c", ""], capture_output=True)
    python = sys.executable if mine.returncode == 0 else "/usr/bin/python3"
    for path in (outside, *outside.rglob("*")):
        shutil.chown(path, NOBODY, NOBODY)
    check(outside, user, python)
