"""Paths that a container has elsewhere than the machine that launches it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.command_line import parse_command_line
from megarl.config.earlier_run import MARKER, RECOVER_DIR
from megarl.config.errors import ConfigError
from megarl.config.loader import run_dir, save_config
from megarl.launcher import plan
from megarl.launcher.plan import Plan, plan_here
from megarl.trainer.preflight import check_contents
from megarl.utils.files import seal
from tests.hf_stub import write_stub


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """The plan of a GRPO job of two trainers on a host without a GPU."""
    model = write_stub(tmp_path / "model")
    monkeypatch.setattr(plan, "visible_gpus", lambda env: [])

    def make(*args: str) -> Plan:
        line = [
            f"actor.path={model}", "actor.optimizer.lr=1e-5", "gconfig.n_samples=2",
            f"fileroot={tmp_path}/runs", "--nproc", "2", *args,
        ]  # fmt: skip
        return plan_here(parse_command_line(line, options=("nproc",)))

    return make


def test_paths_of_a_container_are_looked_for_where_this_machine_has_them(
    job: Callable[..., Plan], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(8 * (json.dumps({"messages": "1+1", "answer": "2"}) + "\n"))
    inside = ("cluster.container=image", f"cluster.container_mounts=['{tmp_path}:/there']")
    chat = ("train_dataset.type=chat", "train_dataset.reward=exact")
    data = (*chat, "train_dataset.path=/there/rows.jsonl")
    mapped = job(*inside, "actor.path=/there/model", *data)
    assert mapped.cfg.actor.path == "/there/model"  # the processes get the container's
    check_contents(mapped.cfg, launcher=True)
    listed = ("train_dataset.type=chat", "train_dataset.files=[/there/rows.jsonl]")
    more = job(*inside, "actor.path=/there/model", *listed, "train_dataset.reward=exact")
    check_contents(more.cfg, launcher=True)
    # what this machine has a mount of is checked; what only the image has is not
    with pytest.raises(ConfigError, match="none"):
        job(*inside, "actor.path=/there/none")
    assert job(*inside, "actor.path=/image/model", "actor.optimizer.lr=1e-5").nproc == 2
    with pytest.raises(ConfigError, match="/image/model"):
        job("actor.path=/image/model")
    with pytest.raises(ConfigError, match="n_samples"):  # others stay errors
        job(*inside, "actor.path=/image/model", "gconfig.n_samples=0")
    # data that only the image has
    hidden = job(*inside, "actor.path=/there/model", *chat, "train_dataset.path=/image/rows.jsonl")
    check_contents(hidden.cfg, launcher=True)


def test_of_mounts_within_each_other_the_innermost_has_a_path(
    job: Callable[..., Plan], tmp_path: Path
) -> None:
    (tmp_path / "scratch").mkdir()
    outer, inner = f"{tmp_path}/scratch:/data", f"{tmp_path}/model:/data/m/:ro"
    for mounts in (f"[{outer},'{inner}']", f"['{inner}',{outer}]"):
        mounted = ("cluster.container=image", f"cluster.container_mounts={mounts}")
        for path in ("/data/m", "/data/x/../m/"):
            assert job(*mounted, f"actor.path={path}").cfg.actor.path == path
        with pytest.raises(ConfigError, match=r"actor\.path"):
            job(*mounted, "actor.path=/data/m/../none")
    gone = f"[{outer},/not/here:/data/m]"  # which other nodes may have
    assert job("cluster.container=image", f"cluster.container_mounts={gone}", "actor.path=/data/m")


def test_only_names_of_files_hide_a_problem(job: Callable[..., Plan]) -> None:
    image = ("cluster.container=image", "actor.path=/image/model")
    for text in ("/", "/actor"):
        with pytest.raises(ConfigError, match=r"saver\.metric"):
            job(*image, f"+rollout.workflow.options.sep={text}", *WRONG_METRIC)
    with pytest.raises(ConfigError, match=r"saver\.metric=/image"):
        job(*image, "saver.metric=/image/modelling", *WRONG_METRIC[1:])
    assert job(*image).nproc == 2


WRONG_METRIC = ("saver.metric=no/thing", "saver.keep_best=1", "saver.keep_last=1")


def test_a_run_in_a_container_is_continued(job: Callable[..., Plan], tmp_path: Path) -> None:
    mounts = f"cluster.container_mounts=['{tmp_path}:/there']"
    inside = ("cluster.container=image", mounts, "actor.path=/there/model", "recover.mode=auto")
    cfg = job(*inside).cfg
    save_config(cfg, run_dir(cfg) / "config.yaml")  # as the processes inside do
    checkpoint = run_dir(cfg) / RECOVER_DIR / "step_000004"
    checkpoint.mkdir(parents=True)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (checkpoint / MARKER).write_text(json.dumps(seal({"models": {"actor": config}, "version": 4})))
    assert job(*inside).nproc == 2
    (tmp_path / "other").symlink_to(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"actor\.path=/there/other: it was /there/model"):
        job(*inside, "actor.path=/there/other")


def test_runs_have_one_name_inside_and_outside(job: Callable[..., Plan], tmp_path: Path) -> None:
    inside = ("cluster.container=image", "fileroot=/there/runs")
    with pytest.raises(ConfigError, match=r"^fileroot=/there/runs: .*same name"):
        job(*inside, f"cluster.container_mounts=['{tmp_path}:/there']")
    same = f"cluster.container_mounts=['{tmp_path}:{tmp_path}']"
    assert job("cluster.container=image", same).nproc == 2
