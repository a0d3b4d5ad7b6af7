"""How the nodes of a job find each other, and what an agent of a node is told."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.launcher import names, node
from megarl.launcher.job import TRAINER, Job, Task, take_environment
from megarl.launcher.names import FileNames, ForgedName, Superseded, node_address
from megarl.launcher.node import NODE_FAILED, node_number, run_node
from megarl.utils.child import Signals


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "LOOK_INTERVAL", 0.0)


def test_what_one_node_puts_another_sees(tmp_path: Path) -> None:
    a, b = (FileNames(tmp_path, "7.0", token="t") for _ in range(2))
    assert b.peek("server.0") is None
    a.put("server.0", "10.0.0.1:7")
    assert b.peek("server.0") == a.peek("server.0") == "10.0.0.1:7"
    a.put("end.0", "0")
    assert b.peek("end.0") == "0"
    a.put("end.0", "3")
    assert b.peek("end.0") == "3"


def test_values_of_others_are_refused(tmp_path: Path) -> None:
    ours = FileNames(tmp_path, "7.1", token="t")
    FileNames(tmp_path, "7.1", token="another").put("master", "10.6.6.6:1")
    with pytest.raises(ForgedName, match=r"7\.1/master: not written by attempt 7\.1"):
        ours.peek("master")
    # a value that was right once and elsewhere is not right here
    FileNames(tmp_path, "7.0", token="t").put("server.0", "10.0.0.1:7")
    (tmp_path / "7.1" / "server.0").write_text((tmp_path / "7.0" / "server.0").read_text())
    (tmp_path / "7.1" / "server.1").write_text((tmp_path / "7.0" / "server.0").read_text())
    (tmp_path / "7.1" / "server.2").write_text("[1]")
    (tmp_path / "7.1" / "server.3").write_text('{"value": "x", "mac": "caf\u00e9"}')
    (tmp_path / "7.1" / "server.4").write_bytes(b"\xff\xfe")
    os.mkfifo(tmp_path / "7.1" / "server.5")  # nobody ever writes into it
    (tmp_path / "7.1" / "server.6").write_text("[" * 100_000)
    for i in range(7):
        with pytest.raises(ForgedName):
            ours.peek(f"server.{i}")


def test_an_older_attempt_sees_a_newer_one(tmp_path: Path) -> None:
    old = FileNames(tmp_path, "9.0.0", token="t")
    old.begin(2, timeout=0)
    old.check()
    new = FileNames(tmp_path, "9.1.0", token="t")
    new.begin(2, timeout=0)
    new.check()
    with pytest.raises(Superseded, match=r"9\.1\.0 is: ending at once"):
        old.check()
    with pytest.raises(Superseded):  # a node of the old attempt that starts late
        FileNames(tmp_path, "9.0.0", token="t").begin(2, timeout=0)
    FileNames(tmp_path, "10.0.0", token="t").begin(2, timeout=0)  # numbers, not texts


def test_an_attempt_waits_until_the_one_before_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = FileNames(tmp_path, "9.0", token="t")
    old.begin(2, timeout=0)
    old.put("end.0", "143")
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        old.put("end.1", "143")

    monkeypatch.setattr("megarl.launcher.names.time.sleep", sleep)
    FileNames(tmp_path, "9.1", token="t").begin(2, timeout=60)
    assert len(waits) == 1
    FileNames(tmp_path, "9.1", token="t").begin(2, timeout=60)  # its second node
    assert len(waits) == 1


def job(tmp_path: Path, nodes: int) -> Job:
    """The last node has a trainer."""
    trainer = Task(
        role=TRAINER, index=0, node=nodes - 1, gpus=None, command=("x",), env={}, ports=()
    )
    return Job(
        name="e/t", config="", directory=str(tmp_path), working_directory=str(tmp_path),
        pools=("nodes",) * nodes, gpus_per_node=(0,) * nodes, interface="",
        tasks=(trainer,), forwarded=(), hidden=(), python="",
        start_timeout=1.0, rendezvous_timeout=0.2, grace=1.0, restarts=0,
    )  # fmt: skip


def test_a_nodes_failure_ends_the_others_with_its_status(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileNames(tmp_path, "1", token="t")
    FileNames(tmp_path, "1", token="t").put("end.1", "7")
    with Signals() as signals:
        two = job(tmp_path, 2)
        assert run_node(two, 0, host="127.0.0.1", names=store, signals=signals) == 7
    assert store.peek("end.0") == "7"
    assert "node 1 ended with status 7" in caplog.text


def test_a_superseded_node_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = FileNames(tmp_path, "1.0", token="t")
    old.begin(2, timeout=0)
    FileNames(tmp_path, "1.1", token="t").begin(2, timeout=0)
    with Signals() as signals:
        two = job(tmp_path, 2)
        status = run_node(two, 0, host="127.0.0.1", names=old, signals=signals)
    assert status == NODE_FAILED and "1.1 is: ending at once" in caplog.text


def test_the_number_of_a_node() -> None:
    assert node_number({"node": "2"}, {}, 3) == 2
    options = {"node-variable": "SLURM_PROCID", "first-node": "4"}
    assert node_number(options, {"SLURM_PROCID": "1"}, 6) == 5
    for wrong, env, says in (
        ({}, {}, "--node ''"),
        (options, {}, "--node-variable SLURM_PROCID=''"),
        ({"node": "3"}, {}, r"node 3: the job has 3 node\(s\)"),
    ):
        with pytest.raises(ConfigError, match=says):
            node_number(wrong, env, 3)


def test_processes_get_the_listed_variables_and_the_schedulers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"SLURM_JOB_ID": "5", "CUDA_VISIBLE_DEVICES": "3", "SECRET": "x", "PATH": "/bin"}
    monkeypatch.setattr(os, "environ", environ)
    file = tmp_path / "environment.json"
    file.write_text(json.dumps({"PATH": "/usr/bin", "HF_HOME": "/hf"}))
    take_environment(file)
    assert environ == {
        "SLURM_JOB_ID": "5", "CUDA_VISIBLE_DEVICES": "3", "PATH": "/usr/bin", "HF_HOME": "/hf",
    }  # fmt: skip


def test_the_address_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_address("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"cluster\.interface=nope0: no IPv4 address here; .*lo"):
        node_address("nope0")
    monkeypatch.setattr("socket.gethostbyname", lambda name: "10.1.2.3")
    assert node_address() == "10.1.2.3"


def test_an_agent_needs_records_and_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MEGARL_JOB_TOKEN", raising=False)
    file = tmp_path / "job.json"
    assert node.main(["--attempt", "1", "--node", "0"]) == 2
    assert node.main(["--job", str(file), "--attempt", "1", "--node", "0"]) == 2
    file.write_text(job(tmp_path, 1).to_json())
    assert node.main(["--job", str(file), "--attempt", "1", "--node", "0"]) == 2
    said = capsys.readouterr().err
    assert "--job: required" in said and "not the records of a job" in said
    assert "MEGARL_JOB_TOKEN is not set" in said
