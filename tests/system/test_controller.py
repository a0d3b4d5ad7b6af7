"""One controller over real processes: two trainers, one driver of rollouts, the embedded server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from examples.tiny_model import make_model
from megarl.api.batch import Batch
from megarl.config.recipes import GRPOConfig
from megarl.controller import start
from megarl.controller.remote import TrainController
from megarl.parallel.worlds import init_distributed
from megarl.rpc.errors import RemoteError, WorkerDied
from megarl.rpc.group import LocalScheduler
from megarl.utils.env import free_port
from tests.embedded_server import Client, Server, embedded_server

ROOT = Path(__file__).resolve().parents[2]
SPMD, CONTROLLER = (ROOT / "examples" / f"gsm8k_grpo_{m}.py" for m in ("spmd", "controller"))
STEPS = 5
TIMEOUT = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("controller") / "model"
    make_model(path, hidden=64, layers=2)
    return path


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Server]:
    flags = ("--context-length", "64", "--dtype", "float32")
    with embedded_server(model, *flags, log=tmp_path / "server.log") as server:
        yield server


def keys(model: Path, root: Path, server: Server, steps: int = STEPS) -> list[str]:
    return [
        "--config", str(ROOT / "configs" / "script_grpo.yaml"), f"actor.path={model}",
        f"fileroot={root}", f"total_train_steps={steps}", "train_dataset.size=40",
        "train_dataset.batch_size=6", "gconfig.n_samples=2", "gconfig.seed=1",
        "weight_sync.type=disk",
        f"rollout.addresses=[127.0.0.1:{server.port}]",
        "train_dataset.reward.type=megarl.cli.rehearse.small:even_share",
    ]  # fmt: skip


def env(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


def run(command: Sequence[str]) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, timeout=TIMEOUT, text=True, env=env(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def controller(model: Path, root: Path, server: Server, *more: str) -> list[str]:
    mode = ("trainer.mode=controller", "trainer.workers=2")
    return [str(CONTROLLER), *keys(model, root, server), *mode, *more]


def test_both_modes_give_the_same_weights_to_the_bit(model: Path, tmp_path: Path) -> None:
    flags, found = ("--context-length", "64", "--dtype", "float32"), {}
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    for name in ("spmd", "controller"):
        root = tmp_path / name
        with embedded_server(model, *flags, log=tmp_path / f"{name}.log") as server:
            if name == "controller":
                run(controller(model, root, server))
            else:
                port = str(free_port())
                where = ["--master-addr", "127.0.0.1", "--master-port", port]
                run([*torchrun, *where, str(SPMD), *keys(model, root, server)])
        rows = [json.loads(line) for line in (root / "script/grpo/stats.jsonl").open()]
        stats = [{k: v for k, v in row.items() if "timing" not in k} for row in rows]
        found[name] = load_file(root / "script/grpo/final/model.safetensors"), stats
    (one, stats), (other, others) = found.values()
    before = load_file(model / "model.safetensors")
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    assert not torch.equal(one["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    for row, same in zip(stats, others, strict=True):
        for name in ("step", "reward", "loss", "grad_norm", "ratio", "entropy"):
            assert row[name] == same[name], name
    assert len(stats) == STEPS and {row["grad_norm"] > 0 for row in stats} == {True}


@pytest.mark.full
def test_a_launcher_starts_the_script_and_its_servers(model: Path, tmp_path: Path) -> None:
    given = [k for k in controller(model, tmp_path, Client(0)) if "rollout.addresses" not in k]
    said = run(["-m", "megarl.launcher.local", *given, "total_train_steps=2"])
    assert "controller" in said
    rows = [json.loads(line) for line in (tmp_path / "script/grpo/stats.jsonl").open()]
    assert len(rows) == 2 and (tmp_path / "script/grpo/final/model.safetensors").is_file()


def children(pid: int) -> dict[int, str]:
    """The workers that a controller has started, by pid: "group/number"."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            said = dict(v.split("=", 1) for v in status.read_text().split("\0") if "=" in v)
            parent = re.search(r"^PPid:\s+(\d+)", (status.parent / "status").read_text(), re.M)
            if "MEGARL_WORKER" in said and parent and int(parent[1]) == pid:
                start = json.loads(said["MEGARL_WORKER"])
                found[int(status.parent.name)] = f"{start['group']}/{start['index']}"
    return found


def wait_for(ready: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + TIMEOUT
    while not (found := ready()):
        assert time.monotonic() < deadline, f"no {what} after {TIMEOUT:g} s"
        time.sleep(0.1)
    return found


@contextlib.contextmanager
def under_way(command: Sequence[str], root: Path, **more: str) -> Iterator[subprocess.Popen[str]]:
    """The controller of a long run, after its first step."""
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, text=True, env=env(**more),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    stats = root / "script/grpo/stats.jsonl"
    try:
        wait_for(lambda: process.poll() is not None or (stats.is_file() and stats.read_text()),
                 "step")  # fmt: skip
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.full
def test_a_worker_that_dies_ends_the_controller_with_its_name(
    model: Path, tmp_path: Path, server: Server
) -> None:
    command = controller(model, tmp_path, server, "total_train_steps=1000")
    with under_way(command, tmp_path) as process:
        workers = children(process.pid)
        assert sorted(workers.values()) == ["rollout/0", "trainers/0", "trainers/1"]
        (pid,) = (pid for pid, name in workers.items() if name == "trainers/1")
        os.kill(pid, signal.SIGKILL)
        said, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1 and f"worker trainers/1 ({os.uname().nodename}, {pid})" in said
    assert "SIGKILL" in said
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "end of workers")


@pytest.mark.full
def test_a_controller_that_is_killed_leaves_no_process(
    model: Path, tmp_path: Path, server: Server
) -> None:
    command = controller(model, tmp_path, server, "total_train_steps=1000")
    with under_way(command, tmp_path) as process:
        workers = children(process.pid)
        assert len(workers) == 3
        process.kill()
        wait_for(lambda: not any(Path(f"/proc/{p}").exists() for p in workers), "end of workers")


@pytest.mark.full
def test_an_error_in_the_loss_comes_with_its_traceback(
    model: Path, tmp_path: Path, server: Server
) -> None:
    loss = "actor.loss=tests.system.failing_loss:failing"
    done = subprocess.run(
        [sys.executable, *controller(model, tmp_path, server, loss)], cwd=ROOT, text=True,
        timeout=TIMEOUT, env=env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    last = done.stdout[done.stdout.rindex("worker trainers/1 (") :]
    assert "ValueError: the loss of rank 1" in last.splitlines()[0]
    assert re.search(r'File ".*failing_loss.py", line \d+, in on_rank_1', done.stdout)


def made() -> Batch:
    lengths = torch.tensor([2, 3, 1])
    ids = torch.arange(9).reshape(3, 3)
    mask = torch.arange(3) < lengths[:, None]
    return Batch.from_padded({"input_ids": ids, "attention_mask": mask})


def held(batch: Batch) -> list[list[int]]:
    return [batch.rows.tolist(), batch["input_ids"].values.tolist()]


def meet_without_1() -> None:
    while dist.get_rank() == 1:
        time.sleep(1)
    dist.barrier()


class Role:
    """A role that knows the size of its world."""

    def get_scheduling_config(self) -> dict[str, int]:
        return {"gpus_per_process": 0, "cpus_per_process": 1}

    def size(self) -> int:
        return dist.get_world_size()


class Unreadable:
    """Cannot be unpickled."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)


def unreadable() -> dict[Unreadable, float]:
    return {Unreadable(): 1.0}


def test_calls_batches_and_errors_over_real_processes(tmp_path: Path) -> None:
    config = GRPOConfig(fileroot=str(tmp_path), experiment_name="e", trial_name="t")
    config.trainer.workers = 2
    scheduler = LocalScheduler()
    try:
        group = start.trainers(config, scheduler, Role())
        other = start.driver(config, scheduler)
        batch = other.call(made)
        with pytest.raises(RemoteError, match="initialize a model there first"):
            group.call(len, batch)
        group.call(init_distributed)
        batch = other.call(made)
        assert group.each(held, batch) == [[[0], [0, 1]], [[1, 2], [3, 4, 5, 6]]]
        whole = batch.load_data()
        assert whole["input_ids"].tolist() == [[0, 1, 0], [3, 4, 5], [6, 0, 0]]
        with pytest.raises(ValueError, match="no number"):
            group.call(unreadable)
        part = start.trainers(config, scheduler, Role(), [1])
        assert part.call(dist.get_world_size) == 1 and group.call(dist.get_world_size) == 2
        alone = TrainController(Role(), config, scheduler, ranks=[1])
        assert alone.size() == 1 and TrainController(Role(), config, scheduler).size() == 2
        assert part.each(held, batch) == [[[0, 1, 2], [0, 1, 3, 4, 5, 6]]]
        with pytest.raises(RemoteError, match="there is no rank 2"):
            group.on([0, 2])
        one = group.workers[1]
        with pytest.raises(WorkerDied) as died:
            pending = group.submit(meet_without_1, (), {})
            os.kill(one.pid, signal.SIGKILL)
            pending.result(TIMEOUT)
        assert f"worker trainers/1 ({one.host}, {one.pid}) ended" in str(died.value)
        assert "SIGKILL" in str(died.value)
    finally:
        scheduler.close()
