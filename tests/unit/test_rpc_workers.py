"""Worker processes: where they stand, in what order they work, and how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config.engine import TrainEngineConfig
from megarl.config.recipes import GRPOConfig
from megarl.config.rollout import RolloutConfig, ServerConfig
from megarl.engine import MegatronEngine
from megarl.launcher.job import JobFiles
from megarl.launcher.ray import bundle
from megarl.launcher.slurm import SlurmScheduler, srun_command
from megarl.launcher.workers import group_job, make_scheduler
from megarl.rollout.local import SGLangEngine
from megarl.rpc import group as group_module
from megarl.rpc.errors import RemoteError, RpcError, WorkerDied
from megarl.rpc.group import TRAINERS, GroupSpec, LocalScheduler, WatchedGroup, WorkerSpec
from megarl.rpc.worker import WorkerStart
from megarl.utils.child import wait_until
from megarl.utils.env import CONTROLS, free_port
from megarl.utils.env import JOB_TOKEN as TOKEN
from megarl.utils.user_errors import user_lines
from tests.leftovers import Mark

ROOT = Path(__file__).parents[2]
SERVE = "tests.unit.rpc_handler:Service"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mark]:
    mark = Mark()
    for name, value in mark.env.items():
        monkeypatch.setenv(name, value)
    yield mark
    mark.kill()


@pytest.fixture
def scheduler(mark: Mark) -> Iterator[LocalScheduler]:
    scheduler = LocalScheduler()
    yield scheduler
    scheduler.close()
    mark.assert_none_left()


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GroupSpec:
    monkeypatch.setenv("MEGARL_DEVICE", "cuda")
    return GroupSpec(
        name="group",
        count=2,
        serve=SERVE,
        options={"a": [1]},
        worker=WorkerSpec(env={"MINE": "yes"}),
        log_dir=str(tmp_path),
        echo=True,
        start_timeout=60,
    )


@pytest.fixture
def group(scheduler: LocalScheduler, spec: GroupSpec) -> WatchedGroup:
    return scheduler.start(spec)


def test_a_worker_knows_its_place_and_ends_in_an_orderly_way(
    group: WatchedGroup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [client.call("place") for client in group.clients]
    for i, (index, count, options, env) in enumerate(places):
        assert (index, count, options) == (i, 2, {"a": [1]})
        assert (env["RANK"], env["WORLD_SIZE"]) == (env["LOCAL_RANK"], "2") == (str(i), "2")
        assert env["MINE"] == "yes"
        assert env["CUDA_VISIBLE_DEVICES"] == "" and env["MEGARL_DEVICE"] == "cpu"
        assert env["MASTER_ADDR"] == "127.0.0.1"
    assert len({env["MASTER_PORT"] for *_, env in places}) == 1
    assert [str(w).partition(" ")[0] for w in group.workers] == ["group/0", "group/1"]
    one = group.clients[1]
    with pytest.raises(RemoteError, match="StopIteration") as e:
        one.call("next_of_none", timeout=10)
    assert "next_of_none" in [line.name for line in user_lines(e.value)]
    slow = one.call_async("sleep", 0.5)
    assert [f.result(30) for f in [one.call_async("note", i) for i in range(3)]] == [True] * 3
    assert slow.done()  # calls on the main thread come one after another
    assert group.poll() == []
    slow = one.call_async("sleep", 0.5)
    one.call("at_once")  # by now the other runs
    group.stop()
    group.stop()
    log = (tmp_path / "group_1.log").read_text()
    assert log == "closed after ['slept', 0, 1, 2, 'slept']\n"
    assert capsys.readouterr().err == (tmp_path / "group_0.log").read_text() == "closed after []\n"
    assert [(e.worker.name, e.status) for e in group.poll()] == [("group/0", 0), ("group/1", 0)]
    with pytest.raises(RpcError):
        one.call("at_once")


def test_a_death_is_named_with_its_status_and_log(group: WatchedGroup) -> None:
    first, second = group.clients
    asleep = first.call_async("sleep", 600)
    first.call("at_once")
    os.kill(group.workers[0].pid, signal.SIGKILL)
    deaths = [(first, asleep, r"137 \(SIGKILL"), (second, second.call_async("leave", 3), r"3\n")]
    for worker, (client, future, status) in zip(group.workers, deaths, strict=True):
        for failed in (future, client.call_async("at_once")):
            with pytest.raises(WorkerDied, match=f"worker {re.escape(str(worker))} .* {status}"):
                failed.result(30)
    with pytest.raises(WorkerDied, match=r"group_1.log ---\nit was the disk"):
        second.call("at_once")
    assert [(e.worker, e.status) for e in group.poll()] == [*zip(group.workers, (137, 3))]


def test_workers_outlast_a_look_at_them_that_fails(
    scheduler: LocalScheduler,
    spec: GroupSpec,
    monkeypatch: pytest.MonkeyPatch,
    warnings: list[str],
) -> None:
    """As where the scheduler's own server does not answer for a moment."""
    monkeypatch.setattr(group_module, "LOOK", 0.05)
    group = scheduler.start(replace(spec, count=1))
    with monkeypatch.context() as patch:
        patch.setattr(group, "poll", lambda: 1 / 0)
        group.clients[0].call("sleep", 1.5)
    assert [w for w in warnings if "cannot look after the workers of group" in w] == warnings != []
    assert group.clients[0].call("at_once", 1) == 1 and group.poll() == []
    with monkeypatch.context() as patch:
        patch.setattr(group, "poll", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            group.stop()
    assert [e.worker.index for e in group.poll()] == [0]


@pytest.mark.parametrize(
    "seconds", [3.0, pytest.param(65.0, marks=pytest.mark.full)], ids=["briefly", "65s"]
)
def test_a_worker_that_stands_still_is_waited_for(
    scheduler: LocalScheduler, spec: GroupSpec, seconds: float
) -> None:
    group = scheduler.start(replace(spec, count=1))
    [client], [worker] = group.clients, group.workers
    os.kill(worker.pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{worker.pid}/task")
    while any(") T " not in (t / "stat").read_text() for t in tasks.iterdir()):
        time.sleep(0.01)  # a thread may go on for a moment
    waiting = client.call_async("at_once", 1)
    time.sleep(seconds)
    assert not waiting.done() and group.poll() == []
    os.kill(worker.pid, signal.SIGCONT)
    assert waiting.result(30) == 1


def test_a_worker_that_stands_still_can_be_ended(
    scheduler: LocalScheduler, spec: GroupSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "TERM_TIMEOUT", 0.5)
    group = scheduler.start(replace(spec, count=1))
    [client] = group.clients
    os.kill(group.workers[0].pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(client.call, "note", bytearray(64 << 20))  # which nobody reads
        time.sleep(0.5)
        group.stop()
        assert [e.status for e in group.poll()] == [137]
        with pytest.raises(RpcError):
            sending.result(30)


def test_a_link_that_ends_ends_the_worker(
    scheduler: LocalScheduler, spec: GroupSpec, mark: Mark
) -> None:
    """With what it started, also what does not heed SIGTERM."""
    group = scheduler.start(spec)
    children = [client.call("child") for client in group.clients]
    assert {*children, *(w.pid for w in group.workers)} <= set(mark.left())
    asleep = group.clients[0].call_async("sleep", 600)
    for client in group.clients:
        client.close()
    with pytest.raises(RpcError, match="the link is closed"):
        asleep.result(30)
    assert wait_until(lambda: len(group.poll()) == 2, timeout=30)
    assert not {*children, *(w.pid for w in group.workers)} & set(mark.left())
    assert "whoever started this worker is gone" in (Path(spec.log_dir) / "group_0.log").read_text()


def test_workers_that_a_launcher_started_are_met(
    spec: GroupSpec, mark: Mark, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They wait until the controller listens, and leave SIGTERM to it."""
    monkeypatch.setenv(TOKEN, "the-tests-secret")
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    launched = []
    for index in range(2):
        start = WorkerStart(
            starter=address, group=TRAINERS, index=index, count=2, serve=SERVE,
            options={"a": [1]}, directory=os.getcwd(), path=(), launched=True,
        )  # fmt: skip
        env = {**os.environ, **start.to_env(), "PYTHONPATH": str(ROOT)}
        launched.append(subprocess.Popen([sys.executable, "-m", "megarl.rpc.worker"], env=env))
    monkeypatch.setenv(CONTROLS, f"{TRAINERS}={address}")
    with pytest.raises(RuntimeError, match=r"megarl.make_scheduler\(config\)"):
        LocalScheduler()
    scheduler = make_scheduler(GRPOConfig())
    with pytest.raises(ValueError, match=r"other: .*trainers"):
        scheduler.start(replace(spec, name="other"))
    trainers = scheduler.start(replace(spec, name=TRAINERS))
    assert [w.pid for w in trainers.workers] == [p.pid for p in launched]
    launched[0].terminate()
    assert [client.call("place")[0] for client in trainers.clients] == [0, 1]
    scheduler.close()
    scheduler.close()
    assert [p.wait(30) for p in launched] == [0, 0]
    mark.assert_none_left()


def test_the_loss_of_a_launched_worker_is_told_at_once(
    spec: GroupSpec, mark: Mark, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How it ended, its launcher says."""
    monkeypatch.setenv(TOKEN, "the-tests-secret")
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    start = WorkerStart(
        starter=address, group=TRAINERS, index=0, count=1, serve=SERVE, options={"a": [1]},
        directory=os.getcwd(), path=(), launched=True,
    )  # fmt: skip
    env = {**os.environ, **start.to_env(), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-m", "megarl.rpc.worker"], env=env) as worker:
        monkeypatch.setenv(CONTROLS, f"{TRAINERS}={address}")
        scheduler = make_scheduler(GRPOConfig())
        [client] = scheduler.start(replace(spec, name=TRAINERS, count=1)).clients
        asleep = client.call_async("sleep", 600)
        worker.kill()
        with pytest.raises(RpcError, match=r"link to trainers/0 .* lost"):
            asleep.result(5)
        scheduler.close()
    mark.assert_none_left()


CONTROLLER = """
import sys, time
from megarl.rpc.group import GroupSpec, LocalScheduler

group = LocalScheduler().start(GroupSpec(name="group", count=2, serve=sys.argv[1]))
print(*[client.call("child") for client in group.clients], flush=True)
time.sleep(600)
"""


def test_workers_do_not_outlive_a_controller_that_was_killed(mark: Mark) -> None:
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, SERVE],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert controller.stdout is not None
    children = {int(pid) for pid in controller.stdout.readline().split()}
    assert len(children) == 2 and children <= set(mark.left())
    controller.kill()
    controller.communicate(timeout=30)
    mark.assert_none_left(within=30)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"options": {"fails": 1}}, "(?s)worker group/1 ended with status 1 .*no such option for"),
        ({"serve": "tests.unit.rpc_handler:Servise"}, "did you mean Service?"),
        ({"options": {"hangs": 1}, "start_timeout": 1.5}, r"after 1.5 s these .* of group .*1\]"),
        ({"options": {"a": object()}}, "not JSON serializable"),
        ({"python": "/no/python"}, "No such file or directory: '/no/python'"),
    ],
    ids=["fails", "unknown", "hangs", "options", "python"],
)
def test_a_group_that_cannot_start_says_why_and_leaves_nothing(
    scheduler: LocalScheduler, spec: GroupSpec, mark: Mark, change: Any, says: str
) -> None:
    kinds = (WorkerDied, TimeoutError, TypeError, FileNotFoundError)
    with pytest.raises(kinds, match=says):
        scheduler.start(replace(spec, **change))
    mark.assert_none_left()


def test_workers_have_gpus_of_their_own(
    spec: GroupSpec, mark: Mark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,9")
    monkeypatch.setattr(group_module, "uses_gpus", lambda env: True)
    monkeypatch.setattr("megarl.utils.env.uses_gpus", lambda env, torch_version: True)
    spec, scheduler = replace(spec, worker=WorkerSpec(gpus=2)), LocalScheduler()
    with pytest.raises(
        RuntimeError, match=r"group: 2 workers want 2.1e\+06 GiB of memory, and here"
    ):
        scheduler.start(replace(spec, worker=WorkerSpec(memory=1 << 50)))
    group = scheduler.start(spec)
    seen = [c.call("place")[-1]["CUDA_VISIBLE_DEVICES"] for c in group.clients]
    assert seen == ["4,5", "6,7"]
    with pytest.raises(RuntimeError, match=r"group: 2 workers with 2 GPUs each need 4, and 1 are"):
        scheduler.start(spec)
    group.stop()
    again = scheduler.start(spec)
    assert again.clients[0].call("place")[-1]["CUDA_VISIBLE_DEVICES"] == "9,4"
    scheduler.close()
    mark.assert_none_left()


def test_a_scheduler_that_is_closed_twice_closes_no_file_of_others(mark: Mark) -> None:
    """As where a script closes it, and then the end of the process."""
    scheduler = LocalScheduler()
    scheduler.close()
    ends = os.pipe()  # they get the numbers that are free now
    scheduler.close()
    for end in ends:
        os.close(end)


def test_a_driver_gets_the_gpus_of_the_servers_that_its_client_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = SGLangEngine(RolloutConfig(), ServerConfig(count=2, tp=2), model_path="m")
    assert WorkerSpec.of(client.get_scheduling_config()) == WorkerSpec()
    monkeypatch.delenv("MEGARL_DEVICE", raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.11.0+cu129")
    assert WorkerSpec.of(client.get_scheduling_config()) == WorkerSpec(gpus=4)
    given: list[str | None] = []
    logs: list[Path] = []
    monkeypatch.setattr(
        "megarl.rollout.local.start_server",
        lambda server, *, env, log_path, **_: (
            given.append(env.get("CUDA_VISIBLE_DEVICES")),
            logs.append(log_path),
        ),
    )
    for visible in ("4,5,6,7", "0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(AttributeError):  # no server is there to be waited for
            client.initialize()
    assert given == ["4,5", "6,7", None, None]
    assert not any(path.resolve().is_relative_to(Path.cwd()) for path in logs)
    assert logs[0].parent == logs[1].parent != logs[2].parent


def test_what_an_engine_asks_for_is_what_a_worker_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MEGARL_DEVICE", raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.11.0+cu129")
    asked = MegatronEngine(TrainEngineConfig()).get_scheduling_config()
    assert WorkerSpec.of(asked) == WorkerSpec(gpus=1, cpus=4)
    worker = WorkerSpec.of({**asked, "memory_per_process": 10 << 30})
    spec = GroupSpec(name="g", count=8, serve="m:f", worker=worker, log_dir="/l")
    assert bundle(worker) == {"GPU": 1, "CPU": 4, "memory": 10 << 30}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [t.env["OMP_NUM_THREADS"] for t in group_job(spec, "h:1").tasks] == ["4"] * 8
    monkeypatch.setenv("OMP_NUM_THREADS", "9")  # the user's
    job = group_job(spec, "h:1")
    assert "OMP_NUM_THREADS" in job.forwarded and "OMP_NUM_THREADS" not in job.tasks[0].env
    assert job.tasks[7].log == "/l/g_7.log" and job.tasks[7].node == 7
    command = srun_command(spec, JobFiles.of(job), "1.0")
    assert {"--ntasks=8", "--gpus-per-task=1", "--cpus-per-task=4"} <= {*command}
    assert "/l/g/launch/job.json" in command
    assert "--mem-per-cpu=2560M" in command and "--mem=0" not in command
    spec = GroupSpec(name="g", count=1, serve="m:f", log_dir="/l")
    command = srun_command(spec, JobFiles.of(job), "1.0")
    assert "--overlap" in command and not any("gpus" in word for word in command)


def test_outside_of_an_allocation_there_is_no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ValueError, match="start this in an allocation, by sbatch or salloc"):
        SlurmScheduler()
