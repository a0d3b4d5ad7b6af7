"""Prints what a launcher would start: a table of nodes, then every process. Secrets are masked."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from megarl.config.errors import ConfigError
from megarl.config.secrets import MASK, masked_override, masked_text, masked_yaml
from megarl.launcher.job import JUDGE, REWARDS, SERVER, SERVERS, TRAINER, Job, Task

TABLE = "table"
FORMATS = (TABLE, "json")


def show(job: Job, env: Mapping[str, str], format: str = TABLE) -> str:
    """Returns the job as text. env: where it is started from. format: one of FORMATS; raises
    ConfigError for another. The text of "json" is one that `Job.from_json` reads."""
    if format == "jobset":
        raise ConfigError(
            [
                "--format jobset: use --format json, whose records the JobSet of docs/clusters.md "
                "reads from a ConfigMap"
            ]
        )
    if format not in FORMATS:
        raise ConfigError([f"--format {format}: not one of {', '.join(FORMATS)}"])
    if format == "json":
        return json.dumps(_masked(job, env), indent=1)
    return "\n".join(_table(job, env))


def _masked(job: Job, env: Mapping[str, str]) -> dict[str, object]:
    tree = asdict(job)
    tree["config"] = masked_yaml(job.config)
    for task in tree["tasks"]:
        task["command"] = [masked_override(word) for word in task["command"]]
        task["env"] = {k: _value(k, v) for k, v in task["env"].items()}
    tree["forwarded"] = {k: _forwarded(job, k, env) for k in job.forwarded}
    return tree


def _forwarded(job: Job, name: str, env: Mapping[str, str]) -> str:
    return MASK if name in job.hidden else _value(name, env.get(name, ""))


def _value(name: str, value: str) -> str:
    return masked_text(value, name)


def _table(job: Job, env: Mapping[str, str]) -> Iterator[str]:
    servers, judges = ([t for t in job.of(role) if t.part == 0] for role in (SERVER, JUDGE))
    yield (
        f"{job.name}: {len(job.pools)} node(s), {_trainers(job)}, {len(servers)} server(s)"
        + (f", {len(judges)} for the judge" if judges else "")
        + (f", {len(job.of(REWARDS))} reward worker(s)" if job.of(REWARDS) else "")
    )
    yield f"files go to {job.directory}, processes start in {job.working_directory}"
    yield ""
    yield from _columns(
        [("node", "pool", "GPUs", "processes"), *(_node_row(job, n) for n in range(len(job.pools)))]
    )
    for role in (*SERVERS, TRAINER):
        own = [t for t in job.of(role) if t.workers is not None]
        for tasks in (own, [t for t in job.of(role) if t not in own]):
            if tasks:
                yield from ("", *_role(role, tasks))
    yield ""
    yield "every process gets these variables as they are here:"
    for name in job.forwarded:
        shown = f"={_forwarded(job, name, env)}" if name in env else ", made for the job"
        yield f"  {name}{shown}"
    yield ""
    yield (
        "A node fills in @{...} when it starts: it chooses ports that are free, from 20000 to "
        "32767, and counts its GPUs from 0."
    )


def _trainers(job: Job) -> str:
    trainers = job.of(TRAINER)
    if (workers := trainers[0].workers) is None:
        return f"{len(trainers)} trainer process(es)"
    return f"a controller that starts {workers} trainer process(es) and the rollouts' driver"


def _node_row(job: Job, node: int) -> tuple[str, ...]:
    found = []
    for role in (TRAINER, *SERVERS):
        tasks = job.of(role, node)
        if tasks and tasks[0].workers is not None:
            found.append(tasks.pop(0).name)
        if role == TRAINER and len(tasks) > 1:
            found.append(f"trainers {tasks[0].index} to {tasks[-1].index}")
        else:
            found += [t.name for t in tasks]
    return str(node), job.pools[node], str(job.gpus_per_node[node] or "-"), ", ".join(found)


def _role(role: str, tasks: Sequence[Task]) -> Iterator[str]:
    """Yields what all tasks of a role have in common, then what each has of its own."""
    first = tasks[0]
    words = [masked_override(w) for w in first.command]
    same_length = [t for t in tasks if len(t.command) == len(words)]
    own = {
        i for t in same_length for i, w in enumerate(t.command) if w != first.command[i]
    }  # positions of words that differ
    shown = ["..." if i in own else shlex.quote(w) for i, w in enumerate(words)]
    yield f"every {role}: {' '.join(shown)}"
    shared = {k: v for k, v in first.env.items() if all(t.env.get(k) == v for t in tasks)}
    for name, value in shared.items():
        yield f"  {name}={_value(name, value)}"
    for task in tasks:
        yield f"{task.name}: node {task.node}, " + ", ".join(_details(task, own, words, shared))


def _details(
    task: Task, own: set[int], words: Sequence[str], shared: Mapping[str, str]
) -> Iterator[str]:
    if len(task.command) != len(words):
        yield "command " + " ".join(masked_override(w) for w in task.command)
    else:
        for i in sorted(own):
            yield f"{task.command[i - 1]} {masked_override(task.command[i])}"
    for name, value in task.env.items():
        if name not in shared:
            yield f"{name}={_value(name, value)}"
    if task.ports:
        yield f"chooses {', '.join(task.ports)}"
    yield f"log {task.log}" if task.log else "log: the launcher's output"


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
