"""Runs one node's part of a job: its scheduler starts this once on every node.

    python -m megarl.launcher.node --job FILE --attempt ID --node K [--environment FILE]

    --node-variable NAME [--first-node N]   in place of --node: N plus the number in that variable

FILE holds the records that a launcher wrote. Nodes meet at <run>/names/ID on storage that all of
them see; a later attempt has an ID with greater numbers. With --environment processes get the
variables of that file, those of the scheduler, and no others. SIGUSR1 and SIGTERM save a checkpoint
and end the job. The exit status is that of the job.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.config.command_line import CommandLine, help_or_command_line
from megarl.config.errors import EXIT_CODE, ConfigError
from megarl.launcher.job import Job
from megarl.launcher.names import FileNames, Superseded
from megarl.launcher.running import NODE_FAILED, run_node
from megarl.observability.logging import get_logger
from megarl.rpc.nodes import LOOPBACK, node_address, take_environment
from megarl.utils.child import Signals
from megarl.utils.job_token import ENV as TOKEN
from megarl.utils.job_token import ensure_job_token, job_token
from megarl.utils.stopping import SETTLE

log = get_logger("launcher")

OPTIONS = ("job", "attempt", "node", "node-variable", "first-node", "environment")
NAMES = "names"  # below the run directory
FENCE = 10.0  # seconds that processes of an earlier attempt have to see that there is a newer one


def names_of(job: Job, attempt: str) -> FileNames:
    """Returns what the agents of an attempt tell each other."""
    directory = Path(job.working_directory, job.directory, NAMES)
    return FileNames(directory, attempt, token=ensure_job_token())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (None: this process's); returns the exit status."""
    try:
        command = help_or_command_line(argv, __doc__ or "", options=OPTIONS)
        if command is None:
            return 0
        job = _read_job(command)
        node = node_number(command.options, os.environ, len(job.pools))
        if "environment" in command.options:
            take_environment(Path(command.options["environment"]))
        if job_token() is None:
            raise ConfigError([f"{TOKEN} is not set: the nodes of a job know each other by it"])
        apart = len(job.pools) > 1 and any(task.ports for task in job.tasks)
        host = node_address(job.interface) if apart else LOOPBACK
        _enter(job.working_directory)
    except ConfigError as e:
        print(e.report(), file=sys.stderr)
        return EXIT_CODE
    os.environ.setdefault(SETTLE, "5")
    names = names_of(job, command.options["attempt"])
    with Signals(signal.SIGUSR1) as signals:
        try:
            names.begin(len(job.pools), timeout=FENCE)
        except Superseded as e:
            log.error("%s", e)
            return NODE_FAILED
        log.info("node %d of %s at %s", node, job.name, host)
        return run_node(job, node, host=host, names=names, signals=signals)


def _enter(directory: str) -> None:
    try:
        os.chdir(directory)
    except OSError as e:
        raise ConfigError(
            [f"{directory}: {e.strerror} on this node; start the job in a directory they share"]
        ) from e


def _read_job(command: CommandLine) -> Job:
    for name in ("job", "attempt"):
        if name not in command.options:
            raise ConfigError([f"--{name}: required; see --help"])
    path = Path(command.options["job"])
    try:
        return Job.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise ConfigError([f"--job {path}: not the records of a job: {e}"]) from e


def node_number(options: Mapping[str, str], env: Mapping[str, str], nodes: int) -> int:
    """Returns the number of this node. Raises ConfigError where it is not told, or the job has no
    such node."""
    text = options.get("node", "")
    if name := options.get("node-variable", ""):
        text = env.get(name, "")
    if not text.isdecimal():
        where = f"--node-variable {name}={text!r}" if name else f"--node {text!r}"
        raise ConfigError([f"{where}: the number of this node, from 0"])
    number = int(text) + int(options.get("first-node", "0"))
    if number >= nodes:
        raise ConfigError([f"node {number}: the job has {nodes} node(s), counted from 0"])
    return number


if __name__ == "__main__":
    sys.exit(main())
