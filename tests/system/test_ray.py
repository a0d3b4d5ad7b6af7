"""The Ray launcher on a real Ray of three nodes: two nodes of trainers, one of a server."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.leftovers import Mark
from tests.system.cluster_run import ON_NODES, ClusterRun, check_same, disturbed
from tests.system.ray_cluster import LOOPBACK, RayCluster
from tests.system.test_recover import ROOT
from tests.system.workers_check import check_abandoned, check_recipe, check_workers, kill_trainer

ON_RAY = [*ON_NODES, "recover.restarts=1", "recover.async_save=false"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    # names of sockets are short, and pytest's own directory is not
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as root:
        cluster = RayCluster(Path(root), nodes=3)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def test_a_lost_node_is_replaced_and_the_weights_are_the_local_launchers(
    cluster: RayCluster, command: tuple[str, ...], local: ClusterRun, tmp_path: Path
) -> None:
    """The node of the last rank, in an update after the checkpoint of step 2."""
    run = ClusterRun(tmp_path, command)
    lost = f'echo "replace $RAY_RAYLET_PID" > {cluster.orders}; sleep 50'
    env = cluster.env | disturbed(tmp_path, "update:3", lost)
    status, output = run.launch("ray", env, *ON_RAY)
    assert status == 0, output
    assert "is lost: its node has died" in output, output
    assert "starting again, 0 restart(s) left" in output and "from step 2 of 5" in output
    assert "ended with status 0 after 2 attempt(s)" in output
    assert len(run.attempts()) == 2
    check_same(run, local)
    environment = run.dir / "launch" / "environment.json"
    assert not environment.stat().st_mode & 0o077
    token = json.loads(environment.read_text())["MEGARL_JOB_TOKEN"]
    shown = cluster.written()
    assert len(shown) > 20 and not any(token in text for text in shown)
    assert token not in output
    assert cluster.listening() and cluster.listening() <= LOOPBACK


def test_a_scheduler_starts_watches_and_ends_workers(cluster: RayCluster, tmp_path: Path) -> None:
    check_workers(["ray"], cluster.env, tmp_path, node="RAY_RAYLET_PID")
    token = json.loads((tmp_path / "group/launch/environment.json").read_text())["MEGARL_JOB_TOKEN"]
    shown = cluster.written()
    assert len(shown) > 20 and not any(token in text for text in shown)


@pytest.mark.full
def test_a_recipe_under_a_controller_outlives_a_trainer(
    cluster: RayCluster, command: tuple[str, ...], local: ClusterRun, tmp_path: Path
) -> None:
    check_recipe(["ray"], cluster.env, ClusterRun(tmp_path, command), local)


@pytest.mark.full
def test_a_controller_with_trainers_on_two_nodes(
    cluster: RayCluster, command: tuple[str, ...], local: ClusterRun, tmp_path: Path
) -> None:
    """A trainer of another node than its own is killed."""
    run = ClusterRun(tmp_path, command)
    env = cluster.env | disturbed(tmp_path, "checkpoint:2", kill_trainer(run))
    status, output = run.launch("ray", env, *ON_RAY, "trainer.mode=controller")
    assert status == 0 and "trainer 1 exited with status 137" in output, output
    assert "starting again, 0 restart(s) left" in output and "from step 2 of 5" in output
    check_same(run, local)


@pytest.mark.full
def test_workers_end_with_a_controller_that_was_killed(cluster: RayCluster, tmp_path: Path) -> None:
    check_abandoned(["ray"], cluster.env, tmp_path)


def submitted(cluster: RayCluster, run: ClusterRun, env: dict[str, str]) -> tuple[int, str]:
    """The status and the output of `ray job submit`; the job has these variables, too."""
    mark = Mark()
    words = [f"{name}={value}" for name, value in (env | mark.env).items()]
    there = f"cd {ROOT} && exec {shlex.join(run.line('ray', *ON_NODES))}"
    ray = Path(sys.executable).with_name("ray")
    submit = [str(ray), "job", "submit", "--address", cluster.dashboard, "--", "env", *words]
    try:
        found = run.finished([*submit, "bash", "-c", there], cluster.env)
        mark.assert_none_left(within=30.0)
    finally:
        mark.kill()
    return found


@pytest.mark.full
def test_a_job_that_is_submitted_says_how_it_ended(
    cluster: RayCluster, command: tuple[str, ...], local: ClusterRun, tmp_path: Path
) -> None:
    run = ClusterRun(tmp_path, command)
    status, output = submitted(cluster, run, disturbed(tmp_path, "rollout:2"))
    assert status == 1 and "exit code 137" in output, output
    assert "ended with status 137 after 1 attempt(s)" in output
    status, output = submitted(cluster, run, {})
    assert status == 0 and "succeeded" in output, output
    check_same(run, local)


@pytest.mark.full
def test_signals_save_a_checkpoint_and_nothing_outlives_the_launcher(
    cluster: RayCluster, command: tuple[str, ...], local: ClusterRun, tmp_path: Path
) -> None:
    run = ClusterRun(tmp_path, command)
    for number, (name, when, ends) in enumerate(
        [("TERM", "rollout:2", 143), ("USR1", "rollout:3", 143), ("KILL", "update:4", -9)]
    ):
        told = f"kill -{name} $(cat {tmp_path}/pid); rm {tmp_path}/killed"
        env = cluster.env | disturbed(tmp_path, when, told)
        status, output = run.launch("ray", env, *ON_RAY)
        assert status == ends and "starting again" not in output, output
        if ends == 143:
            assert f"stopped by a signal after step {number + 1}" in output
    status, output = run.launch("ray", cluster.env, *ON_RAY)
    assert status == 0 and "from step 2 of 5" in output, output
    check_same(run, local)


@pytest.mark.full
def test_a_job_that_finds_no_room_says_what_there_is(
    cluster: RayCluster, command: tuple[str, ...], tmp_path: Path
) -> None:
    wide = ["allocation_mode=embedded.d2+megatron.d1t2", "cluster.n_nodes=4"]
    run = ClusterRun(tmp_path, (*command, *ON_RAY, *wide, "collective_timeout=6"))
    status, output = run.launch("ray", cluster.env)
    assert status == 4 and "Traceback" not in output, output
    wanted = "4 node(s) of CPU 1, each on a machine of its own; the cluster has 3 node(s) of CPU 2"
    assert f"waiting 6 s for room for {wanted}" in output
    assert f"no room within 6 s (collective_timeout) for {wanted}" in output
    assert "starting again" not in output
