"""Writes the batch script of a job for Slurm, and the files that it reads."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
_EXPORT = "PATH,HOME,USER,LANG"
_SHARING = (
    "--exclusive",
    "--oversubscribe",
    "-s",
    "--mem",
)  # arguments that say how nodes are shared


@dataclass(frozen=True)
class Files(JobFiles):
    """Names the files of a job that Slurm runs."""

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

    def write(self, job: Job, script: str, env: Mapping[str, str]) -> None:
        """Writes the records, the script and the variables that processes get."""
        self.write_records(job, env)
        self.status.unlink(missing_ok=True)
        self.idle.unlink(missing_ok=True)
        self.script.write_text(script, encoding="utf-8")


def batch_script(job: Job, cluster: ClusterConfig, files: Files) -> str:
    """Returns the script. It starts one agent on every node, again as recover.restarts allows, and
    queues the job again when it is told to end before it is done."""
    pools = list(dict.fromkeys(job.pools))
    lines = ["#!/bin/bash", *_directives(job, cluster, files, pools[0])]
    for pool in pools[1:]:
        lines += ["#SBATCH hetjob", *_pool_directives(job, cluster, pool)]
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
        srun=_srun(job, files, len(pools)),
    )
    return "\n".join(lines) + "\n" + body


def _directives(job: Job, cluster: ClusterConfig, files: Files, pool: str) -> Iterator[str]:
    slurm = cluster.slurm
    yield from _options(
        {
            "job-name": f"megarl-{job.name.replace('/', '-')}",
            "output": str(files.log("%j")),
            "open-mode": "append",
            "export": _EXPORT,
            "signal": f"B:USR1@{slurm.save_before}",
        }
    )
    yield from _pool_directives(job, cluster, pool)


def _pool_directives(job: Job, cluster: ClusterConfig, pool: str) -> Iterator[str]:
    """Yields what each component of a heterogeneous job needs to be told of its own."""
    slurm, gpus = cluster.slurm, job.gpus_per_node[job.pools.index(pool)]
    yield from _options({"time": str(slurm.minutes or "")})
    yield f"#SBATCH --{'requeue' if slurm.requeue else 'no-requeue'}"
    yield f"#SBATCH --nodes={job.pools.count(pool)} --ntasks-per-node=1"
    other = {SERVER_POOL: cluster.server_pool, REWARD_POOL: cluster.reward_pool}.get(pool)
    arguments = other.sbatch_args if other else slurm.sbatch_args
    if not any(argument.startswith(_SHARING) for argument in arguments):
        yield "#SBATCH --exclusive --mem=0"
    if gpus:
        yield f"#SBATCH --gpus-per-node={gpus}"
    for argument in arguments:
        yield f"#SBATCH {_word(argument)}"


def _options(wanted: Mapping[str, str]) -> Iterator[str]:
    for name, value in wanted.items():
        if value:
            yield f"#SBATCH --{name}={_word(value)}"


def _word(value: str) -> str:
    """Returns a value as sbatch reads it off a line of directives."""
    return f'"{value}"' if " " in value else value


def _srun(job: Job, files: Files, components: int) -> str:
    options = ["--export=ALL", "--label", "--kill-on-bad-exit=0", f"--wait={END_WAIT}"]
    if components > 1:
        options.append(f"--het-group=0-{components - 1}")
    if job.container:
        options.append(f"--container-image={job.container}")
        mounts = ",".join(m if ":" in m else f"{m}:{m}" for m in job.container_mounts)
        options += [f"--container-mounts={mounts}"] if mounts else []
    agent = [
        *(job.python, "-m", "megarl.launcher.node", "--job", str(files.job)),
        *("--environment", str(files.environment), "--node-variable", "SLURM_PROCID"),
    ]
    return shlex.join(["srun", *options, *agent])


_BODY = """
cd {directory} || exit 1
export PYTHONPATH={python_path}${{PYTHONPATH:+:$PYTHONPATH}}
told=0  # whether somebody wants the job to end
tries=0
# SIGUSR1 comes before the time limit. srun passes it on, and every node saves and ends.
trap 'told=1; kill -USR1 "$step" 2>/dev/null' USR1 TERM
running() {{ [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T 2>/dev/null | head -n 1)" = RUNNING ]; }}
checkpoints() {{ ls {checkpoints} 2>/dev/null; }}
before=$(checkpoints)
# counts the attempts in a row that end without a new checkpoint
idle() {{
    local n=0
    [ "$(checkpoints)" != "$before" ] || n=$(($(cat {idle} 2>/dev/null || echo 0) + 1))
    echo "$n" | tee {idle}
}}
finish() {{ echo "$1" > {status}; exit "$1"; }}
while true; do
    {srun} \\
        --attempt "$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}.$tries" &
    step=$!
    [ "$told" = 0 ] || kill -USR1 "$step"
    wait "$step"; status=$?
    # a signal ends the first wait early
    while kill -0 "$step" 2>/dev/null; do wait "$step"; status=$?; done
    if [ "$status" = 0 ] || [ "$status" = {config_error} ]; then finish "$status"; fi
    # a job that Slurm is ending, or queues again by itself, is left to it
    if ! running; then finish "$status"; fi
    if [ "$told" = 1 ]; then
        if [ {requeue} = 1 ] && [ "$(idle)" -ge {idle_limit} ]; then
            echo "{idle_limit} attempts in a row ended before a checkpoint: not queueing again"
            echo "raise cluster.slurm.minutes, or lower cluster.slurm.save_before"
        elif [ {requeue} = 1 ]; then
            echo "status $status: queueing the job again, to continue"
            scontrol requeue "$SLURM_JOB_ID"  # ends this script, too
            sleep 60
        fi
        finish "$status"
    fi
    if [ "$tries" -ge {restarts} ]; then finish "$status"; fi
    tries=$((tries + 1))
    echo "status $status: starting again, $(({restarts} - tries)) restart(s) left"
done
"""
