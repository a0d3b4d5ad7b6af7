"""Configures environments of the verifiers package, starts their workers and asks them, by JSON
lines over their pipes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from annotated_types import Gt

from megarl.config.run import Positive
from megarl.observability.logging import get_logger
from megarl.rollout.episode_context import pause_clock
from megarl.utils.child import signal_group
from megarl.utils.importing import option_problems

log = get_logger(__name__)

RENDERER = {"name": "custom", "import_path": "megarl_template.TemplateRenderer"}
SCRIPT = Path(__file__).parent / "worker" / "main.py"
# what every program needs to find its files and hosts; nothing else of ours gets to a worker
VARIABLES = (
    "HOME", "LANG", "LC_ALL", "PATH", "TMPDIR", "TZ", "USER", "HF_HOME", "HF_HUB_OFFLINE",
    "NLTK_DATA", "SSL_CERT_FILE", "SSL_CERT_DIR", "http_proxy", "https_proxy", "no_proxy",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "PIP_INDEX_URL", "UV_INDEX_URL", "UV_CACHE_DIR",
)  # fmt: skip
LIMIT = 1 << 30  # bytes of one line
STOP_TIMEOUT = 20.0
TAIL = 20  # lines of what it printed last that an error shows


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Configures one environment, and the workers that run it.

    python: the interpreter that has verifiers. id: the taskset's, as `vf-eval` takes it. args: its
    options. env: further parts of verifiers' EnvConfig (id, the agents by their roles, timeout).
    harness: of agents that name none: megarl_chat answers without tools in the worker itself, null
    is verifiers' own chat program with tools, empty is the taskset's. renderer: how chats become
    tokens, as verifiers' client takes it; the default follows any chat template.
    path: directories with modules of your own. variables: names of environment variables that the
    workers get besides a few that everything needs.
    workers: processes. concurrent: episodes at once in each. start_timeout, episode_timeout:
    seconds, the latter without pauses of generation.
    """

    python: str
    id: str
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    harness: str | None = "megarl_chat"
    renderer: dict[str, Any] = field(default_factory=lambda: dict(RENDERER))
    path: list[str] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    workers: Positive = 1
    concurrent: Positive = 64
    start_timeout: Annotated[float, Gt(0)] = 300.0
    episode_timeout: Annotated[float, Gt(0)] = 1200.0

    def __post_init__(self) -> None:
        if not Path(self.python).is_file():
            raise ValueError(
                f"options.python={self.python!r}: no such interpreter; make one with "
                "python3 -m venv DIR && DIR/bin/pip install verifiers==0.4.0 uv, and name "
                "DIR/bin/python"
            )
        if not self.id:
            raise ValueError("options.id is empty: name the taskset, as vf-eval takes it")
        if missing := [p for p in self.path if not Path(p).is_dir()]:
            raise ValueError(f"options.path: {missing[0]!r} is no directory")

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> EnvironmentConfig:
        """Returns the configuration of a data set's options. Raises ValueError for an option that
        there is not, is missing or is wrong."""
        if problems := "; ".join(option_problems(cls, options, key="options")):
            raise ValueError(problems)
        return cls(**options)

    @property
    def key(self) -> str:
        """Returns a text that equal configurations share."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @property
    def settings(self) -> dict[str, Any]:
        """Returns what a worker is told at its start."""
        env = {**self.env, "taskset": {**self.env.get("taskset", {}), **self.args, "id": self.id}}
        return {"env": env, "harness": self.harness, "concurrent": self.concurrent}


@dataclass(frozen=True)
class _Running:
    """Holds a process and its pipes."""

    process: asyncio.subprocess.Process
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader


class WorkerError(RuntimeError):
    """Says that a worker did not do what it was asked: it ended, was too late, or refused."""


class Worker:
    """Runs one worker process, which starts with the first request and again after its end."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config, self._last = config, 0
        self._running: _Running | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._printed: deque[str] = deque(maxlen=TAIL)
        self._starting, self._gate = asyncio.Lock(), asyncio.Semaphore(config.concurrent)
        self._serving: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """Returns the number of requests that wait for their turn or an answer."""
        return len(self._waiting)

    @property
    def pid(self) -> int | None:
        """Returns the process id; None where no process runs."""
        return self._running.process.pid if self._running is not None else None

    async def ask(self, op: str, *, timeout: float, **fields: Any) -> dict[str, Any]:
        """Returns the answer to a request, which has its turn when fewer than `concurrent` others
        wait for theirs. Raises WorkerError where the process ends or cannot start, `timeout`
        seconds after its turn began, pauses of generation left out, and for an answer that is an
        error."""
        running = await self._started()
        self._last += 1
        number = self._last
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with self._gate, pause_clock().timeout(timeout):
                await self._send(running, {"id": number, "op": op} | fields)
                message = await answer
        except (TimeoutError, asyncio.CancelledError) as e:
            cancel = {"id": -number, "op": "cancel", "target": number}
            with contextlib.suppress(OSError, WorkerError):
                running.stdin.write(_line(cancel))
            if isinstance(e, TimeoutError):
                raise WorkerError(f"{self._name}: no answer to {op} within {timeout:g} s") from None
            raise
        finally:
            self._waiting.pop(number, None)
        if "error" in message:
            raise WorkerError(f"{self._name}: {message['error']}")
        return message

    async def _send(self, to: _Running, message: dict[str, Any]) -> None:
        try:
            to.stdin.write(_line(message))
            await to.stdin.drain()
        except OSError:  # its end; the reader says what it was
            pass

    @property
    def _name(self) -> str:
        return f"environment {self._config.id}"

    # -- the process

    async def _started(self) -> _Running:
        async with self._starting:
            if self._running is None:
                await self._start()
            if self._running is None:
                raise WorkerError(f"{self._name}: the worker ended at once")
            return self._running

    async def _start(self) -> None:
        self._printed.clear()
        process = await asyncio.create_subprocess_exec(
            os.path.abspath(self._config.python),
            str(SCRIPT),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(self._config),
            limit=LIMIT,
            start_new_session=True,
        )
        ready = self._waiting[0] = asyncio.get_running_loop().create_future()
        assert process.stdin and process.stdout and process.stderr
        running = _Running(process, process.stdin, process.stdout, process.stderr)
        self._running, self._serving = running, asyncio.create_task(self._serve(running))
        seconds = self._config.start_timeout
        try:
            async with asyncio.timeout(seconds):
                await self._send(running, self._config.settings)
                await ready
        except TimeoutError:
            await self.close()
            raise WorkerError(
                f"{self._name}: not ready within options.start_timeout={seconds:g} s{self._tail()}"
            ) from None
        finally:
            self._waiting.pop(0, None)

    async def _serve(self, running: _Running) -> None:
        """Takes the worker's answers until it ends, and then ends what is left of it; every request
        that waits then fails at once."""
        printing = asyncio.create_task(self._show(running.stderr))
        try:
            while line := await running.stdout.readline():
                message = json.loads(line)
                answer = self._waiting.get(message["id"])
                if answer is not None and not answer.done():
                    answer.set_result(message)
        except ValueError as e:
            log.error("%s: an answer that cannot be read: %s", self._name, e)
        finally:
            if self._running is running:
                self._running = None
            waiting, self._waiting = self._waiting, {}  # the next process's are others
            end = self._end(running, printing, list(waiting.values()))
            await asyncio.shield(asyncio.ensure_future(end))

    async def _end(
        self,
        running: _Running,
        printing: asyncio.Task[None],
        waiting: list[asyncio.Future[dict[str, Any]]],
    ) -> None:
        """Ends a process with all that it started, and fails the requests that wait for it."""
        process = running.process
        running.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT)
        signal_group(process.pid, signal.SIGKILL)
        status = await process.wait()
        await asyncio.wait({printing}, timeout=1.0)
        printing.cancel()
        error = f"{self._name}: its worker ended with status {status}{self._tail()}"
        for answer in waiting:
            if not answer.done():
                answer.set_exception(WorkerError(error))

    async def _show(self, stderr: asyncio.StreamReader) -> None:
        while line := await stderr.readline():
            text = line.decode(errors="replace").rstrip()
            self._printed.append(text)
            print(f"[{self._name}] {text}", file=sys.stderr, flush=True)

    def _tail(self) -> str:
        lines = "\n".join(self._printed)
        return f"; it printed last:\n{lines}" if lines else ""

    async def close(self) -> None:
        """Ends the process; requests that wait fail."""
        if self._running is not None:
            self._running.stdin.close()
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=2 * STOP_TIMEOUT)


class Workers:
    """Holds the workers of one environment; a request goes to the one with the fewest."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._all = [Worker(config) for _ in range(config.workers)]

    async def ask(self, op: str, *, timeout: float, **fields: Any) -> dict[str, Any]:
        """See Worker.ask."""
        worker = min(self._all, key=lambda w: w.load)
        return await worker.ask(op, timeout=timeout, **fields)

    async def close(self) -> None:
        """Ends all processes."""
        await asyncio.gather(*(worker.close() for worker in self._all))


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Workers]] = WeakKeyDictionary()


def shared_workers(config: EnvironmentConfig) -> Workers:
    """Returns the running loop's workers of an environment: all workflows with an equal
    configuration share them. They end with the loop's tasks."""
    of_loop = _shared.setdefault(asyncio.get_running_loop(), {})
    if config.key not in of_loop:
        of_loop[config.key] = Workers(config)
    return of_loop[config.key]


def _environment(config: EnvironmentConfig) -> dict[str, str]:
    """Returns the environment variables of a worker: a few by name, so that no token of the job is
    among them."""
    env = {k: os.environ[k] for k in (*VARIABLES, *config.variables) if k in os.environ}
    folder = os.path.dirname(os.path.abspath(config.python))  # its `uv`, for harnesses
    env["PATH"] = os.pathsep.join([folder, *filter(None, [env.get("PATH")])])
    env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(p) for p in config.path)
    return env


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
