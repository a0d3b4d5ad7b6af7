"""Writes the batch script of a job for Slurm, and names the files that it leaves."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from megarl.config.cluster import ClusterConfig
from megarl.config.earlier_run import RECOVER_DIR
from megarl.config.errors import EXIT_CODE
from megarl.launcher.files import JobFiles
from megarl.launcher.job import Job
from megarl.launcher.placement import REWARD_POOL, SERVER_POOL
from megarl.rpc.nodes import PACKAGE

END_WAIT = 120  # seconds the other nodes have to end when one has
IDLE_LIMIT = 3  # attempts without a checkpoint after which a job is not queued again
# arguments that say how nodes are shared
_SHARING = ("--exclusive", "--oversubscribe", "-s", "--mem")


class Files(JobFiles):
    """Names the files of a job that Slurm runs. status: the job's exit status, written at its end.
    idle: a line for each attempt in a row that ended without a new checkpoint."""

    @property
    def script(self) -> Path:
        return self.directory / "job.sbatch"

    @property
    def id(self) -> Path:
        return self.directory / "job_id"

    @property
    def status(self) -> Path:
        return self.directory / "status"

    @property
    def idle(self) -> Path:
        return self.directory / "idle"

    def log(self, job_id: str) -> Path:
        """Returns the file that the job's output goes to."""
        return self.directory / f"slurm-{job_id}.log"


def batch_script(job: Job, cluster: ClusterConfig, files: Files) -> str:
    """Returns the script. It starts one agent on every node, again as recover.restarts allows, and
    queues the job again when it is told to end before it is done."""
    directives = [f"#SBATCH {_quoted(word)}" for word in _directives(job, cluster, files)]
    body = _BODY.format(
        directory=shlex.quote(job.working_directory),
        python_path=shlex.quote(str(PACKAGE.parent)),
        status=shlex.quote(str(files.status)),
        checkpoints=shlex.quote(str(files.directory.parent / RECOVER_DIR)),
        idle=shlex.quote(str(files.idle)),
        idle_limit=IDLE_LIMIT,
        restarts=job.restarts,
        requeue=int(cluster.slurm.requeue),
        config_error=EXIT_CODE,
        srun=shlex.join(_srun(job, cluster, files)).replace("'$attempt'", '"$attempt"'),
    )
    return "\n".join(("#!/bin/bash", *directives, body))


def _quoted(word: str) -> str:
    """Returns a word as sbatch reads it off a line of directives."""
    return f'"{word}"' if " " in word else word


def _directives(job: Job, cluster: ClusterConfig, files: Files) -> Iterator[str]:
    """Yields sbatch's arguments: the job's, then those of each pool, which is a component of a
    heterogeneous job."""
    slurm = cluster.slurm
    yield f"--job-name=megarl-{job.name.replace('/', '-')}"
    yield f"--output={files.log('%j')}"
    yield "--open-mode=append"
    yield "--export=PATH,HOME,USER,LANG"
    yield f"--signal=B:USR1@{slurm.save_before}"
    for pool in dict.fromkeys(job.pools):
        if pool != job.pools[0]:
            yield "hetjob"
        if slurm.minutes:
            yield f"--time={slurm.minutes}"
        yield "--requeue" if slurm.requeue else "--no-requeue"
        yield f"--nodes={job.pools.count(pool)}"
        yield "--ntasks-per-node=1"
        other = {SERVER_POOL: cluster.server_pool, REWARD_POOL: cluster.reward_pool}.get(pool)
        arguments = other.sbatch_args if other else slurm.sbatch_args
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
            echo "raise cluster.slurm.minutes, or lower cluster.slurm.save_before"
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
