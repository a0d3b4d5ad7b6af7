"""Runs workers, or a recipe under a controller, by a scheduler, and checks what came of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.embedded_server import address, embedded_server
from tests.leftovers import Mark
from tests.system.cluster_run import ClusterRun, check_same, disturbed
from tests.system.test_recover import ROOT, SCRIPT

END = 40.0  # seconds


def run(line: Sequence[str], env: Mapping[str, str], folder: Path, *more: str) -> tuple[int, str]:
    """The status and the output of a run by the scheduler line[0], started by what follows it.
    Nothing of it is left then."""
    scheduler, *before = line
    script = [sys.executable, "-m", "tests.system.workers_run", scheduler, str(folder), *more]
    mark = Mark()
    own = {"MEGARL_JOB_TOKEN": "the-tests-secret"}
    try:
        done = subprocess.run(
            [*before, *script], cwd=ROOT, env={**env, **mark.env, **own}, timeout=200, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        mark.assert_none_left(within=END)
    finally:
        mark.kill()
    return done.returncode, done.stdout


def check_workers(line: Sequence[str], env: Mapping[str, str], folder: Path, *, node: str) -> None:
    """Workers know their places, are called, are named when one dies, and end with it. `node`: the
    variable that names theirs."""
    status, output = run(line, env, folder)
    assert status == 0, output
    found = json.loads(output.splitlines()[-1])
    for index, (own, count, options, variables) in enumerate(found["places"]):
        assert (own, count, options) == (index, 3, {"a": [1]})
        assert variables.pop(node)
        assert variables == {"RANK": str(index), "WORLD_SIZE": "3", "MINE": "yes"}
    assert found["same"] == 1 and found["loopback"]
    assert "ended with status 137 (SIGKILL" in found["died"], found
    assert "worker group/1 (" in found["died"] and "its last words" in found["died"]
    assert "worker group/2 (" in found["others"] and "memory" in found["large"].lower(), found
    assert found["ended"] == [["group/0", 137], ["group/1", 137], ["group/2", 137]]
    assert not (folder / "group/launch/environment.json").stat().st_mode & 0o077


def check_abandoned(line: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
    """Workers end with a controller that is killed, and so does what they started."""
    _, output = run(line, env, folder, "leave")  # salloc's status says nothing
    assert output == "three workers have a child each\n"


def kill_trainer(run: ClusterRun) -> str:
    """A command that kills trainer 1 of a run under a controller, as one on its node would."""
    read = f"import json; print(json.load(open('{run.dir}/processes/rank_2.json'))['pid'])"
    said = f"echo its last words >> {run.dir}/logs/trainers_1.log"
    return f'{said}; kill -9 $({sys.executable} -c "{read}")'


def check_recipe(
    line: Sequence[str], env: Mapping[str, str], run: ClusterRun, local: ClusterRun
) -> None:
    """A trainer of a recipe's that is killed is named with its node and its log; started again, the
    run is to the bit that of the local launcher."""
    scheduler, *before = line
    model = next(word for word in run.command if word.startswith("actor.path="))
    flags = ("--context-length", "64", "--dtype", "float32", "--deterministic")
    log = run.root / "server.log"
    with embedded_server(Path(model.partition("=")[2]), *flags, log=log) as server:
        command = [
            *(*before, sys.executable, str(SCRIPT), *run.command, f"fileroot={run.root}"),
            *("trainer.mode=controller", f"trainer.scheduler={scheduler}", "trainer.workers=2"),
            *("cluster.interface=lo", f"rollout.addresses=[{address(server)}]"),
        ]
        status, output = run.finished(
            command, dict(env) | disturbed(run.root, "checkpoint:2", kill_trainer(run))
        )
        assert status == 1, output
        named = r"worker trainers/1 \(\S+, \d+\) ended with status 137(?s:.*)its last words"
        assert re.search(named, output), output
        status, output = run.finished(command, dict(env))
        assert status == 0 and "from step 2 of 5" in output, output
    check_same(run, local)
