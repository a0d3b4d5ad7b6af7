"""Runs everything on a Slurm cluster: submits one batch job and follows it to its end.

    python -m megarl.launcher.slurm [script.py] --config X.yaml [--nproc N] [key=value ...]

    --check           check the configuration, models, data and code it names, then stop
    --dry-run         print the nodes, the processes with their commands, variables, ports and logs,
                      and the batch script, then stop; --format json has every process in full
    --detach          submit, print the job's number, and do not follow it
    --container IMAGE short for cluster.container=IMAGE

allocation_mode and `cluster` say what the job needs, `cluster.slurm` how Slurm is asked for it. The
working directory and fileroot are on storage that this machine and the nodes share. On every node
one agent (megarl.launcher.node) starts, watches and ends the node's processes. Rank 0 and the
agents write to <run>/launch/slurm-<job>.log, which is shown here, other ranks to
<run>/logs/trainer_<rank>.log.

cluster.slurm.save_before seconds before the time limit, and on SIGTERM to its script, the job saves
a checkpoint and queues again; so it does when it is preempted or a node is lost. A process that
fails ends all, and recover.restarts has the job started again on the same nodes. Ctrl-C ends the
following, not the job; `scancel` ends the job with a checkpoint, if it has the time. The exit
status is that of the trainers, 2 for a configuration error, 1 where Slurm ended the job.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.command_line import CommandLine
from megarl.config.errors import ConfigError
from megarl.launcher.command import Launcher, run_launcher
from megarl.launcher.job import Job
from megarl.launcher.plan import Plan, plan_cluster
from megarl.launcher.slurm_script import Files, batch_script
from megarl.observability.logging import get_logger
from megarl.utils.child import LogTail
from megarl.utils.job_token import ensure_job_token

log = get_logger("launcher")

FAILED = 1  # exit status of a job that Slurm ended
COMMAND_TIMEOUT = 60.0  # seconds one command of Slurm may take
POLL = 2.0  # seconds between looks at the state of a job
SILENCE = 600.0  # seconds without an answer of Slurm's after which the job is not followed further
# states that a job does not leave by itself
_TERMINAL = """
COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL PREEMPTED OUT_OF_MEMORY BOOT_FAIL DEADLINE REVOKED
LAUNCH_FAILED RECONFIG_FAIL
"""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """Holds what Slurm says of a job. exit_code and signal are those of its batch script; nodes is
    empty before it has some."""

    state: str
    reason: str = ""
    exit_code: int = 0
    signal: int = 0
    nodes: str = ""

    @property
    def over(self) -> bool:
        """Returns whether the job has ended for good."""
        return self.state in _TERMINAL.split()

    @property
    def status(self) -> int:
        """Returns the exit status of a job that is over, as a shell gives it."""
        if self.state == "COMPLETED":
            return self.exit_code
        failed = self.exit_code or (128 + self.signal if self.signal else FAILED)
        return failed if self.state == "FAILED" else FAILED

    def sentence(self) -> str:
        """Says where the job stands, in Slurm's words, and of one that failed how to go on."""
        if self.state == "RUNNING":
            return f"RUNNING on {self.nodes}"
        reason = f" ({self.reason})" if self.reason else ""
        failed = self.over and self.status
        more = "; start the same command again, to continue from the newest checkpoint"
        return f"{self.state}{reason}{more if failed else ''}"


def parse_job(text: str) -> JobState | None:
    """Reads a line of `scontrol -o show job`, the first one of a heterogeneous job's; None for
    another text."""
    pairs = re.findall(r"(?:^| )([A-Za-z]+)=(\S*)", text.strip().partition("\n")[0])
    fields = dict(reversed(pairs))  # of a name that comes twice the first holds
    if "JobState" not in fields:
        return None
    code, _, number = fields.get("ExitCode", "").partition(":")
    reason, nodes = fields.get("Reason", ""), fields.get("NodeList", "")
    return JobState(
        state=fields["JobState"],
        reason="" if reason == "None" else reason,
        exit_code=int(code or 0),
        signal=int(number or 0),
        nodes="" if nodes == "(null)" else nodes,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher with the command line `argv` (None: this process's); returns the exit
    status."""
    slurm = Launcher(
        help=__doc__ or "",
        plan=_plan,
        start=_start,
        asks=_script,
        options=("container",),
        switches=("detach",),
    )
    return run_launcher(slurm, argv)


def _plan(command: CommandLine) -> Plan:
    if "container" in command.options:
        command.overrides.append(f"cluster.container={command.options['container']}")
    return plan_cluster(command)


def _script(plan: Plan, job: Job) -> str:
    files = Files.of(job)
    return f"{files.script}:\n{batch_script(job, plan.cfg.cluster, files)}"


def _start(plan: Plan, job: Job, command: CommandLine) -> int:
    job_id, files = submit(plan, job)
    if "detach" in command.switches:
        print(job_id)
        return 0
    return follow(job_id, files)


def submit(plan: Plan, job: Job) -> tuple[str, Files]:
    """Writes the job's files and submits it; returns its number. Raises ConfigError where Slurm
    refuses it, or a job of this run is there already."""
    files = Files.of(job)
    earlier = files.id.read_text(encoding="utf-8").strip() if files.id.exists() else ""
    state = job_state(earlier) if earlier else None
    if state is not None and not state.over:
        raise ConfigError(
            [
                f"job {earlier} of this run is {state.state}: scancel {earlier}, or choose another "
                "trial_name"
            ]
        )
    ensure_job_token()
    files.write_records(job, os.environ)
    for old in (files.status, files.idle):
        old.unlink(missing_ok=True)
    files.script.write_text(batch_script(job, plan.cfg.cluster, files), encoding="utf-8")
    done = _slurm("sbatch", "--parsable", str(files.script))
    if done.returncode:
        raise ConfigError([f"sbatch refuses the job: {done.stderr.strip()}; see {files.script}"])
    job_id = done.stdout.strip().split(";")[0]
    files.id.write_text(job_id, encoding="utf-8")
    log.info("job %s: %s, log %s", job_id, job.name, files.log(job_id))
    return job_id, files


def follow(job_id: str, files: Files) -> int:
    """Shows the job's states and log until it is over; returns the exit status."""
    before, heard, tail = None, time.monotonic(), LogTail(files.log(job_id))
    try:
        while True:
            state = job_state(job_id)
            tail.show(rest=state is None or state.over)
            if state is not None:
                heard = time.monotonic()
                if state != before:
                    level = logging.ERROR if state.over and state.status else logging.INFO
                    log.log(level, "job %s is %s", job_id, state.sentence())
                elif state.over:  # at two looks: one that is queued again is so for a moment
                    return state.status
                before = state
            elif files.status.exists():  # Slurm has forgotten it
                return int(files.status.read_text(encoding="utf-8"))
            elif time.monotonic() - heard > SILENCE:
                log.error("job %s: Slurm says nothing about it for %g s", job_id, SILENCE)
                return FAILED
            time.sleep(POLL)
    except KeyboardInterrupt:
        log.warning("job %s goes on; `scancel %s` ends it", job_id, job_id)
        raise


def job_state(job_id: str) -> JobState | None:
    """Returns what Slurm says of a job, None where it does not know it or gives no answer."""
    done = _slurm("scontrol", "-o", "show", "job", job_id)
    return None if done.returncode else parse_job(done.stdout)


def _slurm(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of Slurm's. Raises ConfigError where it is not installed."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT,
            check=False,
        )
    except FileNotFoundError as e:
        raise ConfigError([f"{command[0]}: no such command; start on a machine with Slurm"]) from e
    except subprocess.TimeoutExpired:
        why = f"{command[0]}: no answer within {COMMAND_TIMEOUT:g} s"
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=why)


if __name__ == "__main__":
    sys.exit(main())
