"""Which of a machine's GPUs go to whom."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.command_line import parse_command_line
from megarl.config.errors import ConfigError
from megarl.config.loader import checked_config
from megarl.config.recipe_engines import takes_turns
from megarl.config.recipes import GRPOConfig
from megarl.launcher import local, plan
from megarl.launcher.job import SERVER, TRAINER
from megarl.launcher.make import make_job
from megarl.launcher.placement import Placement, Servers, place_here
from megarl.launcher.plan import Plan, check_sglang, plan_here
from megarl.utils.env import visible_gpus
from tests.hf_stub import write_stub


def test_visible_gpus(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()

    def gpus(torch_version: str = "2.13.0+cu130", **env: str) -> list[str]:
        return visible_gpus(env, devices=tmp_path, torch_version=torch_version)

    assert gpus() == ["0", "1"]
    assert gpus(CUDA_VISIBLE_DEVICES="3,GPU-7") == ["3", "GPU-7"]
    assert gpus(CUDA_VISIBLE_DEVICES="") == []
    assert gpus(MEGARL_DEVICE="cpu") == []
    assert gpus("2.13.0+cpu") == []
    assert gpus("2.13.0+cpu", MEGARL_DEVICE="cuda") == ["0", "1"]  # submitted from a CPU's venv


def gpus_of(placed: Placement) -> tuple[set[str | None], list[str | None]]:
    """Those of the trainers, which all see the same, and of each server."""
    assert {seat.node for seat in placed.trainers} == {0}
    return {seat.gpus for seat in placed.trainers}, [
        seat.gpus for (seat,) in placed.servers[SERVER]
    ]


def share_out(gpus: int, *, trainers: int, servers: int, server_gpus: int) -> Placement:
    wanted = [Servers(key=SERVER, count=servers, gpus=server_gpus)]
    return place_here(gpus, trainers=trainers, servers=wanted)


def test_trainers_first_then_servers() -> None:
    placed = share_out(8, trainers=4, servers=2, server_gpus=2)
    assert gpus_of(placed) == ({"@{gpus:0,1,2,3}"}, ["@{gpus:4,5}", "@{gpus:6,7}"])
    assert len(placed.trainers) == 4 and not placed.shared


def test_too_few_gpus_are_shared() -> None:
    placed = share_out(2, trainers=2, servers=2, server_gpus=1)
    assert gpus_of(placed) == ({"@{gpus:0,1}"}, ["@{gpus:0}", "@{gpus:1}"]) and placed.shared
    placed = share_out(1, trainers=1, servers=1, server_gpus=1)
    assert gpus_of(placed) == ({"@{gpus:0}"}, ["@{gpus:0}"]) and placed.shared


def test_no_gpus() -> None:
    placed = share_out(0, trainers=2, servers=1, server_gpus=1)
    assert gpus_of(placed) == ({None}, [None]) and not placed.shared


def test_more_trainers_than_gpus_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"4 trainer processes .* 2 are visible"):
        share_out(2, trainers=4, servers=0, server_gpus=1)
    with pytest.raises(ConfigError, match=r"server\.tp\*dp=2:"):
        share_out(1, trainers=1, servers=1, server_gpus=2)


# ---- what the launcher's plan refuses before anything starts


Planner = Callable[..., Placement]
SGLANG = ("server.type=sglang", "server.count=2")
BOUNDED = "server.options.mem_fraction_static=0.3"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """The plan of a GRPO job of two trainers on a host of `gpus` GPUs."""
    model = write_stub(tmp_path / "model")

    def make(gpus: int, *args: str) -> Plan:
        monkeypatch.setattr(plan, "visible_gpus", lambda env: [*map(str, range(gpus))])
        line = [
            f"actor.path={model}", "actor.optimizer.lr=1e-5", "gconfig.n_samples=2",
            f"fileroot={tmp_path}/runs", "--nproc", "2", *args,
        ]  # fmt: skip
        return plan_here(parse_command_line(line, options=("nproc",)))

    return make


def test_gpus_that_are_asked_for_and_missing_are_refused(
    job: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGARL_DEVICE", "cuda")
    assert job(4)
    with pytest.raises(ConfigError, match="MEGARL_DEVICE=cuda"):
        job(0)


def test_an_interpreter_without_sglang_is_refused(job: Callable[..., Plan], tmp_path: Path) -> None:
    without = interpreter(tmp_path / "without", "echo No package >&2; exit 1")
    python = f"server.python={without}"
    with pytest.raises(ConfigError) as refused:
        check_sglang(job(0, *SGLANG, python))
    (problem,) = refused.value.problems
    for word in ("server.type=sglang", without, "sglang]", "server.type=embedded"):
        assert word in problem
    with pytest.raises(ConfigError, match=sys.executable):
        check_sglang(job(0, *SGLANG))
    check_sglang(job(0))  # embedded
    check_sglang(job(0, *SGLANG, python, "rollout.addresses=[a:1]"))  # servers that run elsewhere
    has = interpreter(tmp_path / "has", "echo 0.5.23")
    check_sglang(job(0, *SGLANG, f"server.python={has}"))


@pytest.mark.parametrize("switch", ("--check", "--nproc"))
def test_a_start_and_a_check_ask_for_sglang_before_the_data(
    switch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_stub(tmp_path / "model")
    line = [f"actor.path={model}", "actor.optimizer.lr=1e-5", "gconfig.n_samples=2"]
    line += [f"fileroot={tmp_path}/runs", "server.type=sglang", "train_dataset.size=8"]
    assert local.main([*line, switch, *(["1"] if switch == "--nproc" else [])]) == 2
    assert "server.type=sglang" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def planned(job: Callable[..., Plan]) -> Planner:
    """The placement of such a job."""
    return lambda gpus, *args: job(gpus, *args).placement


def test_streaming_to_servers_on_the_trainers_gpus_is_refused(planned: Planner) -> None:
    assert not planned(4, *SGLANG).shared
    for kind in ("distributed", "nccl"):
        with pytest.raises(ConfigError, match=f"weight_sync.type={kind}: .*two processes on one"):
            planned(3, *SGLANG, f"weight_sync.type={kind}")
    assert gpus_of(planned(0, *SGLANG)) == ({None}, [None, None])  # gloo


@pytest.mark.parametrize("kind", ["colocated", "disk"])
def test_sglang_beside_trainers_says_how_much_memory_it_takes(planned: Planner, kind: str) -> None:
    args = (*SGLANG, f"weight_sync.type={kind}", "server.release_memory=false")
    with pytest.raises(ConfigError, match=r"mem_fraction_static.*server\.release_memory=true"):
        planned(2, *args)
    assert planned(2, *args, BOUNDED).shared
    assert gpus_of(planned(0, *args))[0] == {None}
    assert planned(2, f"weight_sync.type={kind}").shared  # the embedded server


@pytest.mark.parametrize(
    ("gpus", "args", "taken"),
    [
        (2, ("weight_sync.type=colocated",), True),
        (2, ("weight_sync.type=disk",), True),  # too few for both
        (4, ("weight_sync.type=disk",), False),
        (0, ("weight_sync.type=colocated",), True),
        (0, (), False),
        (2, ("weight_sync.type=colocated", "rollout.max_head_offpolicyness=1", BOUNDED), False),
        (2, ("weight_sync.type=colocated", "server.release_memory=false", BOUNDED), False),
        (0, ("server.release_memory=true",), True),
    ],
    ids=str,
)
def test_servers_on_the_trainers_devices_take_turns_with_them(
    job: Callable[..., Plan], gpus: int, args: tuple[str, ...], taken: bool
) -> None:
    plan = job(gpus, *SGLANG, *args)
    assert isinstance(plan.cfg, GRPOConfig) and takes_turns(plan.cfg) == taken
    made = make_job(plan, {})
    server, trainer = made.of(SERVER)[0], made.of(TRAINER)[0]
    saver = "--enable-memory-saver" in server.command
    assert saver == (taken and gpus > 0)  # on a CPU SGLang would not start with it
    assert ("SGLANG_MEMORY_SAVER_CUDA_GRAPH" in server.env) == saver
    read = checked_config(made.config, [w for w in trainer.command if w.startswith("server.")])
    assert isinstance(read, GRPOConfig) and takes_turns(read) == taken
    assert "--checked" in trainer.command


def test_a_server_that_takes_turns_leaves_room_for_what_stays_of_the_trainers(
    job: Callable[..., Plan],
) -> None:
    user = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    turns = (*SGLANG, "weight_sync.type=colocated")
    made = make_job(job(2, *turns), user)
    server, trainer = made.of(SERVER)[0], made.of(TRAINER)[0]
    at = server.command.index("--mem-fraction-static")
    assert server.command[at + 1] == "0.8"
    assert server.env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in trainer.env  # the trainer keeps the user's
    server = make_job(job(2, *turns, BOUNDED), {}).of(SERVER)[0]
    assert [a for a in server.command if a == "0.8"] == []
    assert "PYTORCH_CUDA_ALLOC_CONF" not in server.env


@pytest.mark.parametrize(
    ("arg", "why"),
    [
        ("rollout.max_head_offpolicyness=1", "servers generate while the trainers work"),
        ("rollout.kv_after_sync=keep", "keeps KV that is released"),
    ],
)
def test_what_does_not_go_with_turns_is_refused(planned: Planner, arg: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"server.release_memory=true: .*{why}"):
        planned(2, *SGLANG, "weight_sync.type=colocated", "server.release_memory=true", arg)


def interpreter(path: Path, says: str) -> str:
    """An executable that stands in for an interpreter with a CUDA build of torch."""
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return str(path)


def test_nccl_versions_of_trainers_and_servers_are_compared(
    planned: Planner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path / "ours", "echo 2.27.5"))
    same = interpreter(tmp_path / "same", "echo a warning; echo 2.27.5")
    other = interpreter(tmp_path / "other", "echo 2.30.7")
    broken = interpreter(tmp_path / "broken", "echo No module named torch >&2; exit 1")
    assert planned(4, *SGLANG, f"server.python={same}").servers[SERVER]
    with pytest.raises(ConfigError, match=f"{other} has NCCL 2.30.7 and .*ours has NCCL 2.27.5"):
        planned(4, *SGLANG, f"server.python={other}")
    with pytest.raises(ConfigError, match=f"{broken}: cannot tell .*No module named torch"):
        planned(4, *SGLANG, f"server.python={broken}")
    # where nothing is streamed over NCCL nobody asks
    for gpus, kind in ((4, "disk"), (0, "distributed")):
        assert planned(gpus, *SGLANG, f"server.python={broken}", f"weight_sync.type={kind}")


def test_servers_get_only_what_differs(job: Callable[..., Plan]) -> None:
    """The rest they inherit; passing it on would undo what start_server itself sets."""

    def env(gpus: int, **given: str) -> dict[str, str]:
        made = make_job(job(gpus), given).of(SERVER)[0].env
        return {name: value for name, value in made.items() if name != "PYTHONPATH"}

    always = {"NCCL_CUMEM_ENABLE": "0", "GLOO_SOCKET_IFNAME": "lo"}
    assert env(0) == always
    assert env(3) == always | {"CUDA_VISIBLE_DEVICES": "@{gpus:2}"}
    given = {"MEGARL_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_CUMEM_ENABLE": "1"}
    assert env(0, **given) == {"CUDA_VISIBLE_DEVICES": ""}
