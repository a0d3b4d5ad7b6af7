"""The Ray launcher on a real Ray of three nodes: two nodes of trainers, one of a server."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.cluster_run import ON_NODES, ClusterRun, check_same, disturbed
from tests.system.ray_cluster import RayCluster

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
    shown = [p for p in cluster.root.rglob("*") if p.is_file()]  # all that Ray wrote
    assert len(shown) > 20 and not any(token in p.read_text(errors="replace") for p in shown)
    assert token not in output
