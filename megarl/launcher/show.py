"""Prints what a launcher would start: a table of nodes, then the processes. Secrets are masked."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.secrets import MASK, masked_override, masked_text, masked_yaml
from megarl.launcher.job import Job

TABLE = "table"
FORMATS = (TABLE, "json")


def show(job: Job, env: Mapping[str, str], format: str = TABLE) -> str:
    """Returns the job as text. env: where it is started from. format: one of FORMATS; raises
    ConfigError for another. The text of "json" has every process, and `Job.from_json` reads it; the
    table has the command and variables of the first process of each kind."""
    if format not in FORMATS:
        raise ConfigError(
            [
                f"--format {format}: not one of {', '.join(FORMATS)} (the JobSet of "
                "docs/clusters.md reads json)"
            ]
        )
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
