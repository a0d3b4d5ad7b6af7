"""`megarl status`, `megarl trace`, SIGUSR2 and pages of metrics, on one small GRPO run that is
watched, ends, goes on and is killed."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megarl.cli.rehearse.small import shrink_model, write_model
from megarl.planning.job import find_shapes
from megarl.utils.env import JOB_TOKEN, free_port
from tests.leftovers import Mark

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
TOKEN = "t0ken-0f-thi5-run"


class Job:
    """A run in `folder` that is started, watched while it goes on, and started again."""

    def __init__(self, folder: Path) -> None:
        raw = find_shapes("qwen3-1.7b", ROOT / "configs" / "models")
        small = shrink_model(raw, layers=2)
        write_model(small, folder / "model", head="lm", seed=1)
        self.folder, self.run, self.mark = folder, folder / "e" / "grpo", Mark()
        self.port = free_port("127.0.0.1")
        self.seen: list[dict[str, Any]] = []
        self.command_lines: list[bytes] = []
        self.scraped: dict[str, list[tuple[int, dict[str, Any]]]] = {}

    def start(self, steps: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "megarl.launcher.local", "--nproc", "2", "--config"]
        command += [
            str(ROOT / "configs" / "quickstart_grpo.yaml"),
            f"actor.path={self.folder / 'model'}",
            f"fileroot={self.folder}",
            "experiment_name=e",
            f"total_train_steps={steps}",
            "train_dataset.batch_size=4",
            "valid_dataset=null",
            "stats_logger.report=false",
            f"stats_logger.metrics_port={self.port}",
            "train_dataset.reward=megarl.cli.rehearse.small:even_share",
        ]
        out = (self.folder / f"log_{steps}").open("w")
        env = os.environ | self.mark.env | {"MEGARL_DEVICE": "cpu", JOB_TOKEN: TOKEN}
        return subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, text=True
        )

    def status(self) -> tuple[int, dict[str, Any]]:
        done = megarl("status", str(self.run), "--json")
        return done.returncode, json.loads(done.stdout) if done.stdout else {}

    def scrape(self) -> bool:
        """Reads the pages of the run and of its server, with the token and without; returns
        whether there is a step."""
        servers = [s["address"] for s in self.seen[0]["servers"]]
        for address in (f"127.0.0.1:{self.port}", *servers):
            self.scraped[address] = [page(address, token) for token in (TOKEN, "")]
        return self.scraped[f"127.0.0.1:{self.port}"][0][1].get("megarl_steps_total", 0) > 0

    def log(self, steps: int) -> str:
        return (self.folder / f"log_{steps}").read_text()


def page(address: str, token: str) -> tuple[int, dict[str, float]]:
    """The status and the samples of a page of metrics; (0, {}) where nobody listens."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://{address}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
            return answer.status, {s.name: s.value for f in families for s in f.samples}
    except urllib.error.HTTPError as e:
        return e.code, {}
    except OSError:
        return 0, {}


def megarl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megarl.cli", *words],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "160"},
        timeout=120,
        text=True,
        capture_output=True,
    )


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):  # it has just ended
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def until(true: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not true():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("watching"))
    process = job.start(STEPS)
    try:
        until((job.run / "processes" / "rank_1.json").exists, process)
        status, found = job.status()
        job.seen.append(found | {"exit": status})
        pids = [p["pid"] for p in found["processes"]]
        job.command_lines = [command_line(pid) for pid in job.mark.left()]
        os.kill(pids[1], signal.SIGUSR2)
        until(job.scrape, process)
        assert process.wait(240) == 0, job.log(STEPS)
        yield job
    finally:
        process.kill()
        process.wait()
        job.mark.assert_none_left()


def test_a_run_that_goes_on(job: Job) -> None:
    seen = job.seen[0]
    assert seen["state"] == "running" and seen["exit"] == 0 and seen["run"] == "e/grpo"
    assert [p["name"] for p in seen["processes"]] == ["trainer 0", "trainer 1"]
    assert [p["health"] for p in seen["processes"]] == ["alive", "alive"]
    assert [s["health"] for s in seen["servers"]] == ["alive"] and seen["last_error"] is None


def test_its_metrics_and_its_servers_are_read_with_the_token_alone(job: Job) -> None:
    driver, server = job.scraped.values()
    assert [status for status, _ in driver] == [status for status, _ in server] == [200, 401]
    assert driver[1][1] == server[1][1] == {}
    samples = driver[0][1]
    assert 0 < samples["megarl_steps_total"] <= STEPS and samples["megarl_reward_mean"] > 0
    counts = [samples[f"megarl_rollout_{name}_total"] for name in ("submitted", "accepted")]
    assert counts[0] >= counts[1] >= 4
    assert server[0][1]["megarl_server_tokens_total"] > 0


def test_its_token_is_on_no_command_line_and_in_no_file(job: Job) -> None:
    """The token is read from the environment, which nobody but the user sees."""
    assert len(job.command_lines) >= 4  # the launcher, its server, two trainers
    assert not [line for line in job.command_lines if TOKEN.encode() in line]
    names = [path for path in job.folder.rglob("*") if path.name != "model"]
    assert len(names) > 10 and job.run / "config.yaml" in names
    assert not [path for path in (*names, *Path("/dev/shm").glob("*")) if TOKEN in str(path)]
    assert not [p for p in names if p.is_file() and TOKEN.encode() in p.read_bytes()]


def test_sigusr2_writes_stacks_and_ends_nothing(job: Job) -> None:
    log = job.log(STEPS)
    assert "most recent call first" in log and "megarl/run.py" in log, log
    assert job.status()[1]["state"] == "finished"


def test_a_run_that_has_finished(job: Job) -> None:
    status, found = job.status()
    assert status == 0 and found["step"] == found["total_steps"] == STEPS
    assert 0 < found["reward"] < 1 and found["staleness"] == 0 and found["tokens_per_s"] > 0
    assert {p["health"] for p in found["processes"]} == {"ended"}
    said = megarl("status", str(job.run)).stdout
    for words in (
        "e/grpo: finished",
        f"{STEPS} of {STEPS}",
        "reward ",
        "s a step",
        "trainer 1     ended",
    ):
        assert words in said, said
    followed = megarl("status", str(job.run), "--follow", "--json").stdout
    assert len(followed.splitlines()) == 1  # it ends where the run has


def test_the_trace_has_everything_on_one_axis(job: Job) -> None:
    done = megarl("trace", str(job.run))
    assert done.returncode == 0, done
    with gzip.open(job.run / "trace.json.gz", "rt") as f:
        events = json.load(f)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 1}

    def of(pid: int, cat: str, name: str | None = None) -> list[dict[str, Any]]:
        kept = [e for e in spans if (e["pid"], e["cat"]) == (pid, cat)]
        return [e for e in kept if name in (None, e["name"])]

    for rank in (0, 1):
        steps = of(rank, "phases", "step")
        assert len(steps) == STEPS
        for phase in ("rollout", "logp", "train", "update_weights"):
            inside = of(rank, "phases", phase)
            assert len(inside) == STEPS
            for step, part in zip(steps, inside, strict=True):
                assert step["ts"] <= part["ts"]
                assert part["ts"] + part["dur"] <= step["ts"] + step["dur"] + 1e3
        uploads = of(rank, "syncs", "upload")  # and one before the first step
        assert [e["args"]["version"] for e in uploads] == list(range(STEPS + 1))
    episodes = of(0, "episodes")
    assert len(episodes) == 4 * STEPS and not of(1, "episodes")
    assert {e["args"]["outcome"] for e in episodes} == {"accepted"}
    for lane in {e["tid"] for e in episodes}:
        own = sorted((e["ts"], e["dur"]) for e in episodes if e["tid"] == lane)
        assert all(a + d <= b + 1 for (a, d), (b, _) in itertools.pairwise(own))
    waits = of(0, "phases", "rollout")
    assert all(any(w["ts"] <= e["ts"] <= w["ts"] + w["dur"] for w in waits) for e in episodes)
    done = megarl("trace", str(job.run), "--steps", "2", "--out", str(job.run / "t.json"))
    some = json.loads((job.run / "t.json").read_text())["traceEvents"]
    assert sum(e.get("name") == "step" and e["pid"] == 0 for e in some) == 1


def test_a_run_that_is_killed(job: Job) -> None:
    """Started again it is running, whatever the summary of the first start says; killed it is
    dead, and whoever is missing is named."""
    process = job.start(10_000)
    try:
        until(lambda: job.status()[1]["step"] > STEPS, process)
        status, found = job.status()
        assert found["state"] == "running" and status == 0
        victim = found["processes"][1]
        os.kill(victim["pid"], signal.SIGKILL)
        assert process.wait(120) != 0
    finally:
        process.kill()
        process.wait()
    status, found = job.status()
    assert status == 1 and found["state"] in ("dead", "failed") and found["servers"] == []
    by_name = {p["name"]: p for p in found["processes"]}
    assert by_name["trainer 1"]["health"] == "dead"
    said = megarl("status", str(job.run)).stdout
    assert (
        f"trainer 1     dead, on {victim['host']}, pid {victim['pid']}" in said
        and "last error" in said
    )


def test_where_there_is_no_run(tmp_path: Path) -> None:
    for command in ("status", "trace"):
        done = megarl(command, str(tmp_path))
        assert done.returncode == 2 and str(tmp_path) in done.stderr
        assert megarl(command).returncode == 2
