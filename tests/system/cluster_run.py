"""A GRPO run of two nodes of trainers and one of a server, by whichever launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.leftovers import Mark
from tests.system.test_recover import COMMON, GRPO, ROOT, SCRIPT, STEPS, Run

COMMAND = (*GRPO, *COMMON, "allocation_mode=embedded.d1+megatron.d1t2")
ON_NODES = [
    "cluster.n_nodes=3", "cluster.n_gpus_per_node=1", "cluster.interface=lo",
    "cluster.forward_env=[KILL*,INSTEAD]", "recover.grace=120",
]  # fmt: skip


class ClusterRun(Run):
    """A run directory that any launcher fills."""

    def line(self, launcher: str, *more: str) -> list[str]:
        return [
            sys.executable, "-m", f"megarl.launcher.{launcher}", str(SCRIPT), *self.command,
            f"fileroot={self.root}", *more,
        ]  # fmt: skip

    def launch(self, launcher: str, env: dict[str, str], *more: str) -> tuple[int, str]:
        """Runs to the end; returns the status and the output. Nothing of it may be left then."""
        return self.finished(self.line(launcher, *more), env)

    def finished(self, command: list[str], env: dict[str, str]) -> tuple[int, str]:
        """The process id of the command is in the file `pid` while it runs."""
        mark = Mark()
        try:
            with subprocess.Popen(
                command, cwd=ROOT, env=env | mark.env, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            ) as process:  # fmt: skip
                (self.root / "pid").write_text(str(process.pid))
                try:
                    output, _ = process.communicate(timeout=400)
                finally:
                    process.kill()
            mark.assert_none_left(within=30.0)
        finally:
            mark.kill()
        return process.returncode, output

    def attempts(self) -> list[str]:
        return sorted(p.name for p in (self.dir / "names").iterdir() if p.is_dir())


def check_same(run: ClusterRun, other: ClusterRun) -> None:
    """Bitwise the same weights and figures."""
    ours, theirs = run.weights(), other.weights()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert [r["step"] for r in run.rows()] == list(range(STEPS + 1))
    for mine, expected in zip(run.figures(), other.figures(), strict=True):
        assert mine == expected


def disturbed(root: Path, when: str, instead: str = "") -> dict[str, str]:
    """The variables that have tests/system/recover_run.py kill itself, or run `instead`."""
    env = {"KILL": when, "KILLED": str(root / "killed")}
    return env | ({"INSTEAD": instead} if instead else {})


def local_run(root: Path, command: tuple[str, ...]) -> ClusterRun:
    """The same run by the local launcher, undisturbed."""
    run = ClusterRun(root, command)
    status, output = run.launch("local", dict(os.environ))
    assert status == 0, output
    return run
