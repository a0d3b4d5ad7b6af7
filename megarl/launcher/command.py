"""Does what all launchers do: reads the command line, checks what it names, shows the job (secrets
are masked), and starts it again after a failure."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from megarl.config.command_line import CommandLine, help_or_command_line
from megarl.config.container import View
from megarl.config.earlier_run import ended
from megarl.config.errors import EXIT_CODE, ConfigError
from megarl.config.secrets import MASK, masked_override, masked_text, masked_yaml
from megarl.launcher.job import Job
from megarl.launcher.make import make_job
from megarl.launcher.plan import Plan, check_sglang
from megarl.observability.logging import get_logger
from megarl.trainer.preflight import check_contents, check_weights, check_writable
from megarl.utils.child import Signals
from megarl.utils.importing import add_working_directory
from megarl.utils.stacks import prepare_signals

log = get_logger("launcher")

TABLE = "table"
FORMATS = (TABLE, "json")


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Says what one launcher does its own way. help: the text of --help. plan: checks a command
    line, and raises ConfigError. start: runs the job and returns the exit status. asks: what it
    asks a scheduler for, as text that --dry-run adds to the table. cluster: as for make_job.
    options, switches: of the command line, besides those of all launchers."""

    help: str
    plan: Callable[[CommandLine], Plan]
    start: Callable[[Plan, Job, CommandLine], int]
    asks: Callable[[Plan, Job], str] | None = None
    cluster: bool = True
    options: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()


def run_launcher(launcher: Launcher, argv: Sequence[str] | None) -> int:
    """Runs a launcher with the command line `argv` (None: this process's); returns the exit status:
    2 for a configuration error, else that of the job."""
    add_working_directory()
    prepare_signals()
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
        asks = launcher.asks(plan, job) if launcher.asks and format == TABLE else ""
        print("\n\n".join(filter(None, (show(job, os.environ, format), asks))))
        return 0
    only = "check" in command.switches
    if not launcher.cluster:
        check_sglang(plan)
    check_contents(plan.cfg, path=plan.import_path, launcher=True, starts=not only)
    if only:
        on_nodes = f" on {len(job.pools)} node(s)" if launcher.cluster else ""
        under = " under one controller" if plan.cfg.trainer.mode == "controller" else ""
        print(f"the configuration is sound, for {plan.nproc} trainer process(es){under}{on_nodes}")
        return 0
    view = View(plan.cfg)
    view.check(check_weights)
    check_writable(here := view.seen)
    if plan.own and (line := ended(here)) is not None:
        log.info("%s", line)
        return 0
    return launcher.start(plan, job, command)


def start_again(restarts: int, signals: Signals, run: Callable[[], int]) -> int:
    """Calls `run` until it returns 0 or the status of a configuration error, or it has been called
    again `restarts` times; returns the last status. A signal that has come is the reason not to
    call it again, and 128 + its number the status."""
    while (status := run()) not in (0, EXIT_CODE) and restarts:
        if signals.received:
            return signals.status
        restarts -= 1
        log.warning("status %d: starting again, %d restart(s) left", status, restarts)
    return status


def show(job: Job, env: Mapping[str, str], format: str = TABLE) -> str:
    """Returns the job as text. env: where it is started from. format: one of FORMATS; raises
    ConfigError for another. The text of "json" has every process, and `Job.from_json` reads it; the
    table has the command and variables of the first process of each kind."""
    if format not in FORMATS:
        why = f"not one of {', '.join(FORMATS)} (the JobSet of docs/clusters.md reads json)"
        raise ConfigError(f"--format {format}: {why}")
    records = _masked(job, env)
    if format == "json":
        return json.dumps(records, indent=1)
    return "\n".join(_table(job, records))


def _masked(job: Job, env: Mapping[str, str]) -> dict[str, Any]:
    """Returns the job's records, with the values of the variables that every process gets."""
    records = asdict(job)
    records["config"] = masked_yaml(job.config)
    for task in records["tasks"]:
        task["command"] = [masked_override(word) for word in task["command"]]
        task["env"] = {name: masked_text(value, name) for name, value in task["env"].items()}
    records["forwarded"] = {
        name: MASK if name in job.hidden else masked_text(env.get(name, ""), name)
        for name in job.forwarded
    }
    return records


def _table(job: Job, records: Mapping[str, Any]) -> Iterator[str]:
    counts = Counter(task.role for task in job.tasks if not task.part)
    processes = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    yield f"{job.name}: {len(job.pools)} node(s); processes: {processes}"
    yield f"files go to {job.directory}, processes start in {job.working_directory}"
    yield ""
    yield f"{'node':<6}{'pool':<10}{'GPUs':<6}processes"
    for node, (pool, gpus) in enumerate(zip(job.pools, job.gpus_per_node, strict=True)):
        yield f"{node:<6}{pool:<10}{gpus or '-':<6}{', '.join(_on_node(job, node))}"
    pairs = zip(job.tasks, records["tasks"], strict=True)
    for _, group in groupby(pairs, key=lambda pair: pair[0].role):
        tasks, shown = zip(*group, strict=True)
        yield ""
        for task in tasks:
            ports = f", chooses {', '.join(task.ports)}" if task.ports else ""
            yield f"{task.name}: node {task.node}{ports}, log {task.log or 'here'}"
        yield f"{tasks[0].name} runs {shlex.join(shown[0]['command'])}"
        yield from (f"  {name}={value}" for name, value in shown[0]["env"].items())
    yield from ("", "every process gets these variables as they are here:")
    yield from (f"  {name}={value}" for name, value in records["forwarded"].items())
    yield ""
    yield (
        "Commands and variables are those of the first process of each kind; --format json has "
        "all. A node fills in @{...} when it starts: it chooses ports that are free, from 20000 to "
        "32767, and counts its GPUs from 0."
    )


def _on_node(job: Job, node: int) -> Iterator[str]:
    tasks = [task for task in job.tasks if task.node == node]
    for _, group in groupby(tasks, key=lambda task: task.role):
        first, *others = (task.name for task in group)
        yield f"{first} to {others[-1]}" if len(others) > 1 else ", ".join((first, *others))
