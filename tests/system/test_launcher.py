"""The local launcher with real processes: tiny trainers, and servers that only answer /health."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.utils.env import cores
from tests.hf_stub import write_stub
from tests.tiny import save_tiny

TIMEOUT = 60.0

TRAINER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
out, rank = Path(os.environ["OUT"]), os.environ["RANK"]
helper = subprocess.Popen(["sleep", "300"])  # like a pool of reward workers
facts = dict(env=dict(os.environ), argv=sys.argv[1:], pids=[os.getpid(), helper.pid])
(out / f"tmp{rank}").write_text(json.dumps(facts))
(out / f"tmp{rank}").rename(out / f"trainer{rank}.json")
"""
WAIT = "time.sleep(300)\n"

SERVER = """#!{python}
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
if "--port" not in sys.argv:  # the launcher asks for the version of SGLang
    sys.exit(print("0.5.23"))
port = int(sys.argv[sys.argv.index("--port") + 1])
out = Path(os.environ["OUT"])
(out / f"tmp{{port}}").write_text(str(os.getpid()))
(out / f"tmp{{port}}").rename(out / f"server{{port}}.pid")
print("the server speaks", flush=True)
{act}
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args): pass
HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


class Stage:
    """A directory with a model, a script, a server, and the launcher running over them."""

    def __init__(self, path: Path) -> None:
        self.path, self.script = path, path / "train.py"
        model = write_stub(path / "model")
        self.run = [f"fileroot={path}/runs", "experiment_name=e", "trial_name=t"]
        self.sft = ["recipe=sft", f"model.path={model}", "model.optimizer.lr=1e-3", *self.run]
        self.grpo = [
            f"actor.path={model}", "actor.optimizer.lr=1e-5", "gconfig.n_samples=2",
            "server.type=sglang", f"server.python={path}/server", *self.run,
        ]  # fmt: skip
        self.server()
        self.process: subprocess.Popen[str] | None = None

    def server(self, act: str = "") -> None:
        """`server.python`: an executable that stands in for python -m sglang.launch_server."""
        (self.path / "server").write_text(SERVER.format(python=sys.executable, act=act))
        (self.path / "server").chmod(0o755)

    def start(self, body: str, *args: str, without: str = "") -> subprocess.Popen[str]:
        """`without`: a variable that our environment may have and the launcher's has not."""
        self.script.write_text(TRAINER + body)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megarl.launcher.local", str(self.script), *args],
            env={k: v for k, v in os.environ.items() if k != without}
            | {"OUT": str(self.path), "MEGARL_DEVICE": "cpu"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return self.process

    def finish(self) -> tuple[int, str]:
        assert self.process is not None
        output, _ = self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode, output

    def trainers(self, count: int) -> list[dict]:
        """What each trainer saw, once all of them run."""
        files = [self.path / f"trainer{rank}.json" for rank in range(count)]
        self.until(lambda: all(f.exists() for f in files), f"{count} trainers start")
        return [json.loads(f.read_text()) for f in files]

    def server_pids(self) -> list[int]:
        return [int(f.read_text()) for f in self.path.glob("server*.pid")]

    def pids(self) -> list[int]:
        facts = [json.loads(f.read_text()) for f in self.path.glob("trainer*.json")]
        return [*(pid for f in facts for pid in f["pids"]), *self.server_pids()]

    def until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not done():
            assert time.monotonic() < deadline, f"waited in vain until {what}"
            time.sleep(0.05)

    def all_gone(self) -> None:
        assert self.pids()
        self.until(lambda: not any(map(alive, self.pids())), "every process has ended")

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate(timeout=TIMEOUT)
        for pid in filter(alive, self.pids()):
            os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether it runs: a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def test_trainers_get_torchruns_environment_and_the_command_line(stage: Stage) -> None:
    stage.start("", *stage.sft, "model.parallel.tp=2")
    assert stage.finish()[0] == 0
    seen = stage.trainers(2)
    half = str(max(1, cores() // 2))
    for rank, facts in enumerate(seen):
        env = facts["env"]
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert (env["LOCAL_WORLD_SIZE"], env["MASTER_ADDR"]) == ("2", "127.0.0.1")
        assert env["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", half)
        assert facts["argv"] == [*stage.sft, "model.parallel.tp=2"]
    assert seen[0]["env"]["MASTER_PORT"] == seen[1]["env"]["MASTER_PORT"]
    (token,) = {facts["env"]["MEGARL_JOB_TOKEN"] for facts in seen}
    assert len(token) == 32 and not any(token in word for facts in seen for word in facts["argv"])
    assert not stage.server_pids()  # this recipe has none
    stage.all_gone()


def test_config_file_and_nproc(stage: Stage) -> None:
    config = stage.path / "x.yaml"
    config.write_text("recipe: sft\n")
    stage.start("", "--nproc", "3", "--config", str(config), *stage.sft[1:])
    assert stage.finish()[0] == 0
    assert stage.trainers(3)[2]["argv"][:2] == ["--config", str(config)]


def test_servers_run_before_trainers_and_end_after_them(stage: Stage) -> None:
    stage.start("", *stage.grpo, "server.count=2")
    status, output = stage.finish()
    assert status == 0, output
    (facts,) = stage.trainers(1)
    addresses = facts["env"]["MEGARL_LLM_SERVER_ADDRS"].split(",")
    assert facts["argv"][-1] == f"rollout.addresses=[{','.join(addresses)}]"
    ports = {int(f.stem.removeprefix("server")) for f in stage.path.glob("server*.pid")}
    assert {int(a.removeprefix("127.0.0.1:")) for a in addresses} == ports and len(ports) == 2
    logs = [stage.path / "runs" / "e" / "t" / f"server_{i}.log" for i in range(2)]
    assert all("the server speaks" in log.read_text() for log in logs)
    stage.all_gone()


@pytest.mark.parametrize(("staleness", "threads"), [(0, None), (1, str(max(1, cores() // 2)))])
def test_who_computes_at_the_same_time_divides_the_cores(
    stage: Stage, staleness: int, threads: str | None
) -> None:
    asynchronous = f"rollout.max_head_offpolicyness={staleness}"
    stage.start("", *stage.grpo, asynchronous, without="OMP_NUM_THREADS")
    status, output = stage.finish()
    assert status == 0, output
    assert stage.trainers(1)[0]["env"].get("OMP_NUM_THREADS") == threads  # and one server


def test_trainers_generate_with_the_embedded_server(stage: Stage) -> None:
    save_tiny(stage.path / "model", "qwen3")
    body = """
import urllib.request
address = os.environ["MEGARL_LLM_SERVER_ADDRS"]
ask = dict(input_ids=[3, 4, 5], sampling_params=dict(max_new_tokens=4, ignore_eos=True))
request = urllib.request.Request(f"http://{address}/generate", json.dumps(ask).encode())
answer = json.load(urllib.request.urlopen(request, timeout=60))
assert len(answer["output_ids"]) == 4, answer
# what changes the server is for those of the job alone
from megarl.utils.http import HttpError, call_json
call_json("POST", address, "/flush_cache", timeout=60)
token = os.environ.pop("MEGARL_JOB_TOKEN")
commands = subprocess.run(["sh", "-c", "cat /proc/[0-9]*/cmdline"], capture_output=True).stdout
assert len(token) == 32 and b"megarl.server" in commands and token.encode() not in commands
try:
    call_json("POST", address, "/flush_cache", timeout=60)
    raise SystemExit("everybody may call")
except HttpError as e:
    assert e.status == 401 and "MEGARL_JOB_TOKEN" in str(e), e
"""
    small = ["server.context_length=64", "server.threads=1"]
    small += [f"{key}.max_new_tokens=32" for key in ("gconfig", "eval_gconfig")]
    stage.start(body, *stage.grpo, "server.type=embedded", *small)
    status, output = stage.finish()
    assert status == 0, output


def test_no_server_is_started_where_some_run_already(stage: Stage) -> None:
    stage.start("", *stage.grpo, "rollout.addresses=[127.0.0.1:9]")
    assert stage.finish()[0] == 0
    (facts,) = stage.trainers(1)
    assert facts["argv"][-1] == "rollout.addresses=[127.0.0.1:9]" and not stage.server_pids()


def test_a_failing_trainer_ends_the_run_with_its_status(stage: Stage) -> None:
    fail = "if rank == '1': sys.exit(7)\n" + WAIT
    stage.start(fail, *stage.grpo, "actor.parallel.tp=2")
    status, output = stage.finish()
    assert status == 7
    assert "trainer 1 exited with status 7" in output
    stage.all_gone()


def test_peers_of_a_failed_trainer_may_say_what_happened(stage: Stage) -> None:
    body = "if rank == '1': sys.exit(1)\ntime.sleep(1.5); print('the cause', flush=True)\n"
    stage.start(body, *stage.sft, "model.parallel.tp=2")
    status, output = stage.finish()
    assert status == 1 and "the cause" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on_and_nothing_is_left(stage: Stage, number: int) -> None:
    """SIGTERM kills a python process; SIGINT is a KeyboardInterrupt in it."""
    body = "try: time.sleep(300)\nexcept KeyboardInterrupt: (out / f'int{rank}').touch(); raise\n"
    process = stage.start(body, *stage.grpo, "actor.parallel.tp=2")
    stage.trainers(2)
    process.send_signal(number)
    assert stage.finish()[0] == 128 + number
    assert len(list(stage.path.glob("int*"))) == (2 if number == signal.SIGINT else 0)
    stage.all_gone()


def test_trainers_that_end_well_on_a_signal_make_a_good_run(stage: Stage) -> None:
    body = "signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))\n(out / 'ready').touch()\n"
    process = stage.start(body + WAIT, *stage.sft)
    stage.until((stage.path / "ready").exists, "the trainer is ready")
    process.terminate()
    assert stage.finish()[0] == 0
    stage.all_gone()


def test_a_second_signal_kills_stubborn_trainers(stage: Stage) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(out / 'ready').touch()\n" + WAIT
    process = stage.start(body, *stage.sft)
    stage.until((stage.path / "ready").exists, "the trainer is ready")
    process.terminate()
    time.sleep(1.0)
    assert process.poll() is None
    process.terminate()
    assert stage.finish()[0] == 128 + signal.SIGTERM
    stage.all_gone()


def test_signal_while_servers_start(stage: Stage) -> None:
    stage.server("import time; time.sleep(300)")
    process = stage.start(WAIT, *stage.grpo)
    stage.until(lambda: bool(stage.server_pids()), "the server starts")
    process.terminate()
    assert stage.finish()[0] == 128 + signal.SIGTERM
    stage.all_gone()


def test_a_server_that_dies_ends_the_run_with_its_log(stage: Stage) -> None:
    stage.start(WAIT, *stage.grpo)
    stage.trainers(1)
    os.kill(stage.server_pids()[0], signal.SIGKILL)
    status, output = stage.finish()
    assert status == 3
    assert "exited with 137 (SIGKILL" in output and "the server speaks" in output
    stage.all_gone()


def test_a_server_that_cannot_start_ends_the_run_with_its_log(stage: Stage) -> None:
    stage.server("raise SystemExit('no weights here')")
    stage.start("", *stage.grpo, "server.count=2")
    status, output = stage.finish()
    assert status == 3 and "no weights here" in output
    assert not list(stage.path.glob("trainer*.json"))
    stage.all_gone()


def test_nothing_is_left_when_the_launcher_is_killed(stage: Stage) -> None:
    """Nobody is there to end the others: not the helpers of trainers, nor what ignores SIGTERM."""
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    process = stage.start(stubborn + WAIT, *stage.grpo, "actor.parallel.tp=2")
    stage.trainers(2)
    process.kill()
    stage.finish()
    stage.all_gone()


@pytest.mark.parametrize(
    ("restarts", "fails", "code", "starts", "status"),
    [(2, 2, 7, 3, 0), (1, 2, 7, 2, 7), (0, 1, 7, 1, 7), (2, 1, 2, 1, 2)],
    ids=["recovers", "fails for good", "off", "a config error fails again"],
)
def test_restarts(
    stage: Stage, restarts: int, fails: int, code: int, starts: int, status: int
) -> None:
    """Servers and trainers are all started again."""
    body = "n = len(list(out.glob('start*')))\n(out / f'start{n}').touch()\n"
    stage.start(body + f"sys.exit({code} if n < {fails} else 0)\n", *stage.grpo,
                f"recover.restarts={restarts}")  # fmt: skip
    assert stage.finish()[0] == status
    assert len(list(stage.path.glob("start*"))) == len(stage.server_pids()) == starts
    stage.all_gone()


def test_config_errors_start_nothing(stage: Stage) -> None:
    cases = [
        (["actor.parallel.tp=3"], "num_attention_heads=4"),
        (["actor.pth=x"], "did you mean actor.path"),
        (["--nproc", "3", "actor.parallel.tp=2"], "world size 3"),
        (["--nproc", "two"], "--nproc two"),
        (["actor.eps_clip=2", "gconfig.top_p=2"], "2 problems"),
    ]
    for args, message in cases:
        stage.start("", *stage.grpo, *args)
        status, output = stage.finish()
        assert status == 2 and message in output and "Traceback" not in output
    assert not stage.pids()
