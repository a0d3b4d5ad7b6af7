"""Starts a generation server as a subprocess, waits until it is healthy, ends it."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config.rollout import ServerConfig
from megarl.observability.logging import get_logger
from megarl.utils.child import TERM_TIMEOUT, Child, Signals, spelled, stop_all
from megarl.utils.env import JOB_TOKEN, free_port, job_token, set_threads_default
from megarl.utils.http import HttpError, call_json, split_address
from megarl.utils.stacks import strangers_at
from megarl.weight_sync.receiver import LOADER, RECEIVER

log = get_logger(__name__)

_PACKAGE = Path(__file__).resolve().parents[1]
POLL_INTERVAL = 0.2
PROBE_TIMEOUT = 30.0  # of one /health: SGLang's generates a token
# SGLang takes its key as an argument alone, and arguments are everybody's to read: this adds it
# inside the process, before those of the command line, which may hold another one
_SGLANG_WITH_KEY = (
    f"import os, runpy, sys; sys.argv[1:1] = ['--api-key', os.environ['{JOB_TOKEN}']]; "
    "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)"
)


class ServerProcess(Child):
    """Runs a server in a process group of its own, at most as long as this process."""

    def __init__(
        self,
        command: list[str],
        *,
        host: str,
        port: int,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        private_log: bool = False,
        linked: bool = False,
    ) -> None:
        """Starts the command. private_log: nobody else may read the log. linked: it answers over a
        link of the job (megarl.rpc.link), not over HTTP."""
        self.address, self.port, self._linked = f"{host}:{port}", port, linked
        super().__init__(
            f"server {self.address}",
            command,
            env={**os.environ, **(env or {})},
            log_path=log_path,
            private_log=private_log,
        )

    def wait_healthy(self, timeout: float) -> None:
        """Returns once /health answers 200, or a linked server listens. Ends a server that dies, is
        not healthy within `timeout` s, or whose port another process has, and raises RuntimeError
        or TimeoutError with the tail of its log."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            if (status := self.poll()) is not None:
                self.stop()
                raise RuntimeError(f"{self.name} exited with {spelled(status)}{self.tail()}")
            patience = max(1.0, min(left, PROBE_TIMEOUT))
            try:
                if self._linked:
                    socket.create_connection(split_address(self.address), patience).close()
                else:
                    call_json("GET", self.address, "/health", timeout=patience)
            except (HttpError, OSError):
                time.sleep(POLL_INTERVAL)
            else:
                self._check_own()
                return
        self.stop()
        raise TimeoutError(
            f"{self.name} was not healthy within rollout.setup_timeout={timeout:g} s{self.tail()}"
        )

    def _check_own(self) -> None:
        """Ends the server and raises RuntimeError where what answers at its port is another one."""
        if others := strangers_at(self.port, self.pid):
            self.stop()
            raise RuntimeError(
                f"{self.name}: another process has port {self.port} and answers in its place: "
                f"{', '.join(others)}; end that one, or start again with another port{self.tail()}"
            )

    def stop(self, timeout: float = TERM_TIMEOUT) -> None:
        """Sends SIGTERM to the group, and SIGKILL to what is left of it after `timeout` seconds.
        May be called twice."""
        stop_all([self], Signals(), whole=True, timeout=timeout)


def start_server(
    server: ServerConfig,
    *,
    model_path: str,
    dtype: str,
    override_config: Mapping[str, Any] | None = None,
    log_path: Path | str,
    port: int | None = None,
    host: str = "127.0.0.1",
    env: Mapping[str, str] | None = None,
    setup_timeout: float | None = 600.0,
) -> ServerProcess:
    """Starts one server of `server.type` on `port` (default: a free one).

    `model_path` and `dtype` stand in where `server.path` is empty and `server.dtype` is "auto".
    `override_config`: keys of the model's config.json that have another value.
    setup_timeout: seconds in which the server has to be healthy; None returns at once, to start
    several together; then call `wait_healthy`.
    """
    port, with_key = free_port(host, port or 0), job_token() is not None
    command = server_command(
        server,
        model_path=model_path,
        dtype=dtype,
        override_config=override_config,
        host=host,
        port=port,
        with_key=with_key,
    )
    process = ServerProcess(
        command,
        host=host,
        port=port,
        log_path=Path(log_path),
        env={**_environment(server), **(env or {})},
        private_log=with_key and server.type == "sglang",  # it logs its arguments
    )
    log.info("server %s: pid %d, log %s", process.address, process.pid, process.log_path)
    if setup_timeout is not None:
        process.wait_healthy(setup_timeout)
    return process


def server_command(
    server: ServerConfig,
    *,
    model_path: str,
    dtype: str,
    override_config: Mapping[str, Any] | None = None,
    host: str,
    port: int | str,
    with_key: bool = False,
    python: str = "",
    routes: bool = False,
    releases: Sequence[str] = (),
) -> list[str]:
    """Returns the server's command line; both servers share the flags they share with SGLang.
    routes: answers can tell which experts the routers chose. releases: flags of a server that
    releases its memory (`release_flags`).
    with_key: SGLang takes the environment's token for its key, as the embedded server does by
    itself. python: the interpreter where the configuration names none (empty: this one)."""
    sglang = server.type == "sglang"
    module = ["-m", "sglang.launch_server" if sglang else "megarl.server"]
    command = [
        (server.python if sglang else "") or python or sys.executable,
        *(["-c", _SGLANG_WITH_KEY] if sglang and with_key else module),
        *("--model-path", server.path or model_path, "--host", host, "--port", str(port)),
        *("--dtype", dtype if server.dtype == "auto" else server.dtype),
        *("--context-length", str(server.context_length)),
        *("--max-running-requests", str(server.max_running_requests)),
    ]
    if override_config:
        command += ["--json-model-override-args", json.dumps(override_config)]
    if routes:
        command += ["--enable-return-routed-experts"]
    command += releases
    if sglang:
        command += _sglang_flags(server)
    else:
        command += ["--threads", str(server.threads)]
        command += ["--deterministic"] if server.deterministic else []
    return command + server.arguments


def _sglang_flags(server: ServerConfig) -> list[str]:
    flags = ["--tp-size", str(server.tp), "--custom-weight-loader", LOADER]
    if server.dp > 1:
        flags += ["--dp-size", str(server.dp)]
    if server.deterministic:
        flags += ["--enable-deterministic-inference"]
    return flags


def release_flags(server: ServerConfig, *, on_gpus: bool, keeps_weights: bool) -> list[str]:
    """Returns the flags with which a server can release its memory. On a CPU SGLang cannot: there
    it answers the calls and keeps everything. keeps_weights: a sync does not bring all weights, so
    that they rest in host memory."""
    saver = server.type == "sglang" and on_gpus
    flags = ["--enable-memory-saver"] if saver else []
    if saver and not any(a.startswith("--mem-fraction-static") for a in server.arguments):
        # SGLang would leave 10 to 16 GiB: the trainers' context, communicators and workspaces are
        # beside it when it resumes
        flags += ["--mem-fraction-static", "0.8"]
    if keeps_weights and (saver or server.type == "embedded"):
        flags += ["--enable-weights-cpu-backup"]
    return [flag for flag in flags if flag not in server.arguments]


def _environment(server: ServerConfig) -> dict[str, str]:
    """Returns variables for the server: its share of this host's cores and, for the embedded one,
    the path of this very package, installed or not."""
    env = {k: v for k, v in os.environ.items() if k == "OMP_NUM_THREADS"}
    if server.threads:
        env["OMP_NUM_THREADS"] = str(server.threads)
    set_threads_default(env, processes=server.count)
    env["PYTHONPATH"] = python_path(server, os.environ.get("PYTHONPATH"), _PACKAGE)
    return env


def python_path(server: ServerConfig, inherited: str | None, package: Path) -> str:
    """Returns PYTHONPATH for a server: where it finds `package`, which is megarl, installed or not,
    or for SGLang what receives slices of weights there, which needs nothing else of megarl."""
    sglang = server.type == "sglang"
    own = package / RECEIVER.relative_to(_PACKAGE) if sglang else package.parent
    return os.pathsep.join([str(own), inherited] if inherited else [str(own)])
