"""Starting, watching and ending a server's process group; no real server needed."""

import json
import os
import socket
import sys
import time

import pytest

from megarl.config.rollout import ServerConfig
from megarl.rollout.server_process import ServerProcess, server_command, start_server
from megarl.server.args import parse_args
from megarl.utils.env import free_port

HEALTHY = """
import http.server, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def run(code):
        port = free_port()
        command = [sys.executable, "-c", code, str(port)]
        started.append(
            ServerProcess(command, host="127.0.0.1", port=port, log_path=tmp_path / "log")
        )
        return started[-1]

    yield run
    for process in started:
        process.stop()


def gone(pid, timeout=60.0):
    """Whether the process ends; an orphan's zombie counts as ended."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_healthy_server_is_waited_for_and_ended(start):
    process = start(HEALTHY)
    process.wait_healthy(30)
    assert process.poll() is None
    process.stop()
    assert process.poll() is not None and gone(process.pid)
    process.stop()


def test_another_server_at_the_port_is_not_taken_for_the_own_one(start, tmp_path):
    """The own one is still loading, and will find the port taken."""
    other = start(HEALTHY)
    other.wait_healthy(30)
    own = ServerProcess(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        host="127.0.0.1", port=other.port, log_path=tmp_path / "own.log",
    )  # fmt: skip
    with pytest.raises(RuntimeError) as wrong:
        own.wait_healthy(30)
    assert str(other.port) in str(wrong.value) and str(other.pid) in str(wrong.value)
    assert gone(own.pid) and other.poll() is None


def test_a_server_whose_child_listens_is_the_own_one(start):
    process = start(
        f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {HEALTHY!r}, "
        "sys.argv[1]]))"
    )
    process.wait_healthy(30)


def test_what_ignores_sigterm_is_killed_with_its_children(start):
    process = start(STUBBORN)
    deadline = time.monotonic() + 30
    while not (text := process.log_path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.stop(0.5)
    assert gone(process.pid) and gone(int(text))


def test_a_silent_server_is_ended_with_the_tail_of_its_log(start):
    process = start("import time; print('still loading', flush=True); time.sleep(600)")
    while not process.log_path.read_text():
        time.sleep(0.02)
    with pytest.raises(TimeoutError, match=r"setup_timeout=0.3 s\n--- end of .*\nstill loading"):
        process.wait_healthy(0.3)
    assert gone(process.pid)


def test_a_port_in_use_is_an_error_before_anything_starts(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"port {port} of 127.0.0.1 .*[Aa]ddress already"):
            start_server(
                ServerConfig(), model_path="m", dtype="float32", port=port,
                log_path=tmp_path / "log",
            )  # fmt: skip
    assert not (tmp_path / "log").exists()


def test_commands():
    shared = {"context_length": 512, "max_running_requests": 8, "deterministic": True}

    def command(**kw):
        config = ServerConfig(**shared, **kw)
        return server_command(config, model_path="m", dtype="float32", host="h", port=5)

    common = [
        *("--model-path", "m", "--host", "h", "--port", "5", "--dtype", "float32"),
        *("--context-length", "512", "--max-running-requests", "8"),
    ]
    assert command(threads=2, options={"x": True}) == [
        sys.executable, "-m", "megarl.server", *common,
        "--threads", "2", "--deterministic", "--x",
    ]  # fmt: skip
    assert command(type="sglang", tp=4, python="/opt/python") == [
        "/opt/python", "-m", "sglang.launch_server", *common,
        "--tp-size", "4", "--custom-weight-loader", "megarl_receiver.load",
        "--enable-deterministic-inference",
    ]  # fmt: skip
    for module in ("embedded", "sglang"):
        given = server_command(
            ServerConfig(type=module),
            model_path="m",
            dtype="float32",
            host="h",
            port=5,
            override_config={"eos_token_id": 7},
            routes=True,
        )
        assert "--enable-return-routed-experts" in given
        at = given.index("--json-model-override-args")
        assert json.loads(given[at + 1]) == {"eos_token_id": 7}
        if module == "embedded":
            assert parse_args(given[3:]).override == {"eos_token_id": 7}
            assert parse_args(given[3:]).enable_return_routed_experts
    options = {
        "attention_backend": "triton",
        "enable_x": True,
        "y": False,
        "z": None,
        "n": [1, 2],
        "j": {"k": 3},
    }
    flags = [
        *("--attention-backend", "triton", "--enable-x", "--n", "1", "2", "--j", '{"k": 3}'),
    ]
    assert command(options=options)[-len(flags) :] == flags
    assert "--api-key" not in str(command())  # the embedded server reads the environment
    own = command(path="other", dtype="bfloat16")
    assert own[own.index("--model-path") + 1] == "other"
    assert own[own.index("--dtype") + 1] == "bfloat16"


def test_processes_are_in_groups_of_their_own(start):
    process = start("import time; time.sleep(600)")
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)


def test_sglang_gets_its_key_without_telling_it_to_everybody(tmp_path, monkeypatch):
    """Its command line shows none, and its log, which does, is its owner's alone."""
    module = tmp_path / "sglang" / "launch_server.py"
    module.parent.mkdir()
    module.write_text("import sys, time; print(__name__, sys.argv[1:], flush=True); time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MEGARL_JOB_TOKEN", "the-secret")
    log = tmp_path / "log"
    config = ServerConfig(type="sglang", options={"api_key": "own"})
    process = start_server(config, model_path="m", dtype="auto", log_path=log, setup_timeout=None)
    try:
        deadline = time.monotonic() + 30
        while not (said := log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        with open(f"/proc/{process.pid}/cmdline") as f:
            assert "the-secret" not in f.read()
    finally:
        process.stop()
    assert said.startswith("__main__ ['--api-key', 'the-secret', '--model-path', 'm', ")
    assert said.endswith("'--api-key', 'own']\n")  # the last one counts
    assert log.stat().st_mode & 0o777 == 0o600
    with pytest.raises(RuntimeError, match="<MEGARL_JOB_TOKEN>") as shown:
        process.wait_healthy(10)
    assert "the-secret" not in str(shown.value)
