"""Programs that try to leave the sandbox, or to take more than they were given."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.rollout.tools import confine
from megarl.rollout.tools.sandbox import Limits, Ran, SandboxError, SandboxLost, run_program

MIB = 1 << 20
SMALL = Limits(wall=20, cpu=1, memory=256 * MIB, file_size=MIB, files=4 * MIB, output=20_000)


def run(source: str, *, stdin: str = "", limits: Limits = SMALL, show_last: bool = False) -> Ran:
    return asyncio.run(run_program(source, stdin=stdin, limits=limits, show_last=show_last))


@pytest.fixture(autouse=True)
def _nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No directory and no process of a sandbox is left by any test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.glob("megarl-sandbox-*"))
    running = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout
    assert str(tmp_path) not in running


def test_a_program_computes_and_writes_its_own_files() -> None:
    assert run("print(input()[::-1])", stdin="abc\n") == Ran(
        ended="ok", code=0, stdout="cba\n", stderr=""
    )
    files = "open('a','w').write('x' * 10)\nimport os\nprint(os.listdir('.'), open('a').read())"
    assert "xxxxxxxxxx" in run(files).stdout
    assert run("x = 2\nx * 21", show_last=True).stdout == "42\n"
    assert run("x = 2\nx = 3", show_last=True).stdout == ""
    several = """
import asyncio, threading, json, math, tempfile, numpy
async def f():
    await asyncio.sleep(0.01)
    return int(numpy.arange(4).sum())
t = threading.Thread(target=print, args=("thread",))
t.start(); t.join()
print(asyncio.run(f()))
with tempfile.TemporaryFile() as f: f.write(b"1")
"""
    ran = run(several, limits=Limits(cpu=5))
    assert (ran.ended, ran.stdout) == ("ok", "thread\n6\n"), ran


def test_an_error_is_the_programs_own() -> None:
    ran = run("def f():\n    return 1 / 0\nf()")
    assert (ran.ended, ran.code) == ("error", 1)
    assert ran.stderr.startswith('Traceback (most recent call last):\n  File "program.py", line 3')
    assert ran.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "SyntaxError" in run("x = = 1").stderr
    assert run("import sys; sys.exit(7)").code == 7
    assert run("import os; os.abort()").code == -signal.SIGABRT
    assert run("print('\\ud800')").ended == "error"


FORBIDDEN = {
    "a process": "import os; os.fork()",
    "a fork bomb": "import os\nwhile True: os.fork()",
    "a shell": "import subprocess; subprocess.run(['/bin/sh', '-c', 'echo escaped'])",
    "another program": "import os; os.execv('/bin/sh', ['sh', '-c', 'echo escaped'])",
    "a daemon": "import os\nif os.posix_spawn('/bin/sleep', ['sleep', '60'], {}): print('escaped')",
    "multiprocessing": "import multiprocessing as m\np = m.Process(target=print)\np.start()",
    "a TCP socket": "import socket; socket.socket()",
    "a UNIX socket": "import socket; socket.socket(socket.AF_UNIX)",
    "datagrams": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "a download": "import urllib.request as u; u.urlopen('http://127.0.0.1:80')",
    "killing the parent": "import os; os.kill(os.getppid(), 9)",
    "killing everybody": "import os; os.kill(-1, 9)",
    "killing itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "killing its thread": "import signal as s; s.raise_signal(s.SIGKILL)",
    "a signal by SIGIO": "import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "limits of the parent": "import os, resource as r; r.prlimit(os.getppid(), 0, (1, 1))",
    "higher limits": "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))",
    "another user": "import os; os.setuid(12345)",
    "an owner": "import os; os.chown('program.py', 12345, 12345)",
    "a mode": "import os; os.chmod('/tmp', 0o777)",
    "times": "import os; os.utime('/tmp')",
    "a directory": "import os; os.mkdir('deep')",
    "a link": "import os; os.symlink('/etc/passwd', 'x')",
    "a hard link": "import os; os.link('/etc/hostname', 'x')",
    "the user's files": "print('escaped', open('/etc/passwd').read())",
    "listing files": "import os; print('escaped', os.listdir('/'))",
    "the parent's environment": "import os\nopen(f'/proc/{os.getppid()}/environ').read()",
    "its own memory as a file": "open('/proc/self/mem', 'rb')",
    "shared memory": "from multiprocessing.shared_memory import SharedMemory as S\nS('x', True, 9)",
    "writing packages": "import json; open(json.__file__, 'a')",
    "removing a package": "import json, os; os.remove(json.__file__)",
    "debugging": "import ctypes, os\nl = ctypes.CDLL(None, use_errno=True)\n"
    "r = l.ptrace(16, os.getppid(), 0, 0)\nassert r == 0, ctypes.get_errno()",
    "giving up the filter": "import ctypes\nl = ctypes.CDLL(None)\n"
    "r = l.prctl(22, 0, 0, 0, 0)\nassert r == 0, r",
    "reserving disk space": "import os\nos.posix_fallocate(os.open('x', 66), 0, 4096)",
    "a file without a name": "import os\nos.open('.', os.O_TMPFILE | os.O_RDWR)",
    "renaming": "import os\nopen('x', 'w')\nos.rename('x', 'y')",
    "replacing": "import os\nopen('x', 'w'), open('y', 'w')\nos.replace('x', 'y')",
    "io_uring": "import ctypes\nl = ctypes.CDLL(None)\nassert l.syscall(425, 1, 0) >= 0",
    "a namespace": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
}


@pytest.mark.parametrize("attempt", FORBIDDEN)
def test_what_a_program_may_not_do(attempt: str) -> None:
    ran = run(FORBIDDEN[attempt])
    assert (ran.ended, ran.code) == ("error", 1), ran
    assert "escaped" not in ran.stdout
    if "assert" not in FORBIDDEN[attempt]:
        refused = ("PermissionError", "not allowed to raise", "Invalid cross-device link")
        assert any(word in ran.stderr for word in refused), ran.stderr


def test_it_reads_nothing_of_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-job")
    (tmp_path / "batch.txt").write_text("of the job")
    assert "secret" not in run("import os; print(dict(os.environ))").stdout
    assert "PermissionError" in run(f"open({str(tmp_path / 'batch.txt')!r}).read()").stderr
    assert "PermissionError" in run(f"open({str(tmp_path / 'new.txt')!r}, 'w')").stderr
    assert not (tmp_path / "new.txt").exists()
    opened = "import os\nprint([os.readlink(f'/proc/self/fd/{i}') for i in range(3, 20)])"
    with tempfile.TemporaryFile() as inherited:
        os.set_inheritable(inherited.fileno(), True)
        assert run(opened).ended == "error"  # there is no fourth file


def test_a_listening_server_hears_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        ran = run(f"import socket; socket.create_connection(('127.0.0.1', {port}))")
        assert "PermissionError" in ran.stderr
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_program_that_somebody_kills_is_a_failure_of_the_sandbox(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 1.5: pass"

    async def killed() -> Ran:
        burner = subprocess.Popen([sys.executable, "-c", burn])
        program = asyncio.create_task(run_program("import time; time.sleep(60)", limits=SMALL))
        seen = ""
        while not seen:
            await asyncio.sleep(0.1)
            seen = subprocess.run(
                ["pgrep", "-f", str(tmp_path)], capture_output=True, text=True
            ).stdout
        # what another child used while the program ran is not its own
        await asyncio.to_thread(burner.wait, 60)
        os.kill(int(seen.split()[0]), signal.SIGKILL)
        return await program

    with pytest.raises(SandboxLost, match="somebody killed"):
        asyncio.run(killed())


def test_limits_end_a_program() -> None:
    assert run("while True: pass").ended == "time"
    ignoring = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run(ignoring).ended == "time"
    assert run("import time; time.sleep(60)", limits=Limits(wall=0.5)).ended == "time"
    # less than an interpreter takes to start, which is not the program's time
    assert run("while True: pass", limits=Limits(wall=0.02, cpu=2)).ended == "time"
    assert run("x = ' ' * (1 << 30)").stderr.endswith("MemoryError\n")
    threads = "import threading, time\nwhile True:\n"
    threads += "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    assert "can't start new thread" in run(threads).stderr
    ran = run("while True: print('x' * 1000)")
    assert (ran.ended, len(ran.stdout)) == ("output", SMALL.output)
    assert run("import sys\nwhile True: sys.stderr.write('x' * 1000)").ended == "output"
    assert "File too large" in run(f"open('x', 'wb').write(b'x' * {2 * MIB})").stderr
    many = f"i = 0\nwhile True:\n    i += 1\n    open(str(i), 'wb').write(b'x' * {MIB // 2})"
    assert run(many, limits=Limits(files=MIB)).ended == "files"
    assert run("i = 0\nwhile True:\n    i += 1\n    open(str(i), 'w')").ended == "files"
    with pytest.raises(ValueError, match="sandbox limit cpu=0"):
        Limits(cpu=0)


TAKES_DISK = """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
kept = []
for i in range(64):
    with open(f"f{i}", "wb+") as file:
        file.write(bytes(1 << 20))
        file.flush()
        kept.append(libc.mmap(None, 4096, 1, 1, file.fileno(), 0))
    REMOVE
"""
REMOVALS = {
    "by the library": "libc.unlink(f'f{i}'.encode())",
    "by the kernel": "libc.syscall(263, -100, f'f{i}'.encode(), 0)",
    "by renaming": "libc.rename(f'f{i}'.encode(), b'f')",
    "by replacing": "libc.renameat2(-100, f'f{i}'.encode(), -100, b'f', 0)",
    "by Python": "import os; os.remove(f'f{i}')",
}


@pytest.mark.parametrize("removal", REMOVALS)
def test_what_takes_disk_space_is_counted(removal: str) -> None:
    program = TAKES_DISK.replace("REMOVE", REMOVALS[removal])
    most, kept = 4 * MIB, "print(ctypes.string_at(kept[0], 1))"
    ran = run(f"{program}\nimport time\ntime.sleep(1)\n{kept}", limits=Limits(files=most, cpu=5))
    if ran.ended == "files":
        return
    # nothing is left of what was removed: its pages are gone
    assert removal == "by Python" and (ran.ended, ran.code) == ("signal", -signal.SIGBUS), ran


def test_a_program_cleans_up_behind_itself() -> None:
    program = """
import os, pathlib, tempfile
with tempfile.TemporaryFile() as file:
    file.write(b"12")
    file.seek(0)
    print(file.read())
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("3")
fd, path = tempfile.mkstemp()
os.close(fd)
os.remove(path)
path = pathlib.Path("x")
path.write_text("4")
path.unlink()
print(path.read_text() == "")
try:
    os.remove("none")
except FileNotFoundError:
    print("none")
"""
    ran = run(program)
    assert (ran.ended, ran.stdout) == ("ok", "b'12'\nTrue\nnone\n"), ran


def test_threads_are_bounded() -> None:
    many = """
import threading, time
threading.stack_size(65536)
for i in range(NUMBER):
    threading.Thread(target=time.sleep, args=(WAIT,), daemon=True).start()
time.sleep(WAIT)
"""
    for number, wait, ended in ((400, 15, "threads"), (32, 0.5, "ok")):
        program = many.replace("NUMBER", str(number)).replace("WAIT", str(wait))
        assert run(program, limits=Limits(wall=20, cpu=5)).ended == ended


def test_it_goes_first_where_memory_runs_out(tmp_path: Path) -> None:
    async def score() -> str:
        program = asyncio.create_task(
            run_program("open('begun', 'w')\nimport time; time.sleep(60)")
        )
        while not list(tmp_path.glob("megarl-sandbox-*/begun")):
            assert not program.done()
            await asyncio.sleep(0.05)
        seen = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout
        program.cancel()
        return Path(f"/proc/{seen.split()[0]}/oom_score_adj").read_text().strip()

    assert asyncio.run(score()) == "1000"


def test_a_cancelled_program_is_killed() -> None:
    async def cancelled() -> None:
        async with asyncio.timeout(0.5):
            await run_program("import time; time.sleep(60)")

    with pytest.raises(TimeoutError):
        asyncio.run(cancelled())  # the fixture sees that nothing stays


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import asyncio; from megarl.rollout.tools.sandbox import run_program\n"
        "asyncio.run(run_program(\"open('begun', 'w')\\nimport time; time.sleep(60)\"))"
    )
    env = dict(os.environ) | {"TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=env)
    while not list(tmp_path.glob("megarl-sandbox-*/begun")):
        assert parent.poll() is None
    parent.kill()
    parent.wait()
    (directory,) = tmp_path.glob("megarl-sandbox-*")
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    deadline = 200
    while str(directory) in subprocess.check_output(["ps", "-eo", "args"], text=True):
        deadline -= 1
        assert deadline, "the program outlives its parent"


def test_a_machine_that_cannot_confine_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match="was not run: OverflowError"):
        run("print(1)", limits=Limits(memory=1 << 80))  # no kernel knows such a number
    monkeypatch.setattr(confine, "__file__", str(Path(__file__).parent / "no_such_file.py"))
    with pytest.raises(SandboxError, match="was not run"):
        run("print(1)")


def test_a_sandbox_that_cannot_start_closes_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = (tmp_path / "given").open("wb")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(SandboxError):
        asyncio.run(run_program("print(1)", files=(given,)))
    assert given.closed


# by machine: its audit number, and those of calls, as the kernel's headers have them
CALLS = {
    "x86_64": (
        0xC000003E,
        {"read": 0, "execve": 59, "socket": 41, "openat": 257, "clone": 56, "kill": 62}
        | {"tgkill": 234, "prlimit64": 302, "ioctl": 16, "fcntl": 72, "socketpair": 53},
    ),
    "aarch64": (
        0xC00000B7,
        {"read": 63, "execve": 221, "socket": 198, "openat": 56, "clone": 220, "kill": 129}
        | {"tgkill": 131, "prlimit64": 261, "ioctl": 29, "fcntl": 25, "socketpair": 199},
    ),
}
EVERYWHERE = {"clone3": 435, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
PID, THREAD, NEW_MOUNTS = 1234, 0x10000, 0x20000


def verdict(code: list[tuple[int, int, int, int]], audit: int, number: int, *args: int) -> int:
    """What the kernel's interpreter of classic BPF makes of a system call."""
    data = struct.pack("=II8x6Q", number, audit, *args, *[0] * (6 - len(args)))
    at = value = 0
    while True:
        operation, yes, no, k = code[at]
        assert 0 <= yes < 256 and 0 <= no < 256
        at += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("=I", data, k)
        elif operation == 0x54:
            value &= k
        elif operation == 0x15:
            at += yes if value == k else no
        else:
            assert operation == 0x06
            return k


@pytest.mark.parametrize("machine", CALLS)
def test_the_filter_allows_what_computing_needs_and_no_more(machine: str) -> None:
    audit, numbers = CALLS[machine]
    code = confine.filter_program(machine, PID)

    def of(name: str, *args: int) -> int:
        return verdict(code, audit, (numbers | EVERYWHERE)[name], *args)

    allowed = [
        ("read",),
        ("openat", 0, 0, os.O_RDONLY),
        ("clone", THREAD),
        ("kill", PID, signal.SIGTERM),
        ("tgkill", PID, PID + 1, signal.SIGTERM),
        ("prlimit64", 0, 7, 0),
        ("prlimit64", PID, 7, 0),
        ("ioctl", 1, 0x5401),
        ("fcntl", 1, 3),
        ("socketpair", 1, 1),
    ]
    refused = [
        ("execve",),
        ("socket", 1, 1),
        *((name,) for name in EVERYWHERE if name != "clone3"),
        ("openat", 0, 0, 0x400000),  # a file without a name
        ("clone", 0),
        ("clone", THREAD | NEW_MOUNTS),
        ("kill", PID, signal.SIGKILL),
        ("kill", PID + 1, signal.SIGTERM),
        ("tgkill", PID, PID, signal.SIGKILL),
        ("tgkill", PID + 1, PID + 1, signal.SIGTERM),
        ("prlimit64", PID + 1, 7, 0),
        ("prlimit64", 0, 7, 1 << 32),
        ("ioctl", 1, 0x5412),
        ("fcntl", 1, 8),  # who gets signals
        ("socketpair", 1, 2),
    ]
    assert [call for call in allowed if of(*call) != ALLOW] == []
    assert [call for call in refused if of(*call) != ERRNO | errno.EPERM] == []
    assert of("clone3") == ERRNO | errno.ENOSYS
    assert verdict(code, audit + 1, numbers["read"]) == KILL
