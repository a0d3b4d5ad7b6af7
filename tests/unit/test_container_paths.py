"""Paths that a container has elsewhere than the machine that launches it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.command_line import parse_command_line
from megarl.config.errors import ConfigError
from megarl.launcher import plan
from megarl.launcher.plan import Plan, plan_here
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
    plan.check_named(mapped, writes=False)
    listed = ("train_dataset.type=chat", "train_dataset.files=[/there/rows.jsonl]")
    plan.check_named(
        job(*inside, "actor.path=/there/model", *listed, "train_dataset.reward=exact"),
        writes=False,
    )
    # what this machine has a mount of is checked; what only the image has is not
    with pytest.raises(ConfigError, match="none"):
        job(*inside, "actor.path=/there/none")
    assert job(*inside, "actor.path=/image/model", "actor.optimizer.lr=1e-5").nproc == 2
    with pytest.raises(ConfigError, match="/image/model"):
        job("actor.path=/image/model")
    with pytest.raises(ConfigError, match="n_samples"):  # others stay errors
        job(*inside, "actor.path=/image/model", "gconfig.n_samples=0")
    # data that only the image has
    plan.check_named(
        job(*inside, "actor.path=/there/model", *chat, "train_dataset.path=/image/rows.jsonl"),
        writes=False,
    )
