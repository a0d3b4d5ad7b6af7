"""The Slurm launcher on a real Slurm of four nodes: two nodes of trainers, one of a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.leftovers import Mark
from tests.system.slurm_cluster import SlurmCluster, missing_tools
from tests.system.test_recover import COMMON, GRPO, ROOT, SCRIPT, STEPS
from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer

LAYOUT = ["allocation_mode=embedded.d1+megatron.d1t2"]
ON_NODES = [
    "cluster.n_nodes=3", "cluster.n_gpus_per_node=1", "cluster.interface=lo",
    "cluster.slurm.poll_seconds=0.5", "cluster.forward_env=[KILL*,INSTEAD]", "recover.grace=120",
]  # fmt: skip

pytestmark = pytest.mark.skipif(
    bool(missing_tools()), reason=f"`make slurm` installs {', '.join(missing_tools())}"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    # pytest's own directory is closed to others, which munged does not like
    with tempfile.TemporaryDirectory(prefix="slurm") as root:
        cluster = SlurmCluster(Path(root), nodes=4)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = save_tiny(tmp_path_factory.mktemp("model"), "qwen3", layers=2)
    save_tokenizer(path)
    return [*GRPO, *COMMON, *LAYOUT, f"actor.path={path}"]


@dataclass
class Run:
    """A run directory that a launcher fills."""

    root: Path
    command: list[str]

    def start(self, launcher: str, env: dict[str, str], *more: str) -> tuple[int, str]:
        """Runs to the end; returns the status and the output. Nothing of it may be left then."""
        mark = Mark()
        try:
            done = subprocess.run(
                [sys.executable, "-m", f"megarl.launcher.{launcher}", str(SCRIPT), *self.command,
                 f"fileroot={self.root}", *more],
                cwd=ROOT, env=env | mark.env, timeout=400, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            mark.assert_none_left(within=30.0)
        finally:
            mark.kill()
        return done.returncode, done.stdout

    @property
    def dir(self) -> Path:
        return self.root / "e" / "t"

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.dir / "final" / "model.safetensors")

    def steps(self) -> list[int]:
        lines = (self.dir / "stats.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]


@pytest.fixture(scope="module")
def local(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run by the local launcher, undisturbed."""
    run = Run(tmp_path_factory.mktemp("local"), command)
    status, output = run.start("local", dict(os.environ))
    assert status == 0, output
    return run


def check_same(run: Run, other: Run) -> None:
    ours, theirs = run.weights(), other.weights()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert run.steps() == other.steps() == list(range(STEPS + 1))


def disturbed(cluster: SlurmCluster, root: Path, when: str, instead: str = "") -> dict[str, str]:
    env = cluster.env | {"KILL": when, "KILLED": str(root / "killed")}
    return env | ({"INSTEAD": instead} if instead else {})


def test_sigusr1_saves_and_queues_again_and_the_weights_are_the_local_launchers(
    cluster: SlurmCluster, command: list[str], local: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path, command)
    told = 'scancel --batch --signal=USR1 "$SLURM_JOB_ID"'
    status, output = run.start("slurm", disturbed(cluster, tmp_path, "rollout:3", told), *ON_NODES)
    assert status == 0, output
    job = (run.dir / "launch" / "job_id").read_text()
    assert cluster.field(job, "Restarts") == "1" and "queueing the job again" in output
    assert "continuing" in output and "COMPLETED: the job is done" in output
    attempts = sorted(p.name for p in (run.dir / "names").iterdir() if p.is_dir())
    assert attempts == [f"{job}.0.0", f"{job}.1.0"]
    check_same(run, local)
    assert not (run.dir / "launch" / "environment.json").stat().st_mode & 0o077
    token = json.loads((run.dir / "launch" / "environment.json").read_text())["MEGARL_JOB_TOKEN"]
    shared = [p for p in (run.dir / "names").rglob("*") if p.is_file()]
    shared += [run.dir / "launch" / name for name in ("job.json", "job.sbatch")]
    assert not any(token in p.read_text() for p in [*shared, *run.dir.glob("launch/*.log")])


def test_the_doctor_looks_at_every_node(
    cluster: SlurmCluster, command: list[str], tmp_path: Path
) -> None:
    """The nodes' names say nothing to a resolver here, so MASTER_ADDR says where they meet."""
    model = next(word for word in command if word.startswith("actor.path="))
    recipe = [str(ROOT / "configs" / "script_grpo.yaml"), model, f"fileroot={tmp_path}"]
    doctor = [sys.executable, "-m", "megarl.cli", "doctor", *recipe]
    done = subprocess.run(
        ["srun", "-N2", "--ntasks-per-node=1", "--time=5", *doctor],
        cwd=ROOT, env=cluster.env | {"MASTER_ADDR": "127.0.0.1"}, timeout=200, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said = done.stdout
    assert done.returncode == 0 and said.count("disk speed") == 2, said
    assert "2 hosts read each other's files" in said, said
    assert list(tmp_path.iterdir()) == [], said


@pytest.mark.full
def test_a_lost_node_queues_the_job_again_and_its_processes_end(
    cluster: SlurmCluster, command: list[str], local: Run, tmp_path: Path
) -> None:
    """The node's daemon is killed and what it started runs on, as where the network is cut. Another
    node takes its place, and what is left of the first attempt ends by itself."""
    run, lost = Run(tmp_path, command), cluster.daemons["n2"].pid
    instead = f'kill -KILL {lost}; echo "$SLURM_JOB_NODELIST" > {tmp_path}/nodes'
    try:
        env = disturbed(cluster, tmp_path, "rollout:3", instead)
        status, output = run.start("slurm", env, *ON_NODES)
        assert status == 0, output
        job = (run.dir / "launch" / "job_id").read_text()
        assert (tmp_path / "nodes").read_text() == "n[1-3]\n"
        assert cluster.field(job, "NodeList") == "n[1,3-4]"
        assert "PENDING, for attempt 2" in output and "continuing" in output
        check_same(run, local)
    finally:
        cluster.daemons["n2"].wait(10)
        cluster.start_node("n2")
        cluster.until(60, "n2 is back", lambda: cluster.states() == ["idle"] * 4)


@pytest.mark.full
def test_a_killed_trainer_is_started_again_in_the_job_of_three_kinds_of_nodes(
    cluster: SlurmCluster, command: list[str], local: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path, command)
    pool = ["cluster.server_pool.n_gpus_per_node=2", "recover.restarts=1"]
    pool += ["cluster.reward_pool.n_nodes=1", "cluster.n_nodes=4"]
    env = disturbed(cluster, tmp_path, "update:3")
    status, output = run.start("slurm", env, *ON_NODES, *pool)
    assert status == 0, output
    job = (run.dir / "launch" / "job_id").read_text()
    assert cluster.field(job, "Restarts") == "0" and cluster.field(job, "HetJobOffset") == "0"
    assert "trainer 1 exited with status 137" in output
    assert "status 137: starting again, 0 restart(s) left" in output
    assert (run.dir / "rewards_0.log").is_file()
    check_same(run, local)


@pytest.mark.full
def test_the_time_limit_queues_the_job_again(
    cluster: SlurmCluster, command: list[str], local: Run, tmp_path: Path
) -> None:
    """Rank 0 hangs in a step until it is told to save."""
    run = Run(tmp_path, command)
    limit = ["cluster.slurm.minutes=2", "cluster.slurm.save_before=60"]
    env = disturbed(cluster, tmp_path, "rollout:3", "true")
    status, output = run.start("slurm", env, *ON_NODES, *limit)
    assert status == 0, output
    job = (run.dir / "launch" / "job_id").read_text()
    assert int(cluster.field(job, "Restarts")) >= 1 and "queueing the job again" in output
    check_same(run, local)


@pytest.mark.full
def test_a_job_that_is_cancelled_stays_cancelled_with_a_checkpoint(
    cluster: SlurmCluster, command: list[str], tmp_path: Path
) -> None:
    run = Run(tmp_path, command)
    env = disturbed(cluster, tmp_path, "rollout:2", 'scancel "$SLURM_JOB_ID"')
    status, output = run.start("slurm", env, *ON_NODES)
    assert status == 1 and "CANCELLED: somebody cancelled the job" in output, output
    job = (run.dir / "launch" / "job_id").read_text()
    assert cluster.field(job, "JobState") == "CANCELLED"
    assert (run.dir / "recover" / "step_000001").is_dir()
