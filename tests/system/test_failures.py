"""Nothing hangs: whatever dies, stops or never returns, the run goes on or ends with an error that
names who waited for what, and no process of it is left.

Real processes and real signals: a script given to the launcher patches a phase of the trainer so
that something happens there, then runs the recipe. Small timeouts are set where the default would
have to pass; what must be immediate keeps the defaults, which are minutes, and TIMEOUT is far less.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from megarl.cli.status import status
from tests.dist.world import free_port
from tests.embedded_server import Server, embedded_server
from tests.leftovers import Mark
from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 150.0

SCRIPT = """
import asyncio, functools, os, signal, sys, threading, time
from pathlib import Path

OUT, RANK = Path(os.environ["OUT"]), int(os.environ["RANK"])
VICTIM, VICTIM_ADDRESS = int(os.environ["VICTIM"]), os.environ["VICTIM_ADDRESS"]

def at(owner, name, act, *, call=1):
    '''`act` runs before the call-th call of the method.'''
    method, count = getattr(owner, name), 0
    @functools.wraps(method)
    def patched(*args, **kw):
        nonlocal count
        count += 1
        if count == call:
            act()
        return method(*args, **kw)
    setattr(owner, name, patched)

def hit(pid, number=signal.SIGKILL):
    def act():
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # a second time
            pass
    return act

def reached():
    (OUT / f"reached{{RANK}}").touch()

def wait():
    reached()
    time.sleep(300)

if __name__ == "__main__":
    from megarl.transfer.gather import BucketGatherer
    from megarl.rollout.client import RemoteSGLangEngine
    from megarl.rollout.servers import ServerPool
    from megarl.rollout.workflows.rlvr import RLVRWorkflow
    from megarl.trainer.rl import RLTrainer
    from megarl.trainer.roles import MegatronActor
    from megarl.trainer.session import RolloutDriver
    from megarl.weight_sync import broadcast
    from megarl.weight_sync.broadcast import UpdateChannel
    from megarl.weight_sync.servers import Servers
    import megarl.run

{act}
    sys.exit(megarl.run.main())
"""

REWARDS = """
import ctypes, os, signal, subprocess, time
from pathlib import Path

def stuck(*args, **row):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "300"])
    (Path(os.environ["OUT"]) / "reached_reward").touch()
    ctypes.PyDLL(None).sleep(300)  # holds the GIL

def stuck_in_the_end(*args, **row):
    return stuck() if (Path(os.environ["OUT"]) / "start3").exists() else 1.0

def stuck_once(*args, **row):
    first = Path(os.environ["OUT"]) / "reached_reward"
    if not first.exists():
        first.touch()
        os._exit(3)
    return 1.0

def wrong(*args, **row):
    return {}["my bug"]

def agent(data, base_url, api_key):
    return {}["my bug"]

def loss(outputs, batch):
    import torch.distributed as dist
    return outputs["logprobs"].sum() if dist.get_rank() == 0 else {}["my bug"], {}

def spec(config):
    from megarl.algos.specs import LossSpec
    return LossSpec(fn=loss, weight=lambda batch: float(batch["loss_mask"].sum()))
"""


class Run:
    """A run of the GRPO recipe, and what is around it."""

    def __init__(self, path: Path, model: Path) -> None:
        self.path, self.model, self.mark = path, model, Mark()
        self.servers: list[Server] = []
        self.process: subprocess.Popen[str] | None = None
        (path / "failing_rewards.py").write_text(REWARDS)

    def start(self, act: str, *keys: str, nproc: int = 1, torchrun: bool = False) -> None:
        """`act`: what is patched before the recipe runs, in every trainer process."""
        script = self.path / "failing.py"
        indented = "\n".join("    " + line for line in act.strip().splitlines())
        script.write_text(SCRIPT.format(act=indented))
        command = [sys.executable, "-m", "megarl.launcher.local"]
        if torchrun:
            command = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1"]
            command += ["--master-port", str(free_port()), "--nproc-per-node", str(nproc)]
        config = ROOT / "configs" / "quickstart_grpo.yaml"
        command += [str(script), "--config", str(config), f"fileroot={self.path}/runs"]
        command += [
            f"actor.path={self.model}", f"actor.parallel.tp={nproc}", "ref=null",
            "recover.mode=disabled", "saver.final=false", "valid_dataset=null",
            "train_dataset.size=40", "train_dataset.batch_size=4", "gconfig.n_samples=2",
            "total_train_steps=3", "weight_sync.bucket_mb=1", "rollout.reward_workers=1",
            "weight_sync.options.sharded=false", *keys,
        ]  # fmt: skip
        if self.servers:
            command.append(f"rollout.addresses=[{','.join(map(address, self.servers))}]")
        env = os.environ | self.mark.env | {
            "OUT": str(self.path), "OMP_NUM_THREADS": "1", "MEGARL_DEVICE": "cpu",
            "VICTIM": str(self.servers[0].process.pid if self.servers else 0),
            "VICTIM_ADDRESS": address(self.servers[0]) if self.servers else "",
            "PYTHONPATH": f"{self.path}{os.pathsep}{ROOT}",
        }  # fmt: skip
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def until(self, *names: str) -> None:
        """Waits for the files that the script or a reward makes when it gets there."""
        assert self.process is not None
        deadline = time.monotonic() + TIMEOUT
        while not all((self.path / name).exists() for name in names):
            ended = self.process.poll() is not None or time.monotonic() > deadline
            assert not ended, self.process.communicate()[0]
            time.sleep(0.05)

    def fails(self) -> str:
        """Ends by itself, with an error, and leaves nothing; the output."""
        status, output = self.end()
        assert status not in (0, None), output
        return output

    def end(self) -> tuple[int, str]:
        assert self.process is not None
        try:
            output = self.process.communicate(timeout=TIMEOUT)[0]
        except subprocess.TimeoutExpired:
            left = self.mark.left()
            self.close()
            raise AssertionError(f"it hangs: {left}\n{self.process.communicate()[0]}") from None
        self.mark.assert_none_left()
        return self.process.returncode, output

    def versions_served_by(self, server: Server) -> set[str]:
        """The weights of the samples that a server answered, where SERVED was patched in."""
        return self.versions_served_at(address(server))

    def versions_served_at(self, address: str) -> set[str]:
        served = [line.split() for line in (self.path / "served").read_text().splitlines()]
        return {version for a, version in served if a == address}

    def close(self) -> None:
        self.mark.kill()
        if self.process is not None:
            self.process.wait()


def address(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("failures") / "model"
    save_tiny(path, "qwen3", layers=4, hidden_size=256)  # some buckets of 1 MB
    save_tokenizer(path)
    return path


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Iterator[Run]:
    run = Run(tmp_path, model)
    yield run
    run.close()


def server_of(model: Path, log: Path, port: int | None = None) -> AbstractContextManager[Server]:
    flags = ("--context-length", "64", "--dtype", "float32")
    return embedded_server(model, *flags, log=log, port=port)


@pytest.fixture(scope="module")
def healthy(model: Path) -> Iterator[Server]:
    """It serves one failing run after the other."""
    with server_of(model, model.parent / "server.log") as server:
        yield server


@pytest.fixture
def serve(run: Run, healthy: Server) -> None:
    run.servers = [healthy]


@pytest.fixture
def victim(run: Run) -> Iterator[Server]:
    with server_of(run.model, run.path / "victim.log") as server:
        run.servers = [server]
        yield server


# a server dies, or stops answering

BLOWS = pytest.mark.parametrize(
    "blow", [pytest.param(b, marks=pytest.mark.full) for b in ("SIGKILL", "SIGSTOP")]
)


IN_GENERATION = """
call = ServerPool.call
async def patched(self, address, method, path, *args, **kw):
    lost = path == "/generate" and address == VICTIM_ADDRESS
    if lost:  # however fast it is, it has not answered when the blow comes
        hit(VICTIM, signal.SIGSTOP)()
    task = asyncio.ensure_future(call(self, address, method, path, *args, **kw))
    if lost:
        await asyncio.sleep(0.02)
        hit(VICTIM, signal.{blow})()
    return await task
ServerPool.call = patched
"""


@BLOWS
def test_a_server_lost_in_generation_is_dropped(
    run: Run, victim: Server, healthy: Server, blow: str
) -> None:
    """Its requests go to the other one, and the next update is of the other one alone."""
    run.servers.append(healthy)
    run.start(IN_GENERATION.format(blow=blow), "rollout.request_timeout=5")
    status, output = run.end()
    assert status == 0, output
    assert output.count("going on with 1 server(s)") == 1, output
    assert output.count(f"{address(victim)}: /generate") == 1, output  # one warning, not many
    assert healthy.get("/model_info")[1]["weight_version"] == "3"


PHASES = {
    "connecting to": "at(broadcast, 'listen', hit(VICTIM, signal.{blow}))",
    "bucket 2 of": "at(UpdateChannel, 'deliver', hit(VICTIM, signal.{blow}), call=2)",
    "/end_weight_update": "at(Servers, 'end_update', hit(VICTIM, signal.{blow}))",
    "/continue_generation": "at(RemoteSGLangEngine, 'resume', hit(VICTIM, signal.{blow}))",
}


@BLOWS
@pytest.mark.parametrize("phase", PHASES)
def test_a_server_lost_in_an_update_is_named_by_every_rank(
    run: Run, victim: Server, phase: str, blow: str
) -> None:
    bound = ["weight_sync.timeout=6"] if blow == "SIGSTOP" else []
    run.start(PHASES[phase].format(blow=blow), *bound, nproc=2)
    output = run.fails()
    error = r"^(?:\[rank\d\]: )?(?:RuntimeError|.*OtherRankFailed): .*"
    errors = re.findall(error, output, re.MULTILINE)
    named = [e for e in errors if address(victim) in e]
    assert any("rank 0" in e for e in named), output  # rank 1 quotes rank 0
    assert all(phase in e for e in named), output
    if blow == "SIGSTOP":
        assert all("weight_sync.timeout=6 s" in e for e in named), output


# what each server answered to generation, and with which weights
SERVED = """
call, log = ServerPool.call, OUT / "served"
async def patched(self, address, method, path, *args, **kw):
    answer = await call(self, address, method, path, *args, **kw)
    if path == "/generate":
        with log.open("a") as f:
            f.writelines(f"{{address}} {{a['meta_info']['weight_version']}}\\n" for a in answer)
    return answer
ServerPool.call = patched
def wait_for(name):
    def act():
        (OUT / f"before_{{name}}").touch()
        while not (OUT / name).exists():
            time.sleep(0.05)
    return act
"""
# what becomes of two of three servers: step by step, some of which wait for the test
LOST_AND_BACK = (
    SERVED
    + """
served = ServerPool.call
async def lost(self, address, method, path, *args, **kw):
    first = path == "/generate" and address == "{address}" and not (OUT / "lost").exists()
    if first:  # however fast it is, it has not answered when the blow comes
        hit({killed}, signal.SIGSTOP)()
    task = asyncio.ensure_future(served(self, address, method, path, *args, **kw))
    if first:
        await asyncio.sleep(0.02)
        (OUT / "lost").touch()
        hit({killed})()
    return await task
ServerPool.call = lost
def stop_in_the_update():
    at(UpdateChannel, 'deliver', hit({stopped}, signal.SIGSTOP), call=2)
at(RolloutDriver, 'next_batch', wait_for("joined"), call=2)
at(RolloutDriver, 'next_batch', stop_in_the_update, call=3)
at(RolloutDriver, 'next_batch', wait_for("let_go"), call=4)
at(RolloutDriver, 'next_batch', wait_for("left"), call=5)
at(RolloutDriver, 'next_batch', hit({stopped}, signal.SIGSTOP), call=6)
"""
)


def test_servers_are_lost_come_back_join_and_leave_in_one_run(
    run: Run, victim: Server, healthy: Server
) -> None:
    """The victim is killed amid its first request; step 1 and its update go on without it. In step
    2 it is started again, and a third one is listed: both get the weights of that update, and no
    request before. The third stands still in update 3, which is done again without it; let go on in
    step 4, it is back in that update. In step 5 it alone stays listed, and the victim is dead once
    more. It stands still again before step 6, which nobody can serve."""
    with server_of(run.model, run.path / "third.log") as third:
        file = run.path / "servers"
        file.write_text("\n".join(map(address, (healthy, victim))))
        run.servers = []
        keys = [f"rollout.addresses_file={file}", "server.count=0", "total_train_steps=7"]
        keys += ["weight_sync.server_timeout=3", "weight_sync.verify=full"]
        keys += ["rollout.request_timeout=5"]
        act = LOST_AND_BACK.format(
            address=address(victim), killed=victim.process.pid, stopped=third.process.pid
        )
        run.start(act, *keys, nproc=2)
        run.until("before_joined")
        with server_of(run.model, run.path / "again.log", port=victim.port) as again:
            file.write_text("\n".join(map(address, (healthy, victim, third))))
            (run.path / "joined").touch()
            run.until("before_let_go")
            os.kill(third.process.pid, signal.SIGCONT)
            (run.path / "let_go").touch()
            run.until("before_left")
            all_three = (healthy, again, third)
            assert [s.get("/model_info")[1]["weight_version"] for s in all_three] == ["4"] * 3
            sums = [s.ok("/weights_checker", {"action": "checksum"}) for s in all_three]
            assert sums[0] == sums[1] == sums[2]
            again.process.kill()
        file.write_text(address(third))
        (run.path / "left").touch()
        output = run.fails()
        os.kill(third.process.pid, signal.SIGCONT)
    assert run.versions_served_by(healthy) == {"0", "1", "2", "3", "4"}
    assert run.versions_served_by(victim) == {"2", "3"}
    assert run.versions_served_by(third) == {"2", "4"}
    assert output.count(f"{address(victim)}: /generate") >= 1, output
    # bucket 1 may be on its way still
    assert re.search(rf"without those lost: server {address(third)}: .*bucket [12] of", output)
    for server, times in ((victim, 1), (third, 2)):  # the third is new the first time
        assert output.count(f"server {address(server)} is back") == times, output
    assert output.count("leaves the run: it is listed no more") == 2, output
    assert "no generation server is left" in output, output
    assert "failed on rank 0" in output, output  # what rank 1 says
    healthy.ok("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})


REVIVED = (
    SERVED
    + """
import psutil
from megarl.utils.http import HttpError, call_json
FIRST = os.environ["MEGARL_LLM_SERVER_ADDRS"].split(",")[0]
def lose_first():
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "megarl.server" in words and FIRST.split(":")[1] in words:
            process.kill()
def await_first():
    while True:
        try:
            return call_json("GET", FIRST, "/model_info", timeout=1.0)
        except HttpError:
            time.sleep(0.1)
at(RolloutDriver, 'next_batch', lose_first, call=2)
at(RolloutDriver, 'next_batch', await_first, call=3)
"""
)


def test_the_launcher_starts_a_dead_server_again_and_the_run_goes_on(run: Run) -> None:
    """Killed before the second step, it is there again at the end of that one or of the third, gets
    the weights of that update, and serves the rest."""
    run.start(REVIVED.format(), "server.count=2", "server.restarts=1", "total_train_steps=5")
    status, output = run.end()
    assert status == 0, output
    assert output.count("server 0: starting it again, 0 restart(s) of it left") == 1, output
    late, early = "is back: it gets the weights of this update", "started anew"
    assert output.count(late) + output.count(early) == 1, output
    found = re.search(r"2 server\(s\) healthy: (\S+), (\S+)", output)
    assert found, output
    assert {"0", "3", "4"} <= run.versions_served_at(found[1]) <= {"0", "2", "3", "4"}
    assert run.versions_served_at(found[2]) >= {"0", "1", "2"}


# rewards and workflows


@pytest.mark.full
def test_a_reward_that_never_returns_stops_the_run(run: Run, serve: None) -> None:
    run.start("", "train_dataset.reward=failing_rewards:stuck", "rollout.reward_timeout=2", nproc=2)
    output = run.fails()
    assert "RewardTimeout: reward stuck on row" in output
    assert "took longer than rollout.reward_timeout=2 s" in output


@pytest.mark.full
def test_a_reward_that_dies_may_cost_its_samples_only(run: Run, serve: None) -> None:
    reward = "train_dataset.reward=failing_rewards:stuck_once"
    run.start("", reward, "rollout.on_reward_error=reject")
    status, output = run.end()
    assert status == 0, output
    assert "reward stuck_once on row" in output


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("train_dataset.reward=failing_rewards:wrong", "wrong"),
        ("actor.loss=failing_rewards:spec", "loss"),  # on rank 1
    ],
)
def test_an_error_of_a_users_code_is_shown_by_its_line(
    run: Run, serve: None, key: str, name: str
) -> None:
    """In the last box, in the status, and in the files of both ranks; megarl's frames stay in the
    files."""
    run.start("", key, "trial_name=user", nproc=2)
    output = run.fails()
    at = next(i for i, text in enumerate(REWARDS.splitlines(), 1) if f"def {name}(" in text)
    at = next(i for i, text in enumerate(REWARDS.splitlines(), 1) if i > at and "my bug" in text)
    place = f"({run.path}/failing_rewards.py, line {at}, in {name})"
    (directory,) = (run.path / "runs").glob("*/user")
    now = status(directory)
    assert now["state"] == "failed" and place in now["last_error"], now["last_error"]
    assert place in json.loads((directory / "summary.json").read_text())["status"]
    shown = [line for line in output.splitlines() if line.lstrip().startswith("File ")]
    assert shown and all("failing_rewards.py" in line for line in shown), output
    assert "KeyError: 'my bug'" in output and len(output.splitlines()) < 60
    traces = [path.read_text() for path in (directory / "logs").glob("error_*.txt")]
    assert any("megarl/trainer/" in trace and f"in {name}" in trace for trace in traces)


def test_an_agent_that_always_raises_shows_its_line_once(run: Run, serve: None) -> None:
    agent = [
        "rollout.workflow.type=megarl.rollout.workflows.agent:AgentWorkflow",
        "rollout.workflow.options.agent=failing_rewards:agent",
    ]
    run.start("", *agent, "train_dataset.batch_size=16", "gconfig.n_samples=4")
    output = run.fails()
    warned = [line for line in output.splitlines() if "failing_rewards.py, line" in line]
    assert 1 <= len(warned) <= 3 and "in agent" in warned[0], output  # the 1st, 10th, 100th


@pytest.mark.full
def test_a_workflow_that_never_returns_ends_the_run_by_its_failures(run: Run, serve: None) -> None:
    act = """
async def patched(self, engine, data):
    await asyncio.sleep(300)
RLVRWorkflow.arun_episode = patched
"""
    run.start(act, "rollout.episode_timeout=2")
    output = run.fails()
    assert "took longer than rollout.episode_timeout=2 s; its rollouts count as failed" in output
    assert "rollouts failed (" in output and "timeout), more than" in output


@pytest.mark.full
def test_a_workflow_that_blocks_the_loop_is_shown_with_its_line(run: Run, serve: None) -> None:
    act = """
async def patched(self, engine, data):
    time.sleep(3000)
RLVRWorkflow.arun_episode = patched
"""
    run.start(act, "rollout.episode_timeout=5")
    output = run.fails()
    assert "none ended for rollout.episode_timeout + 30 s" in output
    assert "asynchronous code blocks it" in output and "time.sleep(3000)" in output


# a trainer process ends, or stops

RANK_1 = {
    "rollout": """
if RANK == 0: at(RolloutDriver, 'next_batch', wait)
else: at(RLTrainer, 'step', lambda: threading.Timer(2.0, die).start())
""",
    "train": "if RANK == 1: at(MegatronActor, 'ppo_update', die)",
    "sync": "if RANK == 1: at(BucketGatherer, 'gather', die, call=2)",
}
DEATHS = {
    "exit": "die = lambda: os._exit(1)",
    "kill": "die = hit(os.getpid())",
    "error": "def die(): raise ValueError('of its own')",
}
WAITED = {
    "rollout": "",
    "train": "gave up waiting for other ranks in train_batch",
    "sync": "weight sync: rank 0 waited in weight sync for",
}


@pytest.mark.full
@pytest.mark.parametrize("torchrun", [False, True])
@pytest.mark.parametrize(
    ("phase", "death"),
    # rank 1 runs nothing in a rollout that could raise
    [(p, d) for p in RANK_1 for d in DEATHS if (p, d) != ("rollout", "error")],
)
def test_a_rank_that_ends_ends_the_others(
    run: Run, serve: None, phase: str, death: str, torchrun: bool
) -> None:
    run.start(f"{DEATHS[death]}\n{RANK_1[phase]}", nproc=2, torchrun=torchrun)
    output = run.fails()
    if torchrun:
        assert "exitcode" in output and "rank      : 1" in output, output
        return  # it ends the others as soon as it sees one end: they may not get to say anything
    status = {"exit": "status 1", "kill": "status 137", "error": "status 1"}[death]
    if death != "error":  # else rank 0, which is told, may be the first to end
        assert f"trainer 1 exited with {status}" in output, output
    if phase == "sync":  # what rank 0 has begun at servers it ends
        assert "leaving the update group" not in output, output  # nor do they object
        assert "without begin_weight_update" in str(run.servers[0].post("/end_weight_update", {}))
        assert run.servers[0].get("/ready")[0] == 200
    if death == "error":
        assert "ValueError: of its own" in output
    elif phase != "rollout":
        assert WAITED[phase] in output, output


@pytest.mark.full
@pytest.mark.parametrize("phase", ("train", "sync"))
def test_a_rank_that_stands_still_is_waited_for_so_long(run: Run, serve: None, phase: str) -> None:
    act = "die = hit(os.getpid(), signal.SIGSTOP)\n" + RANK_1[phase]
    bounds = ["collective_timeout=20", "weight_sync.timeout=4"]
    run.start(act, *bounds, nproc=2)
    output = run.fails()
    assert WAITED[phase] in output
    bound = {
        "train": "within collective_timeout=20 s",
        "sync": "Timed out waiting 34000ms",  # weight_sync.timeout + 30 s, for a part of a bucket
    }[phase]
    assert bound in output, output


HANGS = {
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "state T (stopped)"),
    "busy": ("while True: pass", "state R (running)"),
    "asleep": ("time.sleep(3000)", "state S (sleeping)"),
}


@pytest.mark.full
@pytest.mark.parametrize("hang", HANGS)
def test_a_rank_that_hangs_is_named_with_all_stacks_and_the_run_goes_on(
    run: Run, serve: None, hang: str
) -> None:
    """What the others waited for is said, and after a restart the run ends well."""
    act, state = HANGS[hang]
    stand_still = f"""
def stand_still():
    if not (OUT / "reached1").exists():
        reached()
        {act}
if RANK == 1: at(MegatronActor, 'ppo_update', stand_still, call=2)
"""
    keys = ["collective_timeout=10", "recover.mode=auto", "recover.restarts=1"]
    run.start(stand_still, *keys, "recover.freq_steps=1", "recover.async_save=false", nproc=2)
    status, output = run.end()
    assert status == 0, output
    assert "rank 0 (Coords" in output and WAITED["train"] in output, output
    assert re.search(r"trainer 1 \(pid \d+, state \w\): not ended 5 s after a peer", output), output
    assert re.search(rf"trainer 1: process \d+ .*{re.escape(state)}", output), output
    assert "stand_still" in output, output  # the line where it hangs
    assert "from step 1 of 3" in output, output


@pytest.mark.full
def test_rank_0_is_waited_for_so_long(run: Run, serve: None) -> None:
    act = "if RANK == 0: at(RolloutDriver, 'next_batch', wait)"
    bounds = ["rollout.episode_timeout=2", "rollout.request_timeout=3", "weight_sync.timeout=5"]
    run.start(act, *bounds, nproc=2)
    output = run.fails()
    assert "rank 1 waited for rank 0 to finish RolloutDriver.next_batch" in output
    keys = "rollout.episode_timeout + rollout.request_timeout + weight_sync.timeout = 10 s"
    assert keys in output, output


# the user ends it

STANDSTILL = {
    "rollout": "at(RolloutDriver, 'next_batch', wait)",
    "train": "at(MegatronActor, 'ppo_update', wait)",
    "sync": "at(BucketGatherer, 'gather', wait, call=2)",
}


# one start of the run after the other, each ended by another fault; in the last one rewards hang
CHAIN = """
import resource
START = len(list(OUT.glob("fault*")))
(OUT / f"start{START}").touch()
def fill():
    rows = Path(OUT / "runs/quickstart/grpo/stats.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (rows + 10, resource.RLIM_INFINITY))
def fault(act):
    def struck():
        (OUT / f"fault{START}").touch()
        act()
    return struck
stop, kill = hit(os.getpid(), signal.SIGSTOP), hit(os.getpid())
rank, act, call = [(1, stop, 2), (0, fill, 1), (1, kill, 1), (None, None, 1)][START]
if RANK == rank: at(MegatronActor, 'ppo_update', fault(act), call=call)
"""


def test_each_start_goes_on_after_the_fault_before_it_and_sigterm_leaves_nothing(run: Run) -> None:
    """A trainer stands still, a disk fills up while the metrics of step 2 are written, a trainer is
    killed: each time the launcher says who did not end or what to do, and starts from step 1. Then
    a reward never returns, and SIGTERM ends the run with the server that the launcher started."""
    reward = ["train_dataset.reward=failing_rewards:stuck_in_the_end", "rollout.reward_timeout=300"]
    saves = ["recover.mode=auto", "recover.freq_steps=1", "recover.async_save=false"]
    run.start(CHAIN, *reward, *saves, "recover.restarts=3", "collective_timeout=10", nproc=2)
    run.until("fault0")
    run.until("fault1")
    run.until("fault2")
    run.until("reached_reward")
    assert run.process is not None
    run.process.terminate()
    status, output = run.end()
    assert status == 128 + signal.SIGTERM, output
    hung, full, killed, last = re.split(r"starting again, \d restart", output)
    assert "rank 0 (Coords" in hung and WAITED["train"] in hung, output
    assert re.search(r"trainer 1 \(pid \d+, state \w\): not ended 5 s after a peer", hung), output
    assert re.search(r"trainer 1: process \d+ .*state T \(stopped\)", hung), output
    assert "writing the metrics of step 2: File too large" in full and "Traceback" not in full, full
    assert "make room there, or set another fileroot" in full, full
    assert "trainer 1 exited with status 137" in killed and WAITED["train"] in killed, killed
    assert all("from step 1 of 3" in later for later in (full, killed, last)), output


@pytest.mark.full
@pytest.mark.parametrize("phase", STANDSTILL)
@pytest.mark.parametrize("number, times", [("SIGTERM", 1), ("SIGINT", 1), ("SIGINT", 2)])
def test_signals_in_every_phase(run: Run, phase: str, number: str, times: int) -> None:
    run.start(f"if RANK == 0: {STANDSTILL[phase]}", "recover.grace=3", nproc=2)
    run.until("reached0")
    assert run.process is not None
    for _ in range(times):
        run.process.send_signal(getattr(signal, number))
        time.sleep(0.5)
    assert run.end()[0] == 128 + getattr(signal, number)


# nothing starts where it cannot end well


def test_a_run_directory_that_cannot_be_written_is_an_error_before_servers(run: Run) -> None:
    (run.path / "runs").write_text("a file")
    run.start("")
    status, output = run.end()
    assert status == 2 and "Traceback" not in output
    assert f"the run directory {run.path}/runs/quickstart/grpo cannot be created" in output
    assert "server" not in output.replace(str(run.path), "")
