"""Does what all launchers do: reads the command line, checks what it names, shows the job, and
starts it again after a failure."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.config.command_line import CommandLine, help_or_command_line
from megarl.config.earlier_run import ended
from megarl.config.errors import EXIT_CODE, ConfigError
from megarl.launcher.container import seen_from_here
from megarl.launcher.job import Job
from megarl.launcher.make import make_job
from megarl.launcher.plan import Plan, check_named
from megarl.launcher.show import TABLE, show
from megarl.observability.logging import get_logger
from megarl.utils.child import Signals
from megarl.utils.importing import add_working_directory
from megarl.utils.stacks import dump_on_signal

log = get_logger("launcher")


def _nothing(plan: Plan, job: Job) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Says what one launcher does its own way. help: the text of --help. plan: checks a command
    line, and raises ConfigError. start: runs the job and returns the exit status. asks: what it
    asks a scheduler for, as text that --dry-run adds to the table. cluster: as for make_job.
    options, switches: of the command line, besides those of all launchers."""

    help: str
    plan: Callable[[CommandLine], Plan]
    start: Callable[[Plan, Job, CommandLine], int]
    asks: Callable[[Plan, Job], str] = _nothing
    cluster: bool = True
    options: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()


def run_launcher(launcher: Launcher, argv: Sequence[str] | None) -> int:
    """Runs a launcher with the command line `argv` (None: this process's); returns the exit status:
    2 for a configuration error, else that of the job."""
    add_working_directory()
    dump_on_signal()
    try:
        command = help_or_command_line(
            argv,
            launcher.help,
            options=("config", "nproc", "format", *launcher.options),
            switches=("check", "dry-run", *launcher.switches),
        )
        return 0 if command is None else _run(launcher, command)
    except ConfigError as e:
        print(e.report(), file=sys.stderr)
        return EXIT_CODE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(launcher: Launcher, command: CommandLine) -> int:
    plan = launcher.plan(command)
    job = make_job(plan, os.environ, cluster=launcher.cluster)
    if "dry-run" in command.switches:
        format = command.options.get("format", TABLE)
        asks = launcher.asks(plan, job) if format == TABLE else ""
        print("\n\n".join(filter(None, (show(job, os.environ, format), asks))))
        return 0
    only = "check" in command.switches
    check_named(plan, writes=not only)
    if only:
        on_nodes = f" on {len(job.pools)} node(s)" if launcher.cluster else ""
        under = " under one controller" if plan.cfg.trainer.mode == "controller" else ""
        print(f"the configuration is sound, for {plan.nproc} trainer process(es){under}{on_nodes}")
        return 0
    if plan.own and (line := ended(seen_from_here(plan.cfg))) is not None:
        log.info("%s", line)
        return 0
    return launcher.start(plan, job, command)


def start_again(restarts: int, signals: Signals, run: Callable[[], int]) -> int:
    """Calls `run` until it returns 0 or the status of a configuration error, a signal has come, or
    it has been called again `restarts` times; returns the last status."""
    while (status := run()) not in (0, EXIT_CODE):
        if signals.received or not restarts:
            break
        restarts -= 1
        log.warning("status %d: starting again, %d restart(s) left", status, restarts)
    return status
