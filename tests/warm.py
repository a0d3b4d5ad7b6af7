"""Starts Python programs of tests by fork, from a process that has imported everything.

An interpreter of a job imports torch, transformers and megatron-core for seconds before its first
line of work, and a job has three or more. `warm_starts` replaces how `subprocess` starts a program
of this interpreter (`python -m module ...`, `python script.py ...`): a zygote, which has imported
those libraries and done nothing else, forks, and the new process runs the program as `__main__`,
with the arguments, environment, files, session and ignored signals that the caller asked for. It
is the caller's own child: its pid, its exit status, signals and groups are those of a program that
was started anew. It brings a zygote of its own, so that what it starts is warm, too.

Whatever a fork cannot do as a new interpreter does it starts cold: other flags, other variables
that an interpreter or a library reads once, a sitecustomize.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import logging
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

IMPORTS = (
    "megarl.trainer.rl",
    "megarl.trainer.offline",
    "megarl.server.app",
    "megarl.launcher.local",
    "megarl.launcher.node",
    "megarl.rpc.worker",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
# what an interpreter or a library reads once: a process with others of these starts cold
READ_ONCE = (
    "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "LD_", "TORCH", "PYTORCH_", "HF_", "TRANSFORMERS_",
    "TOKENIZERS_", "XDG_", "HOME", "LANG", "LC_", "TZ",
)  # fmt: skip
MODULES = ("megarl.", "tests.", "torch.distributed.")  # and scripts: others know nothing of forks
READ_AT_START = ("PYTHONPATH", "PYTHONUNBUFFERED")  # but these two, which `_become` follows
READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL_")  # nor these, which torchrun gives its ranks
# megarl.utils.child starts `python -ISc TEXT COMMAND...`, which runs COMMAND after a byte of stdin
FLAGS_OF_CHILD, RUN_BY_CHILD = "-ISc", "if os.read(0, 1):"
# what a group may be sent: a zygote, which is in its parent's, ends with its link alone
OF_THE_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ROOM = 1 << 16  # bytes for a command line and for an environment, as /proc shows them
LARGEST = 1 << 17  # bytes of a request
_SUBREAPER, _IS_SUBREAPER = 36, 37  # prctl's PR_SET_CHILD_SUBREAPER and PR_GET_CHILD_SUBREAPER
_cold = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_ARGUMENTS = list(inspect.signature(_cold).parameters)[1:]
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Request:
    """Says what a new process is to be. files: the number of each descriptor that is sent. waits:
    for a byte of its stdin, at whose end without one it ends."""

    command: list[str]
    env: dict[str, str]
    cwd: str
    files: list[int]
    session: bool
    waits: bool = False
    ignored: list[int] = field(
        default_factory=lambda: [
            n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN
        ]
    )
    masked: list[int] = field(
        default_factory=lambda: list(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    )


class Zygote:
    """Starts processes by a zygote. env: the variables with which it imports. link: leads to the
    zygote; None for one that the first start makes."""

    def __init__(self, env: Mapping[str, str], link: socket.socket | None = None) -> None:
        self._env, self._link, self._lock = dict(env), link, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def can_start(self, words: Sequence[str], env: Mapping[str, str]) -> bool:
        """Returns whether a fork can be what the command would start."""
        if not words or words[0] != sys.executable or _read_once(env) != _read_once(self._env):
            return False
        if any((Path(p) / "sitecustomize.py").exists() for p in _python_path(env)):
            return False
        first, second, *_ = *_words(words), "", ""
        if first == "-m":
            return second.startswith(MODULES)
        return first.endswith(".py") and "site-packages" not in first

    def start(self, request: Request, descriptors: Sequence[int]) -> int:
        """Returns the pid of a new process, a child of this one."""
        with self._lock, _adopting():
            if self._link is None:
                self._process, self._link = _new_zygote(self._env)
            socket.send_fds(self._link, [pickle.dumps(request)], list(descriptors))
            return int(self._link.recv(64))

    def close(self) -> None:
        """Ends the zygote, of which nothing that it has started knows."""
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._process.wait(60)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Makes this process the parent of orphans below it, as those of its zygote are."""
    before = ctypes.c_int()
    _libc.prctl(_IS_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_SUBREAPER, before.value, 0, 0, 0)


@contextlib.contextmanager
def warm_starts() -> Iterator[None]:
    """Has `subprocess` start by fork, within the block, whatever a zygote of its own can."""
    zygote = Zygote(os.environ)
    _start_by(zygote)
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _cold  # type: ignore[attr-defined]
        zygote.close()


@contextlib.contextmanager
def cold_starts() -> Iterator[None]:
    """Has `subprocess` start new interpreters within the block, as it does by itself."""
    before = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    subprocess.Popen._execute_child = _cold  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = before  # type: ignore[attr-defined]


def _start_by(zygote: Zygote) -> None:
    """Has `subprocess` start by fork what the zygote can."""

    def execute_child(self: subprocess.Popen[Any], *arguments: Any) -> None:
        asked = SimpleNamespace(**dict(zip(_ARGUMENTS, arguments, strict=True)))
        env = dict(os.environ if asked.env is None else asked.env)
        special = (
            asked.preexec_fn,
            asked.executable,
            asked.shell,
            asked.gid,
            asked.gids,
            asked.uid,
        )
        numbers = (asked.umask, getattr(asked, "process_group", -1))
        plain = asked.close_fds and not any(special) and numbers == (-1, -1)
        words = [] if isinstance(asked.args, str | bytes) else list(map(os.fspath, asked.args))
        waits = words[1:2] == [FLAGS_OF_CHILD] and RUN_BY_CHILD in words[2]
        if waits:
            words = words[3:]
        if not plain or not zygote.can_start(words, env):
            _cold(self, *arguments)
            return
        given = {0: asked.p2cread, 1: asked.c2pwrite, 2: asked.errwrite}
        files = {n: n if fd == -1 else fd for n, fd in given.items()}
        files |= {n: n for n in asked.pass_fds}
        self.pid = zygote.start(
            Request(words, env, cwd=os.fspath(asked.cwd or os.getcwd()), files=list(files),
                    session=asked.start_new_session, waits=waits),
            list(files.values()),
        )  # fmt: skip
        self._child_created = True  # type: ignore[attr-defined]
        self._close_pipe_fds(  # type: ignore[attr-defined]
            asked.p2cread, asked.p2cwrite, asked.c2pread, asked.c2pwrite, asked.errread,
            asked.errwrite,
        )  # fmt: skip

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def _new_zygote(env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a cold interpreter that imports everything once; it ends with the link."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there, cold_starts():
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(there.fileno()), "x" * ROOM],
            env={**env, "MEGARL_TEST_ROOM": "x" * ROOM},
            cwd=Path(__file__).parent.parent,
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
        )
    return process, here


def _read_once(env: Mapping[str, str]) -> dict[str, str]:
    others = READ_AT_START + READ_LATER
    return {k: v for k, v in env.items() if k.startswith(READ_ONCE) and not k.startswith(others)}


def _words(command: Sequence[str]) -> list[str]:
    """Returns a command line without the interpreter and flags that a fork can follow."""
    return [word for word in command[1:] if word != "-u"]


def _python_path(env: Mapping[str, str]) -> list[str]:
    return [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]


# in the zygote, and in the processes that leave it


def main() -> NoReturn:
    """Imports everything and serves; each new process runs its program and ends."""
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    os.environ.pop("MEGARL_TEST_ROOM")
    env = dict(os.environ)
    site = [p for p in sys.path[1:] if p not in _python_path(env)]
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # nothing that is shared is written by a collection
    while True:
        for number in OF_THE_GROUP:
            signal.signal(number, signal.SIG_IGN)
        request, descriptors = _serve(link)
        if request.session:
            os.setsid()
        here, link_of_next = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            link.close()
            link_of_next.close()
            _become(request, descriptors, here, site)
            _start_by(Zygote(env, here))
            _end(_status_of(request.command))
        for closed in (link, here):  # their numbers are others' from now on
            closed.detach()
        link = _alone_with(link_of_next)


def _serve(link: socket.socket) -> tuple[Request, list[int]]:
    """Forks a process for each request; returns in these. Ends the zygote with its parent."""
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(link, LARGEST, 64)
        except OSError:
            os._exit(0)
        if not data:
            os._exit(0)
        read, write = os.pipe()
        between = os.fork()
        if not between:
            between = os.getpid()
            if pid := os.fork():
                os.write(write, str(pid).encode())
                os._exit(0)
            os.close(read)
            os.close(write)
            while os.getppid() == between:  # until its end gives us to the caller
                os.sched_yield()
            return pickle.loads(data), descriptors
        os.close(write)
        os.waitpid(between, 0)
        link.send(os.read(read, 64))
        for fd in (read, *descriptors):
            os.close(fd)


def _alone_with(link: socket.socket) -> socket.socket:
    """Leaves this process, the next zygote, no files but its link."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    keep = link.fileno()
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    return link


def _become(
    request: Request, descriptors: Sequence[int], link: socket.socket, site: Sequence[str]
) -> None:
    """Gives this process what the request says, as exec would."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in OF_THE_GROUP[1:]:
        signal.signal(number, signal.SIG_DFL)
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.masked)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    _show(request)
    _place_files(request.files, descriptors, link)
    if request.waits and not os.read(0, 1):
        os._exit(0)
    unbuffered = "-u" in request.command or bool(request.env.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _text(1, unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2, True)  # type: ignore[misc]
    sys.path[:] = ["", *_python_path(request.env), *site]
    be_another()


def be_another() -> None:
    """Gives a fork what an import took from its parent: draws, and how a rank logs."""
    import numpy as np

    from megarl.observability.logging import ROOT, get_logger

    np.random.seed()  # `random` does so itself
    logging.getLogger(ROOT).handlers.clear()
    get_logger()


def _text(number: int, unbuffered: bool) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(number, "w", closefd=False)),
        errors="backslashreplace" if number == 2 else "strict",
        write_through=unbuffered,
        line_buffering=os.isatty(number) or number == 2,
    )


def _place_files(numbers: Sequence[int], descriptors: Sequence[int], link: socket.socket) -> None:
    """Moves the received descriptors to the numbers that they had; closes all others."""
    above = max(*numbers, *descriptors, link.fileno()) + 1
    moved = [os.dup2(fd, above + i, inheritable=False) for i, fd in enumerate(descriptors)]
    own = os.dup2(link.detach(), above + len(moved), inheritable=False)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
    for number in range(3, own):
        if number not in numbers:
            with contextlib.suppress(OSError):
                os.close(number)
    link.__init__(fileno=own)  # type: ignore[misc]


def _show(request: Request) -> None:
    """Writes the command line and the environment where /proc reads them."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    env = [f"{name}={value}" for name, value in request.env.items()]
    for at, words in ((45, request.command), (47, env)):
        begin, end = int(fields[at]), int(fields[at + 1])
        text = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)
        size = end - begin
        ctypes.memmove(begin, text[: size - 1].ljust(size, b"\0"), size)


def _run(command: Sequence[str]) -> None:
    """Runs the program as `__main__`; what it raises ends the interpreter as always."""
    words = _words(command)
    program = types.ModuleType("__main__")
    program.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = program
    show = sys.excepthook
    sys.excepthook = lambda kind, error, trace: show(
        kind, error.with_traceback(_of_program(trace)), error.__traceback__
    )
    if words[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)
        sys.modules.pop(f"{words[1]}.__main__", None)
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    script = words[0]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    sys.argv = words
    program.__file__ = script
    program.__loader__ = SourceFileLoader("__main__", script)
    program.__package__ = None
    exec(compile(Path(script).read_bytes(), script, "exec"), program.__dict__)


def _status_of(command: Sequence[str]) -> int:
    """Runs the program; returns the exit status that an interpreter gives its end."""
    try:
        _run(command)
    except SystemExit as e:
        if e.code is None or isinstance(e.code, int):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt as e:
        sys.excepthook(type(e), e, e.__traceback__)
        return -signal.SIGINT
    except BaseException as e:
        sys.excepthook(type(e), e, e.__traceback__)
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """Ends as an interpreter does, but for taking apart what it shares with its zygote."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _of_program(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback without the frames of this file and of runpy."""
    while trace is not None and trace.tb_next is not None:
        name = trace.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name:
            break
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    from tests.warm import main as the_modules_own  # whose Request is the one that is sent

    the_modules_own()
