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

from megarl.rollout.server_process import free_port
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

    def wait_running(self, count: int = 1, timeout: float = 20.0) -> None:
        """Until `count` sequences decode."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            state = self.get("/server_info")[1]["internal_states"][0]
            if state["num_running_reqs"] >= count:
                return
            time.sleep(0.005)
        raise TimeoutError(f"{count} sequences did not start within {timeout} s")

    def wait_waiting(self, count: int = 1, timeout: float = 20.0) -> None:
        """Until `count` sequences or updates queue."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.get("/server_info")[1]["internal_states"][0]["num_waiting_reqs"] >= count:
                return
            time.sleep(0.005)
        raise TimeoutError(f"nothing queued within {timeout} s")


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
    model: Path, *flags: str, log: Path, port: int | None = None
) -> Iterator[Server]:
    """A healthy server of `model` at `port` (default: a free one); its output goes to `log` and
    into the error if it does not come up.
    """
    port = port or free_port()
    command = [
        sys.executable,
        "-m",
        "megarl.server",
        "--model-path",
        str(model),
        "--port",
        str(port),
        "--threads",
        "1",
        *flags,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        server = Server(process, port)
        try:
            _wait_healthy(server, log)
            yield server
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
