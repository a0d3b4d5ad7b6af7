"""Runs everything on this host: generation servers, then trainers, until the trainers are done.

    python -m megarl.launcher.local [script.py] --config X.yaml [--nproc N] [key=value ...]

    --check           check the configuration, models, data and code it names, then stop
    --help SECTION    the configuration keys of one section, such as rollout
    --dry-run         print the nodes, the processes with their commands, variables, ports and logs,
                      then stop; --format json has every process in full

`script` defaults to megarl/run.py. It is started N times (default: the fewest processes the
parallel layout fits) with torchrun's environment, the same command line, and the addresses of the
servers in MEGARL_LLM_SERVER_ADDRS and rollout.addresses; the working directory is on its import
path. Everything is checked before anything starts: a mistake prints what is wrong, without a
traceback, and the exit status is 2. Servers are started as `server.*` says, unless
rollout.addresses already names some; their logs are <run>/server_<i>.log. They take control calls
from this job alone, by the token MEGARL_JOB_TOKEN, which is made where there is none.

SIGINT, SIGTERM and SIGHUP are passed on to the trainers, which then have recover.grace seconds to
save a checkpoint and end, and servers 30 s more; a second signal ends all of them at once. A server
or a trainer that fails ends everything, even where other servers are left; recover.restarts has it
started again, to continue. (Servers named in rollout.addresses are not the launcher's: of several,
a lost one is left out.)
Nothing that was started outlives the launcher. The exit status is the trainers'; --help of
megarl.run lists the configuration keys.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megarl.config.command_line import CommandLine
from megarl.launcher.command import Launcher, run_launcher, start_again
from megarl.launcher.job import Job
from megarl.launcher.names import Names
from megarl.launcher.node import run_node
from megarl.launcher.plan import Plan, plan_here
from megarl.rpc.group import LOOPBACK
from megarl.utils.child import Signals
from megarl.utils.env import ensure_job_token


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher with the command line `argv` (None: this process's); returns the exit
    status."""
    here = Launcher(help=__doc__ or "", plan=plan_here, start=launch, cluster=False)
    return run_launcher(here, argv)


def launch(plan: Plan, job: Job, command: CommandLine) -> int:
    """Runs the job to its end, starting it again as recover.restarts allows; returns the exit
    status."""
    ensure_job_token()  # every process it starts inherits it
    with Signals() as signals:

        def run_once() -> int:
            return run_node(job, 0, host=LOOPBACK, names=Names(), signals=signals)

        return start_again(job.restarts, signals, run_once)


if __name__ == "__main__":
    sys.exit(main())
