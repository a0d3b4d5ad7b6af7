"""`megarl report --live`: the page renews itself while runs go on."""

from __future__ import annotations

import html
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.observability.pages import PageServer
from megarl.observability.run_log import append_line
from tests.background import ignoring_sigint


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def test_a_burst_of_silent_callers_is_connected_immediately() -> None:
    with PageServer(0, "text/plain", lambda path, headers: (200, "")) as server:
        callers = [socket.create_connection(server.server_address, 0.5) for _ in range(100)]
        for caller in callers:
            caller.close()


def test_a_port_that_is_taken_is_named_with_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    presence(tmp_path / "e" / "a", "ended")
    step(tmp_path / "e" / "a", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["report", "--live", str(tmp_path / "e" / "a"), "--port", str(port)]) == 2
    assert f"--port={port}" in capsys.readouterr().err


def presence(run: Path, state: str) -> None:
    """Writes what the only process of a run said last; it is of another host."""
    now = time.time()
    said = {"rank": 0, "world_size": 1, "host": "elsewhere", "pid": 1, "state": state, "beat": now}
    said |= {"phase": None, "phase_since": None, "error": None, "started": now, "servers": []}
    (run / "processes").mkdir(parents=True, exist_ok=True)
    (run / "processes" / "rank_0.json").write_text(json.dumps(said | {"total_steps": 9}))


def step(run: Path, number: int) -> None:
    append_line(run / "stats.jsonl", {"step": number, "reward/mean": number / 8, "elapsed_s": 1.0})


def test_the_page_follows_its_runs_until_they_end(tmp_path: Path) -> None:
    run, other = tmp_path / "e" / "a", tmp_path / "e" / "b"
    for place in (run, other):
        presence(place, "running")
        step(place, 1)
    presence(other, "ended")
    command = [sys.executable, "-m", "megarl.cli", "report", "--live", str(run), f"beside={other}"]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert served.stdout is not None
        url = served.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{22}/", url)  # 16 random bytes
        first = get(f"{url}state")
        assert first == "e/a: step 1, running; e/b: step 1, stopped"
        page = get(url)
        assert f"<footer>{html.escape(first)}</footer>" in page and 'fetch("state")' in page
        assert "beside" in page and "reward" not in get(f"{url}state")
        step(run, 2)
        second = get(f"{url}state")
        assert second == first.replace("step 1, running", "step 2, running")
        assert f"<footer>{html.escape(second)}</footer>" in (renewed := get(url))
        assert renewed.count("0.25") > page.count("0.25")  # the new step's reward
        presence(run, "ended")
        (run / "summary.json").write_text(json.dumps({"status": "finished"}))
        assert get(f"{url}state").startswith("e/a: step 2, finished;")
        base = url.removesuffix("/").rpartition("/")[0]
        for path in ("", "/", "/state", "/x/state"):
            with pytest.raises(urllib.error.HTTPError, match="404") as refused:
                get(base + path)
            said = refused.value.read().decode()
            assert "secret path" in said and url.split("/")[-2] not in said
        served.send_signal(signal.SIGINT)
        assert served.wait(30) == 0
        assert served.stdout.read() == "" and served.stderr and served.stderr.read() == ""
    finally:
        served.kill()
        served.communicate()


def test_a_report_that_a_shell_put_in_the_background_takes_sigint(tmp_path: Path) -> None:
    step(tmp_path, 1)
    presence(tmp_path, "running")
    command = [sys.executable, "-m", "megarl.cli", "report", "--live", str(tmp_path)]
    with ignoring_sigint():
        served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert served.stdout is not None and served.stdout.readline()
        served.send_signal(signal.SIGINT)
        assert served.wait(60) == 0
    finally:
        served.kill()
        served.communicate()


def test_where_no_run_or_no_port_is_nothing_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step(tmp_path / "run", 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["report", "--live", str(tmp_path / "run"), "--port", port]) == 2
    assert "in use" in capsys.readouterr().err
    assert main(["report", "--live", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["report", "--live", str(tmp_path)]) == 2
    assert (error := capsys.readouterr().err).startswith("config error: ") and str(
        tmp_path
    ) in error
