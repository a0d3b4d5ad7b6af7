"""What the Slurm launcher asks for, and what it makes of Slurm's answers.

`python -m tests.unit.test_launcher_slurm` writes the golden script anew.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.launcher import slurm
from megarl.launcher.slurm import Files, JobState, batch_script, parse_job
from megarl.utils.child import wait_until
from tests.background import ignoring_sigint
from tests.hf_stub import write_stub
from tests.unit.test_launcher_job import GOLDEN, POOLS, make

ROOT = Path(__file__).resolve().parents[2]

LINE = (
    "JobId=12 JobName=megarl-e-t UserId=me(1000) Priority=1 JobState={state} Reason={reason} "
    "Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag=2 ExitCode={code} RunTime=00:00:04 "
    "NodeList=n[1-3] BatchHost=n1"
)
PASSING = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "STAGE_OUT")


def state(name: str, reason: str = "None", code: str = "0:0", restarts: int = 0) -> JobState:
    found = parse_job(LINE.format(state=name, reason=reason, code=code, restarts=restarts))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "reason", "code", "status"),
    [
        ("COMPLETED", "None", "0:0", 0),
        ("FAILED", "NonZeroExitCode", "7:0", 7),
        ("FAILED", "JobLaunchFailure", "0:53", 181),
        ("CANCELLED", "None", "0:15", 1),
        ("TIMEOUT", "TimeLimit", "0:15", 1),
        ("NODE_FAIL", "NodeDown", "0:0", 1),
        ("PREEMPTED", "None", "0:15", 1),
        ("DEADLINE", "DeadLine", "0:1", 1),
        ("OUT_OF_MEMORY", "OutOfMemory", "0:125", 1),
        ("BOOT_FAIL", "None", "0:0", 1),
    ],
)
def test_every_end_has_a_status_and_a_sentence(
    name: str, reason: str, code: str, status: int
) -> None:
    found = state(name, reason, code)
    assert found.over and found.status == status
    assert found.sentence().startswith(name)
    assert status == 0 or "newest checkpoint" in found.sentence()


def test_a_job_that_waits_says_for_what() -> None:
    assert state("PENDING", "Resources").sentence() == "PENDING (Resources)"
    assert "(JobHeldUser)" in state("PENDING", "JobHeldUser").sentence()
    assert state("RUNNING").sentence() == "RUNNING on n[1-3]"
    assert not any(state(name).over for name in PASSING)
    assert parse_job("slurm_load_jobs error: Invalid job id specified") is None


def slurm_args(*more: str) -> list[str]:
    return [
        "cluster.sbatch_args=[--time=240,--partition=gpu,--account=us,--qos=high]",
        "cluster.server_pool.sbatch_args=[--constraint=big]", *more,
    ]  # fmt: skip


def script(tmp_path: Path, *more: str) -> str:
    job = make(tmp_path, *POOLS, *more)
    cluster = load_config(None, [a for a in (*POOLS, *more) if a.startswith("cluster.")]).cluster
    return batch_script(job, cluster, Files.of(job))


def test_nodes_of_reward_workers_are_asked_for_without_gpus(tmp_path: Path) -> None:
    pool = "cluster.reward_pool={n_nodes: 2, sbatch_args: [--partition=cpu]}"
    text = script(tmp_path, *slurm_args(), pool)
    trainers, servers, rewards = text.split("#!/bin/bash")[1].split("#SBATCH hetjob")
    assert "--gpus-per-node=1" in trainers and "--gpus-per-node=1" in servers
    asked = rewards.split("\n\n")[0]
    assert "#SBATCH --nodes=2" in asked and "--gpus-per-node" not in asked
    assert "#SBATCH --partition=cpu" in asked and "--constraint=big" not in asked
    assert "--het-group=0-2" in rewards


def test_nodes_are_whole_unless_an_argument_says_how_they_are_shared(tmp_path: Path) -> None:
    shared = script(tmp_path, "cluster.sbatch_args=[--qos=high,--mem-per-gpu=64G]")
    trainers, servers = shared.split("#SBATCH hetjob")
    assert "--exclusive" not in trainers and "#SBATCH --mem-per-gpu=64G" in trainers
    assert "#SBATCH --exclusive\n#SBATCH --mem=0" in servers


def shown(tmp_path: Path) -> str:
    text = script(tmp_path, *slurm_args()).replace(str(tmp_path), "/data")
    return text.replace(str(Path(slurm.__file__).parents[2]), "/code")


def test_the_script_is_as_in_the_golden_file(tmp_path: Path) -> None:
    assert shown(tmp_path) == (GOLDEN / "slurm.sbatch").read_text()


FAKE = """#!/bin/bash
# stands in for a command of Slurm's
echo "$(basename "$0") $*" >> calls
case "$(basename "$0")" in
  squeue) cat state ;;
  srun) n=$(( $(cat tries 2>/dev/null || echo 0) + 1 )); echo $n > tries
        [ -e tell ] && { trap 'exit 143' USR1; kill -USR1 $PPID; sleep 5 >/dev/null 2>&1 & wait; }
        exit "$(sed -n "${n}p" statuses)" ;;
  scontrol) kill -9 $PPID ;;  # the script ends with it
esac
"""


@pytest.fixture
def fakes(tmp_path: Path) -> dict[str, str]:
    """An environment in which Slurm's commands note what they are called with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("srun", "squeue", "scontrol"):
        (folder / name).write_text(FAKE)
        (folder / name).chmod(0o755)
    (tmp_path / "state").write_text("RUNNING\n")
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}


@pytest.mark.parametrize(
    ("statuses", "state", "ends", "tries"),
    [
        ([0], "RUNNING", 0, 1),
        ([7, 0], "RUNNING", 0, 2),
        ([7, 7, 9], "RUNNING", 9, 3),
        ([2], "RUNNING", 2, 1),
        ([143], "CANCELLED", 143, 1),
    ],
    ids=["done", "recovers", "fails for good", "a config error", "Slurm is ending it"],
)
def test_the_script_starts_again(
    fakes: dict[str, str],
    tmp_path: Path,
    statuses: list[int],
    state: str,
    ends: int,
    tries: int,
) -> None:
    (tmp_path / "state").write_text(state + "\n")
    (tmp_path / "statuses").write_text("".join(f"{s}\n" for s in statuses))
    text = script(tmp_path).replace("cd /work", f"cd {tmp_path}")
    (tmp_path / "runs/megarl/trial0/launch").mkdir(parents=True)
    done = subprocess.run(["bash", "-c", text], env=fakes, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == ends
    calls = (tmp_path / "calls").read_text()
    assert calls.count("srun ") == tries and "requeue" not in calls
    assert f"--attempt 12.0.{tries - 1}" in calls
    assert (tmp_path / "runs/megarl/trial0/launch/status").read_text() == f"{ends}\n"


def test_a_job_that_never_gets_to_a_checkpoint_is_not_queued_for_ever(
    fakes: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "tell").touch()
    run = tmp_path / "runs/megarl/trial0"
    (run / "launch").mkdir(parents=True)
    text = script(tmp_path).replace("cd /work", f"cd {tmp_path}")

    def attempt() -> str:
        done = subprocess.run(
            ["bash", "-c", text], env=fakes, cwd=tmp_path, timeout=60, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        return done.stdout

    again, gave_up = "queueing the job again", "3 attempts in a row ended before a checkpoint"
    assert again in attempt() and again in attempt()
    (tmp_path / "runs/megarl/trial0/recover").mkdir()
    text = text.replace("before=$(checkpoints)", "before=''")  # one is made in this attempt
    (run / "recover" / "step_000001").mkdir()
    assert again in attempt()
    text = text.replace("before=''", "before=$(checkpoints)")
    assert again in attempt() and again in attempt()
    assert gave_up in attempt() and (run / "launch" / "status").read_text() == "143\n"
    assert (tmp_path / "calls").read_text().count("scontrol requeue 12") == 5


ANSWERS = """#!/bin/bash
n=$(( $(cat asked 2>/dev/null || echo 0) + 1 )); echo $n > asked
line=$(sed -n "${n}p" answers); [ -n "$line" ] || exit 1
echo "$line"
"""


@pytest.mark.parametrize(
    ("states", "status"),
    [
        (["PENDING", "RUNNING", "COMPLETED", "COMPLETED"], 0),
        (["RUNNING", "PREEMPTED", "PENDING", "RUNNING", "COMPLETED", "COMPLETED"], 0),
        (["RUNNING", "TIMEOUT", "TIMEOUT"], 1),
        (["RUNNING"], 9),  # then Slurm has forgotten it, and the script had noted its status
    ],
)
def test_a_job_is_followed_to_its_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    states: list[str],
    status: int,
) -> None:
    (tmp_path / "scontrol").write_text(ANSWERS)
    (tmp_path / "scontrol").chmod(0o755)
    lines = [LINE.format(state=s, reason="None", code="0:0", restarts=0) for s in states]
    (tmp_path / "answers").write_text("\n".join(lines))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    files = Files(tmp_path)
    files.log("12").write_text("0: a step\n")
    files.status.write_text("9\n")
    monkeypatch.setattr(slurm, "POLL", 0.0)
    with caplog.at_level("INFO"):
        assert slurm.follow("12", files) == status
    assert capsys.readouterr().out == "0: a step\n"
    for state in states:
        assert f"job 12 is {state}" in caplog.text


def test_a_wait_for_a_job_that_a_shell_put_in_the_background_takes_sigint(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")  # reads the tokenizer; missing in make stranger-313
    line = LINE.format(state="RUNNING", reason="None", code="0:0", restarts=0)
    for name, body in (("sbatch", "echo 12"), ("scontrol", f"touch asked; echo '{line}'")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable, "-m", "megarl.launcher.slurm", "--nproc", "1", "fileroot=runs",
        f"actor.path={write_stub(tmp_path / 'model')}", "actor.optimizer.lr=1e-5",
        "gconfig.n_samples=2",
    ]  # fmt: skip
    with ignoring_sigint():
        waits = subprocess.Popen(command, cwd=tmp_path, env=env)
    try:
        assert wait_until((tmp_path / "asked").exists, timeout=120)
        waits.send_signal(signal.SIGINT)
        assert waits.wait(60) == 128 + signal.SIGINT
    finally:
        waits.kill()


def test_slurm_that_is_not_there_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no such command; start on a machine with Slurm"):
        slurm.job_state("12")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (GOLDEN / "slurm.sbatch").write_text(shown(Path(folder)))
