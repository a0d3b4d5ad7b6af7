"""What `megarl doctor` finds, on a sound recipe and on each kind of broken one."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cli import main as megarl
from megarl.cli.doctor import (
    FAIL,
    OK,
    TESTED,
    WARN,
    Finding,
    Host,
    Place,
    environment,
    gather,
    merged,
    tell,
    this_place,
)
from megarl.cli.rehearse.small import OVERLAY, shrink_model, write_model
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.planning.job import find_shapes
from tests.dist.world import free_port

ROOT = Path(__file__).resolve().parents[2]
VOCAB = OVERLAY["model"]["vocab_size"]
CONFIG = str(ROOT / "configs" / "quickstart_grpo.yaml")
LLAMA = str(ROOT / "configs" / "llama3_70b_grpo.yaml")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = find_shapes("qwen3-1.7b", ROOT / "configs" / "models")
    path = tmp_path_factory.mktemp("doctor") / "model"
    small = shrink_model(raw, layers=2)
    write_model(small, path, head="lm", seed=1)
    return path


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = megarl(["doctor", *words])
    return status, capsys.readouterr().out


def line(said: str, name: str) -> str:
    return next(x for x in said.splitlines() if re.match(rf"(OK|WARN|FAIL) +{re.escape(name)}", x))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    for name in [n for n in os.environ if n.startswith(("NCCL_", "SLURM_", "WANDB_", "MASTER_"))]:
        monkeypatch.delenv(name)


def test_a_sound_recipe(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = doctor(capsys, CONFIG, f"actor.path={model}", f"fileroot={tmp_path}")
    assert status == 0 and "0 FAIL" in said, said
    assert "fix:" not in said and " WARN" not in said.replace("0 WARN", ""), said
    for name in (
        "recipe",
        "tokenizer",
        "torch",
        "file root",
        "disk space",
        "disk speed",
        "shared storage",
    ):
        assert line(said, name).startswith("OK"), said
    assert not list(tmp_path.iterdir())  # nothing is left


def test_each_break_is_found(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # without ~/.netrc
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        dead = f"127.0.0.1:{free_port()}"
        status, said = doctor(
            capsys,
            CONFIG,
            f"actor.path={model}",
            f"fileroot={tmp_path}",
            "actor.eps_clip=2",
            "stats_logger.wandb.mode=online",
            f"rollout.addresses=[{dead}]",
        )
    assert status == 1
    for name, words in (
        ("recipe", "actor.eps_clip=2"),
        ("W&B", "there is no key"),
        ("master port", "in use"),
        (f"server {dead}", "/health"),
    ):
        assert line(said, name).startswith("FAIL") and words in line(said, name), said
    assert line(said, "NCCL").startswith("WARN") and "fix: unset NCCL_IB_DISABLE" in said


def test_a_file_root_and_a_tokenizer_that_do_not_do(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "model"
    small.mkdir()
    for file in model.iterdir():
        (small / file.name).write_bytes(file.read_bytes())
    (small / "added_tokens.json").write_text(f'{{"<more>": {VOCAB}}}')
    (tmp_path / "file").write_text("")
    status, said = doctor(
        capsys, CONFIG, f"actor.path={small}", f"fileroot={tmp_path / 'file' / 'runs'}"
    )
    assert status == 1 and line(said, "file root").startswith("FAIL")
    found = line(said, "recipe")
    assert found.startswith("FAIL") and f"'<more>' with id {VOCAB}" in found


def test_what_only_the_cluster_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe of a model that is not here, far too large for this disk."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    config = str(ROOT / "configs" / "deepseek_v3_grpo.yaml")
    status, said = doctor(capsys, config, f"fileroot={tmp_path}")
    assert status == 1 and line(said, "recipe").startswith("WARN")
    assert line(said, "GPUs").startswith("WARN")
    assert "no such directory" in line(said, "recipe")
    assert "33,55" in line(said, "disk space"), said  # GB: 50 bytes of 671 billion parameters


def test_environment_of_a_host_with_gpus() -> None:
    cfg = load_config(LLAMA)
    env = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_SOCKET_IFNAME": "nonesuch0",
        "NCCL_CUMEM_ENABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    }
    host = Host(cfg=cfg, env=env, gpus=8, cards=ROOT / "configs" / "models")
    found = list(environment(host))
    assert [f.status for f in found] == [WARN] * 4
    for words, f in zip(("hides some", "CUMEM", "nonesuch0", "CONNECTIONS=8"), found):
        assert words in f.text and f.fix
    found = list(environment(replace(host, env={"NCCL_DEBUG": "INFO"})))
    assert [f.status for f in found] == [OK, OK] and "NCCL_DEBUG=INFO" in found[1].text


def test_tested_versions_are_those_of_ci() -> None:
    pins: dict[str, set[str]] = {}
    for file in (ROOT / "constraints").glob("*.txt"):
        for name, pin in re.findall(r"^([\w.-]+)==([\w.]+)(?: ;.*)?$", file.read_text(), re.M):
            pins.setdefault(name.lower().replace("_", "-"), set()).add(pin)
    pins["torch"].add(re.findall(r"torch==([\d.]+)", (ROOT / "Makefile").read_text())[0])
    for name, (low, high) in TESTED.items():
        assert pins[name] == {low, high}, name


def test_findings_of_several_hosts() -> None:
    same, other = Finding(OK, "torch", "2.13"), Finding(WARN, "torch", "2.14", "take 2.13")
    disk = Finding(FAIL, "disk", "full", "make room")
    found = merged([("a", [same, disk]), ("b", [other, disk]), ("c", [same, disk])])
    assert [(f.status, f.text) for f in found] == [
        (OK, "a, c: 2.13"),
        (WARN, "b: 2.14"),
        (FAIL, "full"),
    ]


TORCHRUN = {
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1977",  # an ordinary user may listen at ports from 1024 on
}


def test_which_host_this_is() -> None:
    assert this_place({}) is None and this_place({"SLURM_STEP_NUM_TASKS": "1"}) is None
    slurm = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "3",
    }
    assert this_place(slurm) == Place(job="7-3", node=1, hosts=2, speaks=True)
    there = this_place(TORCHRUN | {"LOCAL_RANK": "3"})
    assert there == Place(job="127.0.0.1-1977", node=1, hosts=2, speaks=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        this_place({"WORLD_SIZE": "2", "RANK": "0"})


@pytest.mark.parametrize("shared", (True, False))
def test_two_hosts(shared: bool, model: Path, tmp_path: Path) -> None:
    """Two processes as two hosts have them; without shared storage each has a file root of its
    own at another place."""
    started = []
    for node in range(2):
        root = tmp_path / ("root" if shared else f"root{node}")
        env = os.environ | TORCHRUN | {"GROUP_RANK": str(node)}
        command = [sys.executable, "-m", "megarl.cli", "doctor", CONFIG]
        command += ["--wait", "60" if shared else "1"]
        command += [f"actor.path={model}", f"fileroot={root}"]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [p.returncode for p in started] == [0 if shared else 1, 0], said
    assert not said[1]  # one of them speaks
    found = line(said[0], "shared storage")
    assert found.startswith("OK" if shared else "FAIL"), said[0]
    assert ("2 hosts wrote their findings" in found) == shared
    assert ("got no findings of host 1 within 1 s" in found) != shared
    if shared:
        assert not list(tmp_path.rglob(".megarl_doctor_*"))


def test_an_earlier_doctors_findings_are_not_taken(tmp_path: Path) -> None:
    first, second = (Place(job="j", node=node, hosts=2, speaks=True) for node in range(2))
    tell(second, tmp_path, [Finding(OK, "torch", "old")])
    (left,) = tmp_path.rglob("1.json")
    os.utime(left, (0, 0))
    tell(first, tmp_path, [])
    (_, [lost]) = gather(first, tmp_path, 0.0)[0]
    assert lost.status == FAIL and "no findings of host 1 within 0 s" in lost.text
    tell(second, tmp_path, [Finding(OK, "torch", "new")])
    tell(first, tmp_path, [])
    findings = [f.text for _, found in gather(first, tmp_path, 0.0) for f in found]
    assert findings == [f"{tmp_path}: 2 hosts wrote their findings", "new"]
    assert not list(tmp_path.iterdir())
