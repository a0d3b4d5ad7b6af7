"""What the Ray launcher asks for, and what it says before there is a Ray."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.launcher import command, ray
from megarl.launcher.job import TRAINER
from megarl.launcher.names import Names
from megarl.launcher.node import NODE_FAILED, run_node
from megarl.utils.child import Signals
from megarl.utils.extras import install_hint
from tests.hf_stub import write_stub
from tests.unit.test_launcher_job import CASES, make


def line(folder: Path, *more: str) -> list[str]:
    return [
        f"actor.path={write_stub(folder / 'model')}", "actor.optimizer.lr=1e-6",
        "gconfig.n_samples=2", f"fileroot={folder}/runs",
        "allocation_mode=embedded.d1+megatron.d1t2", "cluster.n_gpus_per_node=1", *more,
    ]  # fmt: skip


def asked(folder: Path, *more: str, on_gpus: bool = True) -> list[ray.Resources]:
    cluster = load_config(None, [a for a in more if a.lstrip("+").startswith("cluster.")]).cluster
    return ray.bundles(make(folder, *more, on_gpus=on_gpus), cluster)


def test_a_bundle_has_a_nodes_gpus_or_a_cpu_for_each_process(tmp_path: Path) -> None:
    assert asked(tmp_path, *CASES["70b"]) == [{"GPU": 8, "CPU": 1}] * 16
    found = asked(tmp_path, "allocation_mode=embedded.d1+megatron.d2", on_gpus=False)
    assert found == [{"CPU": 3}]


def test_each_kind_of_nodes_is_asked_for_what_the_configuration_adds(tmp_path: Path) -> None:
    found = asked(
        tmp_path, "allocation_mode=sglang.d1+megatron.d2", "cluster.server_pool.n_gpus_per_node=2",
        "+cluster.ray_resources.big=1", "+cluster.server_pool.ray_resources.small=0.5",
    )  # fmt: skip
    assert found == [{"GPU": 8, "CPU": 1, "big": 1}, {"GPU": 2, "CPU": 1, "small": 0.5}]
    assert ray.described(found[1]) == "GPU 2, CPU 1, small 0.5"


def test_the_dry_run_shows_what_ray_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ray.main(line(tmp_path, "--dry-run")) == 0
    assert capsys.readouterr().out.endswith(
        "Ray is asked for a placement group, STRICT_SPREAD, with a bundle for each node:\n"
        "  node 0: CPU 1\n  node 1: CPU 1\n  node 2: CPU 1\n"
    )
    assert ray.main(line(tmp_path, "--dry-run", "--format", "json")) == 0
    assert len(json.loads(capsys.readouterr().out)["tasks"]) == 3
    assert not (tmp_path / "runs").exists()


def test_a_container_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ray.main(line(tmp_path, "--dry-run", "cluster.container=image:1")) == 2
    assert "cluster.container=image:1: processes run in" in capsys.readouterr().err


def test_ray_that_is_not_installed_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for check in ("check_contents", "check_writable"):
        monkeypatch.setattr(command, check, lambda cfg, **how: None)
    assert ray.main(line(tmp_path)) == 2
    assert install_hint("ray") in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ray://head:10001", "RAY_ADDRESS=ray://head:10001: must be host:port"),
        ("head", "RAY_ADDRESS=head: must be host:port"),
        ("127.0.0.1:9", "RAY_ADDRESS=127.0.0.1:9: no Ray cluster: .*refused; start one with"),
    ],
)
def test_an_address_that_is_no_clusters_is_refused(
    address: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megarl.launcher.ray_cluster import connected

    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=says), connected():
        pass


def test_agents_end_where_the_launcher_says_that_a_node_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Node 1 has nothing to do but to wait for the trainers of node 0."""
    job = make(tmp_path, "allocation_mode=sglang.d1t8+megatron.d8")
    job = replace(job, tasks=tuple(job.of(TRAINER)))
    names = Names()
    names.put("lost.0", "its network is cut")
    with Signals() as signals:
        assert run_node(job, 1, host="127.0.0.1", names=names, signals=signals) == NODE_FAILED
    assert "node 0 is lost: its network is cut" in caplog.text
    assert names.peek("end.1") == str(NODE_FAILED)
