"""Runs everything on a Slurm cluster: submits one batch job and follows it to its end.

    python -m megarl.launcher.slurm [script.py] --config X.yaml [--nproc N] [key=value ...]

    --check           check the configuration, models, data and code it names, then stop
    --dry-run         print the nodes, the processes with their commands, variables, ports and logs,
                      and the batch script, then stop; --format json has every process in full
    --detach          submit, print the job's number, and do not follow it
    --container IMAGE short for cluster.container=IMAGE

allocation_mode and `cluster` say what the job needs, `cluster.sbatch_args` how Slurm is asked for
it. The working directory and fileroot are on storage that this machine and the nodes share. On
every node one agent (megarl.launcher.node) starts, watches and ends the node's processes. Rank 0
and the agents write to <run>/launch/slurm-<job>.log, which is shown here, other ranks to
<run>/logs/trainer_<rank>.log.

300 seconds before the time limit (--signal), and on SIGTERM to its script, the job saves a
checkpoint and queues again; so it does when it is preempted or a node is lost. A process that fails
ends all, and recover.restarts has the job started again on the same nodes. Ctrl-C ends the
following, not the job; `scancel` ends the job with a checkpoint, if it has the time. The exit
status is that of the trainers, 2 for a configuration error, 1 where Slurm ended the job.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config.command_line import CommandLine
from megarl.config.earlier_run import RECOVER_DIR
from megarl.config.errors import EXIT_CODE, ConfigError
from megarl.config.run import ClusterConfig, RewardPoolConfig
from megarl.launcher.command import Launcher, run_launcher
from megarl.launcher.job import PACKAGE, Job, JobFiles
from megarl.launcher.names import LOOK_INTERVAL
from megarl.launcher.node import names_of
from megarl.launcher.placement import REWARD_POOL, SERVER_POOL
from megarl.launcher.plan import Plan, plan_cluster
from megarl.launcher.workers import NodeScheduler
from megarl.observability.logging import get_logger
from megarl.rpc.errors import WorkerDied
from megarl.rpc.group import LOST, GroupSpec, Processes, WatchedGroup, WorkerSpec
from megarl.utils.child import TERM_TIMEOUT, Child, LogTail, Signals, stop_all, wait_until
from megarl.utils.env import JOB_TOKEN as TOKEN
from megarl.utils.env import ensure_job_token

log = get_logger("launcher")

FAILED = 1  # exit status of a job that Slurm ended
COMMAND_TIMEOUT = 60.0  # seconds one command of Slurm may take
POLL = 2.0  # seconds between looks at the state of a job
SILENCE = 600.0  # seconds without an answer of Slurm's after which the job is not followed further
END_WAIT = 120  # seconds the other nodes have to end when one has
IDLE_LIMIT = 3  # attempts without a checkpoint after which a job is not queued again
# arguments that say how nodes are shared
_SHARING = ("--exclusive", "--oversubscribe", "-s", "--mem")
# states that a job does not leave by itself
_TERMINAL = """
COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL PREEMPTED OUT_OF_MEMORY BOOT_FAIL DEADLINE REVOKED
LAUNCH_FAILED RECONFIG_FAIL
"""


class Files(JobFiles):
    """Names the files of a job that Slurm runs. status: the job's exit status, written at its end.
    idle: a line for each attempt in a row that ended without a new checkpoint."""

    def __init__(self, directory: Path, python: str = sys.executable) -> None:
        super().__init__(directory, python)
        self.script, self.id = directory / "job.sbatch", directory / "job_id"
        self.status, self.idle = directory / "status", directory / "idle"

    def log(self, job_id: str) -> Path:
        """Returns the file that the job's output goes to."""
        return self.directory / f"slurm-{job_id}.log"


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
    """Parses the first line of `scontrol -o show job`; None if the text is no such line."""
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
        why = f"scancel {earlier}, or choose another trial_name"
        raise ConfigError(f"job {earlier} of this run is {state.state}: {why}")
    ensure_job_token()
    files.write(job, os.environ)
    for old in (files.status, files.idle):
        old.unlink(missing_ok=True)
    files.script.write_text(batch_script(job, plan.cfg.cluster, files), encoding="utf-8")
    done = _slurm("sbatch", "--parsable", str(files.script))
    if done.returncode:
        raise ConfigError(f"sbatch refuses the job: {done.stderr.strip()}; see {files.script}")
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
        )
    except FileNotFoundError as e:
        raise ConfigError(f"{command[0]}: no such command; start on a machine with Slurm") from e
    except subprocess.TimeoutExpired:
        why = f"{command[0]}: no answer within {COMMAND_TIMEOUT:g} s"
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=why)


# the batch script


def batch_script(job: Job, cluster: ClusterConfig, files: Files) -> str:
    """Returns the script. It starts one agent on every node, again as recover.restarts allows, and
    queues the job again when it is told to end before it is done."""
    words = _directives(job, cluster, files)
    # as sbatch reads a word off a line
    directives = [f'#SBATCH "{w}"' if " " in w else f"#SBATCH {w}" for w in words]
    body = _BODY.format(
        directory=shlex.quote(job.working_directory),
        python_path=shlex.quote(str(PACKAGE.parent)),
        status=shlex.quote(str(files.status)),
        checkpoints=shlex.quote(str(files.directory.parent / RECOVER_DIR)),
        idle=shlex.quote(str(files.idle)),
        idle_limit=IDLE_LIMIT,
        restarts=job.restarts,
        requeue=int("--no-requeue" not in cluster.sbatch_args),
        config_error=EXIT_CODE,
        srun=shlex.join(_srun(job, cluster, files)).replace("'$attempt'", '"$attempt"'),
    )
    return "\n".join(("#!/bin/bash", *directives, body))


def _directives(job: Job, cluster: ClusterConfig, files: Files) -> Iterator[str]:
    """Yields sbatch's arguments: the job's, then those of each pool, which is a component of a
    heterogeneous job."""
    yield f"--job-name=megarl-{job.name.replace('/', '-')}"
    yield f"--output={files.log('%j')}"
    yield "--open-mode=append"
    yield "--export=PATH,HOME,USER,LANG"
    yield "--signal=B:USR1@300"  # of an argument that comes again, the last counts
    common = [a for a in cluster.sbatch_args if a.startswith(("--time=", "--no-requeue"))]
    for pool in dict.fromkeys(job.pools):
        if pool != job.pools[0]:
            yield "hetjob"
        yield "--requeue"
        yield f"--nodes={job.pools.count(pool)}"
        yield "--ntasks-per-node=1"
        rewards = RewardPoolConfig(**(cluster.reward_pool or {}))
        other = {SERVER_POOL: cluster.server_pool, REWARD_POOL: rewards}.get(pool)
        arguments = [*common, *other.sbatch_args] if other else cluster.sbatch_args
        if not any(argument.startswith(_SHARING) for argument in arguments):
            yield from ("--exclusive", "--mem=0")
        if gpus := job.gpus_per_node[job.pools.index(pool)]:
            yield f"--gpus-per-node={gpus}"
        yield from arguments


def _srun(job: Job, cluster: ClusterConfig, files: Files) -> Iterator[str]:
    """Yields the words of the command that starts the agents."""
    yield from ("srun", "--export=ALL", "--label", "--kill-on-bad-exit=0", f"--wait={END_WAIT}")
    if components := len(set(job.pools)) - 1:
        yield f"--het-group=0-{components}"
    if cluster.container:
        yield f"--container-image={cluster.container}"
    if cluster.container and cluster.container_mounts:
        mounts = (m if ":" in m else f"{m}:{m}" for m in cluster.container_mounts)
        yield f"--container-mounts={','.join(mounts)}"
    yield from files.agent("$attempt", "--node-variable", "SLURM_PROCID")


_BODY = """
cd {directory} || exit 1
export PYTHONPATH={python_path}${{PYTHONPATH:+:$PYTHONPATH}}
told=0  # whether somebody wants the job to end
tries=0
# SIGUSR1 comes before the time limit. srun passes it on, and every node saves and ends.
trap 'told=1; kill -USR1 "$step" 2>/dev/null' USR1 TERM
checkpoints() {{ ls {checkpoints} 2>/dev/null; }}
before=$(checkpoints)
finish() {{ echo "$1" > {status}; exit "$1"; }}
while true; do
    attempt=$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}.$tries
    {srun} &
    step=$!
    [ "$told" = 0 ] || kill -USR1 "$step"
    # a signal ends a wait early
    while wait "$step"; status=$?; kill -0 "$step" 2>/dev/null; do :; done
    if [ "$status" = 0 ] || [ "$status" = {config_error} ]; then finish "$status"; fi
    # a job that Slurm is ending, or queues again by itself, is left to it
    state=$(squeue -h -j "$SLURM_JOB_ID" -o %T 2>/dev/null | head -n 1)
    [ "$state" = RUNNING ] || finish "$status"
    if [ "$told" = 1 ]; then
        [ {requeue} = 1 ] || finish "$status"
        if [ "$(checkpoints)" = "$before" ]; then echo >> {idle}; else rm -f {idle}; fi
        if [ -f {idle} ] && [ "$(wc -l < {idle})" -ge {idle_limit} ]; then
            echo "{idle_limit} attempts in a row ended before a checkpoint: not queueing again"
            echo "raise --time, or lower the seconds of --signal, in cluster.sbatch_args"
            finish "$status"
        fi
        echo "status $status: queueing the job again, to continue"
        scontrol requeue "$SLURM_JOB_ID"  # ends this script, too
        sleep 60
        finish "$status"
    fi
    [ "$tries" -lt {restarts} ] || finish "$status"
    tries=$((tries + 1))
    echo "status $status: starting again, $(({restarts} - tries)) restart(s) left"
done
"""


# workers of a script that runs in an allocation


class SlurmScheduler(NodeScheduler):
    """Starts each group by one `srun --overlap`, in the job that this process belongs to.
    interface: as cluster.interface, of this machine and of the nodes."""

    def __init__(self, *, interface: str = "") -> None:
        """Raises ConfigError outside of an allocation, or without an address."""
        if not os.environ.get("SLURM_JOB_ID"):
            fix = "start this in an allocation, by sbatch or salloc"
            raise ConfigError(f"SLURM_JOB_ID is not set: {fix}")
        super().__init__(interface)

    def start_agents(self, spec: GroupSpec, job: Job, files: JobFiles, attempt: str) -> Processes:
        self._step = _SlurmStep(spec, job, files, attempt)
        return self._step

    def start(self, spec: GroupSpec) -> WatchedGroup:
        """Returns a group whose workers serve; see Scheduler. Errors show what srun says."""
        try:
            return super().start(spec)
        except (WorkerDied, TimeoutError) as e:
            raise type(e)(f"{e}{self._step.srun.tail()}") from e


class _SlurmStep:
    """Holds the srun of a group's agents, and reads what they say of their ends."""

    def __init__(self, spec: GroupSpec, job: Job, files: JobFiles, attempt: str) -> None:
        self._names = names_of(job, attempt)
        self._count, self._over = spec.count, 0.0
        self.srun = Child(
            f"srun of {spec.name}",
            srun_command(spec, files, attempt),
            env={k: v for k, v in os.environ.items() if k != TOKEN}
            | {"PYTHONPATH": str(PACKAGE.parent)},
            log_path=files.directory / f"srun-{attempt}.log",
        )

    def poll(self) -> Mapping[int, int]:
        """Returns the exit statuses of the agents, which are those of their workers."""
        status = self.srun.poll()
        ends = {k: self._names.peek(f"end.{k}") for k in range(self._count)}
        ended = {k: int(text) for k, text in ends.items() if text is not None}
        if status is None:
            return ended
        self._over = self._over or time.monotonic()
        if time.monotonic() < self._over + 2 * LOOK_INTERVAL:  # they may have said more
            return ended
        return dict.fromkeys(range(self._count), LOST) | ended

    def close(self) -> None:
        """Has the agents that are left end, with their workers, and srun with them."""
        if self.srun.poll() is None:
            self._names.put("lost.0", "the controller needs these workers no more")
            wait_until(lambda: self.srun.poll() is not None, timeout=TERM_TIMEOUT)
        stop_all([self.srun], Signals())


def srun_command(spec: GroupSpec, files: JobFiles, attempt: str) -> list[str]:
    """Returns the command that starts the agents of a group. Groups with GPUs do not share them:
    their steps take what they ask for, the others lie over all."""
    return [
        *("srun", f"--job-name={spec.name}", f"--ntasks={spec.count}"),
        *("--export=PATH,HOME,USER,LANG,PYTHONPATH,SLURM_CONF", "--kill-on-bad-exit=0"),
        *("--wait=0", *_asks(spec.worker)),
        *files.agent(attempt, "--node-variable", "SLURM_PROCID"),
    ]


def _asks(worker: WorkerSpec) -> Iterator[str]:
    cpus = worker.cpus or 1
    yield f"--cpus-per-task={cpus}"
    if worker.gpus:
        yield from ("--exact", f"--gpus-per-task={worker.gpus}")
    else:
        yield "--overlap"
    if worker.memory:  # Slurm has no bound for a task, but one for each of its cores
        yield f"--mem-per-cpu={-(-worker.memory // (cpus << 20))}M"
    elif worker.gpus:
        yield "--mem=0"


if __name__ == "__main__":
    sys.exit(main())
