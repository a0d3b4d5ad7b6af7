"""The Slurm launcher on a real Slurm of four nodes: two nodes of trainers, one of a server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.cluster_run import ON_NODES, ClusterRun, check_same, disturbed
from tests.system.slurm_cluster import SlurmCluster, missing_tools
from tests.system.test_recover import ROOT
from tests.system.workers_check import check_abandoned, check_recipe, check_workers

IN_A_JOB = ["salloc", "--quiet", "-N2", "--ntasks=4", "--time=5"]
ON_SLURM = ON_NODES

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


def test_sigusr1_saves_and_queues_again_and_the_weights_are_the_local_launchers(
    cluster: SlurmCluster, command: tuple[str, ...], local: ClusterRun, tmp_path: Path
) -> None:
    run = ClusterRun(tmp_path, command)
    told = 'scancel --batch --signal=USR1 "$SLURM_JOB_ID"'
    status, output = run.launch(
        "slurm", cluster.env | disturbed(tmp_path, "rollout:3", told), *ON_SLURM
    )
    assert status == 0, output
    job = (run.dir / "launch" / "job_id").read_text()
    assert cluster.field(job, "Restarts") == "1" and "queueing the job again" in output
    assert "continuing" in output and "is COMPLETED" in output
    assert run.attempts() == [f"{job}.0.0", f"{job}.1.0"]
    check_same(run, local)
    assert not (run.dir / "launch" / "environment.json").stat().st_mode & 0o077
    token = json.loads((run.dir / "launch" / "environment.json").read_text())["MEGARL_JOB_TOKEN"]
    shared = [p for p in (run.dir / "names").rglob("*") if p.is_file()]
    shared += [run.dir / "launch" / name for name in ("job.json", "job.sbatch")]
    assert not any(token in p.read_text() for p in [*shared, *run.dir.glob("launch/*.log")])


def test_a_scheduler_starts_watches_and_ends_workers(cluster: SlurmCluster, tmp_path: Path) -> None:
    check_workers(["slurm", *IN_A_JOB], cluster.env, tmp_path, node="SLURMD_NODENAME")


@pytest.mark.full
def test_a_recipe_under_a_controller_outlives_a_trainer(
    cluster: SlurmCluster, command: tuple[str, ...], local: ClusterRun, tmp_path: Path
) -> None:
    check_recipe(["slurm", *IN_A_JOB], cluster.env, ClusterRun(tmp_path, command), local)


@pytest.mark.full
def test_a_controller_with_trainers_on_two_nodes(
    cluster: SlurmCluster, command: tuple[str, ...], local: ClusterRun, tmp_path: Path
) -> None:
    """It gets SIGUSR1; its trainers leave that to it."""
    run = ClusterRun(tmp_path, command)
    told = 'scancel --batch --signal=USR1 "$SLURM_JOB_ID"'
    env = cluster.env | disturbed(tmp_path, "checkpoint:2", told)
    status, output = run.launch("slurm", env, *ON_SLURM, "trainer.mode=controller")
    assert status == 0 and "queueing the job again" in output, output
    check_same(run, local)


@pytest.mark.full
def test_workers_end_with_a_controller_that_was_killed(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    check_abandoned(["slurm", *IN_A_JOB], cluster.env, tmp_path)


@pytest.mark.full
def test_the_doctor_looks_at_every_node(
    cluster: SlurmCluster, command: tuple[str, ...], tmp_path: Path
) -> None:
    model = next(word for word in command if word.startswith("actor.path="))
    recipe = [str(ROOT / "configs" / "script_grpo.yaml"), model, f"fileroot={tmp_path}"]
    doctor = [sys.executable, "-m", "megarl.cli", "doctor", *recipe]
    done = subprocess.run(
        ["srun", "-N2", "--ntasks-per-node=1", "--time=5", *doctor],
        cwd=ROOT, env=cluster.env, timeout=200, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    said = done.stdout
    assert done.returncode == 0 and "disk speed" in said, said  # of both where they differ
    assert "2 hosts wrote their findings" in said, said
    assert list(tmp_path.iterdir()) == [], said


@pytest.mark.full
def test_a_lost_node_queues_the_job_again_and_its_processes_end(
    cluster: SlurmCluster, command: tuple[str, ...], local: ClusterRun, tmp_path: Path
) -> None:
    """The node's daemon is killed and what it started runs on, as where the network is cut. Another
    node takes its place, and what is left of the first attempt ends by itself."""
    run, lost = ClusterRun(tmp_path, command), cluster.daemons["n2"].pid
    instead = f'kill -KILL {lost}; echo "$SLURM_JOB_NODELIST" > {tmp_path}/nodes'
    try:
        env = cluster.env | disturbed(tmp_path, "rollout:3", instead)
        status, output = run.launch("slurm", env, *ON_SLURM)
        assert status == 0, output
        job = (run.dir / "launch" / "job_id").read_text()
        assert (tmp_path / "nodes").read_text() == "n[1-3]\n"
        assert cluster.field(job, "NodeList") == "n[1,3-4]"
        again = r"RUNNING on n\[1-3\].* is PENDING.* RUNNING on n\[1,3-4\]"
        assert re.search(again, output, re.DOTALL) and "continuing" in output, output
        check_same(run, local)
    finally:
        cluster.daemons["n2"].wait(10)
        cluster.start_node("n2")
        cluster.until(60, "n2 is back", lambda: cluster.states() == ["idle"] * 4)


@pytest.mark.full
def test_a_killed_trainer_is_started_again_in_the_job_of_three_kinds_of_nodes(
    cluster: SlurmCluster, command: tuple[str, ...], local: ClusterRun, tmp_path: Path
) -> None:
    run = ClusterRun(tmp_path, command)
    pool = ["cluster.server_pool.n_gpus_per_node=2", "recover.restarts=1"]
    pool += ["cluster.reward_pool.n_nodes=1", "cluster.n_nodes=4"]
    env = cluster.env | disturbed(tmp_path, "update:3")
    status, output = run.launch("slurm", env, *ON_SLURM, *pool)
    assert status == 0, output
    job = (run.dir / "launch" / "job_id").read_text()
    assert cluster.field(job, "Restarts") == "0" and cluster.field(job, "HetJobOffset") == "0"
    assert "trainer 1 exited with status 137" in output
    assert "status 137: starting again, 0 restart(s) left" in output
    assert (run.dir / "rewards_0.log").is_file()
    check_same(run, local)


@pytest.mark.full
def test_the_time_limit_queues_the_job_again(
    cluster: SlurmCluster, command: tuple[str, ...], local: ClusterRun, tmp_path: Path
) -> None:
    """Rank 0 hangs in a step until it is told to save."""
    run = ClusterRun(tmp_path, command)
    limit = ["cluster.sbatch_args=[--time=2,--signal=B:USR1@60]"]
    env = cluster.env | disturbed(tmp_path, "rollout:3", "true")
    status, output = run.launch("slurm", env, *ON_SLURM, *limit)
    assert status == 0, output
    job = (run.dir / "launch" / "job_id").read_text()
    assert int(cluster.field(job, "Restarts")) >= 1 and "queueing the job again" in output
    check_same(run, local)


@pytest.mark.full
def test_a_job_that_is_cancelled_stays_cancelled_with_a_checkpoint(
    cluster: SlurmCluster, command: tuple[str, ...], tmp_path: Path
) -> None:
    run = ClusterRun(tmp_path, command)
    env = cluster.env | disturbed(tmp_path, "rollout:2", 'scancel "$SLURM_JOB_ID"')
    status, output = run.launch("slurm", env, *ON_SLURM)
    assert status == 1 and "is CANCELLED" in output, output
    job = (run.dir / "launch" / "job_id").read_text()
    assert cluster.field(job, "JobState") == "CANCELLED"
    assert (run.dir / "recover" / "step_000001").is_dir()
