"""run.py after the configuration is sound: which loop runs, in which environment."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from megarl.config.errors import ConfigError
from megarl.config.recipes import BaseConfig, GRPOConfig, SFTConfig
from megarl.run import main
from megarl.trainer import loop
from megarl.trainer.offline import SFTTrainer
from megarl.trainer.rl import RLTrainer
from megarl.utils.env import has_interface
from tests.hf_stub import write_stub

LO = {"GLOO_SOCKET_IFNAME": "lo"} if has_interface("lo") else {}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, BaseConfig]]:
    """(trainer, config) of every run that was begun; nothing is trained."""
    calls: list[tuple[Any, BaseConfig]] = []
    monkeypatch.setattr(loop, "run", lambda cfg, trainer: calls.append((trainer, cfg)))
    for name in ("MEGARL_LLM_SERVER_ADDRS", "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return calls


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Stands in for os.environ."""
    env: dict[str, str] = {}
    monkeypatch.setattr("os.environ", env)
    return env


def test_sft(ran: list, environ: dict[str, str], tmp_path: Path) -> None:
    model = write_stub(tmp_path / "m")
    assert main(["recipe=sft", f"model.path={model}", "model.optimizer.lr=1"]) == 0
    ((trainer, cfg),) = ran
    assert trainer is SFTTrainer and isinstance(cfg, SFTConfig) and cfg.model.path == str(model)
    assert environ["TOKENIZERS_PARALLELISM"] == "false"


def test_a_full_disk_anywhere_in_a_run_is_one_line(
    ran: list,
    environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(cfg: BaseConfig, trainer: object) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as e:
            raise RuntimeError("rank 0 failed in evaluate") from e

    monkeypatch.setattr(loop, "run", run)
    model = write_stub(tmp_path / "m")
    args = ["recipe=sft", f"model.path={model}", "model.optimizer.lr=1", f"fileroot={tmp_path}"]
    assert main(args) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"the run in {tmp_path}") and "No space left on device" in line


def test_a_configuration_that_only_the_run_finds_wrong_is_one_line(
    ran: list,
    environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As by a controller that is in no allocation of Slurm. Of several ranks each says it."""

    def run(cfg: BaseConfig, trainer: object) -> None:
        raise ConfigError(["SLURM_JOB_ID is not set"])

    monkeypatch.setattr(loop, "run", run)
    model = write_stub(tmp_path / "m")
    line = ["recipe=sft", f"model.path={model}", "model.optimizer.lr=1", f"fileroot={tmp_path}"]
    assert main(line) == 2
    assert capsys.readouterr().err == "config error: SLURM_JOB_ID is not set\n"
    environ["WORLD_SIZE"] = "2"
    with pytest.raises(ConfigError):
        main(line)


def test_grpo_needs_servers(
    ran: list, environ: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [f"actor.path={write_stub(tmp_path / 'm')}", "actor.optimizer.lr=1"]
    args += ["gconfig.n_samples=2", "--recipe", "grpo"]
    assert main(args) == 2 and not ran
    assert "no generation server" in capsys.readouterr().err
    assert main([*args, "rollout.addresses=[10.0.0.1:1]"]) == 0
    assert "GLOO_SOCKET_IFNAME" not in environ  # that server is on another host
    environ["MEGARL_LLM_SERVER_ADDRS"] = "127.0.0.1:1, 127.0.0.1:2"
    assert main(args) == 0
    assert LO.items() <= environ.items()
    assert [trainer for trainer, _ in ran] == [RLTrainer, RLTrainer] and isinstance(
        ran[1][1], GRPOConfig
    )


class OwnTrainer:
    def __init__(self, cfg: BaseConfig, ctx: Any, *, patience: int) -> None: ...

    def fit(self) -> None: ...


def test_a_trainer_of_ones_own(ran: list, environ: dict[str, str], tmp_path: Path) -> None:
    args = ["recipe=sft", f"model.path={write_stub(tmp_path / 'm')}", "model.optimizer.lr=1"]
    args += [f"trainer={__name__}:OwnTrainer"]
    assert main(args) == 2 and not ran  # it needs options.patience
    assert main([*args, "trainer.options.patience=2"]) == 0
    assert ran[0][0] is OwnTrainer


def test_check_runs_nothing(ran: list, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By itself it is for the fewest processes that fit; torchrun's number is checked against."""
    model = write_stub(tmp_path / "m")
    args = ["--check", "recipe=sft", f"model.path={model}", "model.optimizer.lr=1"]
    args += [f"fileroot={tmp_path / 'runs'}"]
    assert main([*args, "model.parallel.tp=2"]) == 0 and not ran
    said = "the configuration is sound, for 2 trainer process(es)\n"
    assert capsys.readouterr().out == said
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "1")
        assert main([*args, "model.parallel.tp=2"]) == 2
    assert "world size 1" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_controller_is_one_process(
    ran: list, environ: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [f"actor.path={write_stub(tmp_path / 'm')}", "actor.optimizer.lr=1", "--check"]
    args += ["gconfig.n_samples=2", "trainer.mode=controller", "actor.parallel.tp=2"]
    environ["WORLD_SIZE"] = "1"
    assert main(args) == 0
    assert "for 2 trainer process(es) under one controller" in capsys.readouterr().out
    assert main([*args, "trainer.workers=3"]) == 2
    assert "world size 3" in capsys.readouterr().err
    environ["WORLD_SIZE"] = "2"
    assert main(args) == 2 and not ran
    assert "trainer.mode=controller under torchrun" in capsys.readouterr().err


def test_check_of_rl_needs_no_server(ran: list, tmp_path: Path) -> None:
    """Which the launcher would start."""
    args = [f"actor.path={write_stub(tmp_path / 'm')}", "actor.optimizer.lr=1"]
    assert main([*args, "gconfig.n_samples=2", "--check"]) == 0 and not ran
