"""The embedded server as a subprocess, and a client that shows statuses as they are."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.utils.env import free_port
from megarl.utils.http import authorization

START_TIMEOUT, STOP_TIMEOUT = 90.0, 10.0


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    def call(
        self, method: str, path: str, body: Any = None, *, timeout: float = 60.0
    ) -> tuple[int, Any]:
        """(status, decoded JSON or text)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            payload = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json"} | authorization()
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
            status, raw = response.status, response.read().decode()
        finally:
            connection.close()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw

    def post(self, path: str, body: Any = None, **kw: Any) -> tuple[int, Any]:
        return self.call("POST", path, body, **kw)

    def get(self, path: str, **kw: Any) -> tuple[int, Any]:
        return self.call("GET", path, **kw)

    def ok(self, path: str, body: Any = None) -> Any:
        """The answer of a POST that must succeed."""
        status, data = self.post(path, {} if body is None else body)
        assert status == 200, (path, status, data)
        return data

    def generate(self, prompt: Any, *, body: dict[str, Any] | None = None, **params: Any) -> Any:
        """/generate with logprobs; keyword arguments are sampling parameters."""
        request = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        return self.ok("/generate", request | (body or {}))

    def start(self, prompt: Any, *, body: dict[str, Any] | None = None, **kw: Any) -> Future[Any]:
        """`generate` in a thread."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(self.generate(prompt, body=body, **kw))
            except BaseException as e:
                future.set_exception(e)

        threading.Thread(target=run, daemon=True).start()
        return future

    def state(self) -> dict[str, Any]:
        """What the scheduler does now."""
        return dict(self.get("/server_info")[1]["internal_states"][0])

    def wait_running(self, count: int = 1) -> None:
        """Until `count` sequences decode."""
        self._wait_for("num_running_reqs", count)

    def wait_waiting(self, count: int = 1) -> None:
        """Until `count` sequences or updates queue."""
        self._wait_for("num_waiting_reqs", count)

    def wait_idle(self) -> None:
        """Until no sequence decodes or queues."""
        self._wait_for("num_running_reqs", 0)
        self._wait_for("num_waiting_reqs", 0)

    def _wait_for(self, what: str, count: int, timeout: float = 20.0) -> None:
        """Until `what` is at least `count`; exactly, for 0."""
        deadline = time.monotonic() + timeout
        while (now := self.state()[what]) < count or (now and not count):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} is {now}, not {count}, after {timeout} s")
            time.sleep(0.005)


class Server(Client):
    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        super().__init__(port)
        self.process = process

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT)


@contextmanager
def embedded_server(
    model: Path,
    *flags: str,
    log: Path,
    port: int | None = None,
    module: str = "megarl.server",
) -> Iterator[Server]:
    """A healthy server of `model` at `port` (default: a free one); its output goes to `log` and
    into the error if it does not come up.
    """
    with _started(model, *flags, log=log, port=port, module=module) as server:
        _wait_healthy(server, log)
        yield server


@contextmanager
def two_servers(model: Path, logs: Path) -> Iterator[list[Server]]:
    """Two healthy servers of `model`, started at the same time; their logs go to a folder."""
    one, two = logs / "one.log", logs / "two.log"
    with _started(model, log=one) as first, _started(model, log=two) as second:
        _wait_healthy(first, one)
        _wait_healthy(second, two)
        yield [first, second]


@contextmanager
def _started(
    model: Path,
    *flags: str,
    log: Path,
    port: int | None = None,
    module: str = "megarl.server",
) -> Iterator[Server]:
    port = port or free_port()
    command = [sys.executable, "-m", module, "--model-path", str(model)]
    command += ["--port", str(port), "--threads", "1", *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        try:
            yield Server(process, port)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait_healthy(server: Server, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            if server.get("/health", timeout=5)[0] == 200:
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the server did not come up:\n{log.read_text()}")


def address(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


def addresses(servers: list[Server]) -> tuple[str, ...]:
    return tuple(address(s) for s in servers)


def checksums(server: Server) -> dict[str, str]:
    answer = server.ok("/weights_checker", {"action": "checksum"})
    return dict(answer["ranks"][0]["checksums"])


def version(server: Server) -> str:
    return str(server.get("/model_info")[1]["weight_version"])


def load(server: Server, path: Path) -> None:
    server.ok("/update_weights_from_disk", {"model_path": str(path)})
