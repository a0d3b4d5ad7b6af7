"""Counts the files and functions of megarl that fixed programs enter on their way.

    python tests/walks.py [--list WALK]

Every thread and process of the programs is traced (tests/walk_tracer/sitecustomize.py). A walk is
what is entered while a function runs: `train_batch` and `ppo_update` in its thread; `prompt`,
`agent` (an OpenAI client through the gateway), `stream` and `slices` (an engine's first sync of
weights) in all threads of the process, and in the processes that it started: those that give
rewards, a server's ranks. The embedded server stands for SGLang and is not counted. `start`:
launcher and trainer, from the command line until the first role builds its model. `value`: what is
given weight_sync.bucket_mb from the command line to the end of the first sync, as a number, in a
text, as an item of up to three nested lists and dicts, or as an object's own attribute (an object
that has an object that has it does not count).

`returns`: calls into files that the walk was in before, in the last call. They vary with the times
of threads; files and functions are held to [tool.house.walks] in pyproject.toml by
tests/e2e/test_walks.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VALUE = 1021  # of weight_sync.bucket_mb: no other number of a run is it
TIMEOUT = 300.0
SERVER = "server/"


@dataclass(frozen=True)
class Verb:
    """A function of megarl or of this file, whose calls in `program` are a walk: all, or the first
    alone (`once`); what its own `thread` enters, or all; with what `children` enter meanwhile that
    its process started."""

    program: str
    function: str
    thread: bool = False
    once: bool = False
    children: bool = False


VERBS = {
    "train_batch": Verb("grpo", "MegatronEngine.train_batch", thread=True),
    "ppo_update": Verb("grpo", "Actor.ppo_update", thread=True),
    "prompt": Verb("grpo", "RolloutSession.prepare_batch", children=True),
    "agent": Verb("agent", "RolloutSession.prepare_batch", children=True),
    "stream": Verb("syncs", "stream", children=True),
    "slices": Verb("syncs", "slices", children=True),
    "built": Verb("grpo", "MegatronEngine.initialize", once=True),  # the end of `start`
    "synced": Verb("grpo", "MegatronEngine.upload_weights", once=True),  # the end of `value`
}
WALKS = ("train_batch", "ppo_update", "prompt", "agent", "stream", "slices", "start", "value")


@dataclass
class Walk:
    """What was entered, as (file, function)."""

    entered: set[tuple[str, str]] = field(default_factory=set)
    returns: int | None = None

    @property
    def files(self) -> list[str]:
        """Returns the files."""
        return sorted({file for file, _ in self.entered})


@dataclass
class Process:
    """What one process wrote, times by (file, function)."""

    parent: int = 0
    begins: dict[str, float] = field(default_factory=dict)
    ends: dict[str, tuple[float, int]] = field(default_factory=dict)
    steps: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    enters: dict[tuple[str, str], float] = field(default_factory=dict)
    values: dict[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Process:
        """Reads its file."""
        process = cls()
        for line in path.read_text().splitlines():
            match line.split("\t"):
                case ["parent", pid]:
                    process.parent = int(pid)
                case ["begin", walk, when]:
                    process.begins[walk] = float(when)
                case ["end", walk, when, returns]:
                    process.ends[walk] = float(when), int(returns)
                case ["step", walk, file, function]:
                    process.steps.setdefault(walk, set()).add((file, function))
                case ["enter", when, file, function]:
                    process.enters[file, function] = float(when)
                case ["value", when, file, function]:
                    process.values[file, function] = float(when)
                case _:
                    raise ValueError(f"{path}: {line!r}")
        return process


def measure() -> dict[str, Walk]:
    """Runs the programs, two at a time, and returns the walks by name. Raises RuntimeError where a
    program fails, or a walk's function was not called."""
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(2) as pool:
        home = Path(made)
        make_model(home / "model")
        runs = {
            "grpo": pool.submit(trace, home / "grpo", grpo_command(home, "grpo")),
            "agent": pool.submit(trace, home / "agent", grpo_command(home, "agent", *AGENT)),
            "syncs": pool.submit(trace, home / "syncs", [__file__, "--syncs", str(home)]),
        }
        return walks_of({name: run.result() for name, run in runs.items()})


AGENT = (
    "rollout.workflow=megarl.rollout.workflows.agent:AgentWorkflow",
    "rollout.workflow.options.agent=examples.openai_agent:solve",
    "total_train_steps=1",
    "gconfig.n_samples=2",
)


def make_model(path: Path) -> None:
    """Makes the quickstart's model, smaller."""
    made = [sys.executable, "examples/tiny_model.py", str(path), "--hidden", "64", "--layers", "2"]
    subprocess.run(made, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def grpo_command(home: Path, name: str, *overrides: str) -> list[str]:
    """Returns the command line of two steps of the quickstart's GRPO, with one trainer."""
    return [
        *("-m", "megarl.launcher.local", "--nproc", "1"),
        *("--config", "configs/quickstart_grpo.yaml", f"actor.path={home / 'model'}"),
        *(f"fileroot={home}", f"experiment_name={name}_run", "actor.parallel.tp=1"),
        *("total_train_steps=2", "train_dataset.batch_size=4", "train_dataset.size=16"),
        *("train_dataset.options.level=1", "valid_dataset=null", "server.threads=1"),
        "episodes.keep=0",  # a thread of its own would write them
        *(f"weight_sync.bucket_mb={VALUE}", *overrides),
    ]


def trace(out: Path, command: list[str]) -> dict[int, Process]:
    """Runs a python command line under the tracer; returns what its processes wrote, by pid."""
    out.mkdir()
    verbs = {
        walk: {"function": verb.function, "thread": verb.thread, "once": verb.once}
        for walk, verb in VERBS.items()
        if verb.program == out.name
    }
    value = VALUE if out.name == "grpo" else None
    spec = {"out": str(out), "root": str(ROOT), "verbs": verbs, "value": value}
    path = os.pathsep.join([str(ROOT / "tests" / "walk_tracer"), str(ROOT)])
    run = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ
        | {"MEGARL_WALKS": json.dumps(spec), "PYTHONPATH": path}
        | {"OMP_NUM_THREADS": "1", "MEGARL_DEVICE": "cpu"},
        timeout=TIMEOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{run.stdout}")
    return {int(log.stem): Process.read(log) for log in out.glob("*.log")}


def walks_of(runs: Mapping[str, Mapping[int, Process]]) -> dict[str, Walk]:
    """Returns the walks in what the programs' processes wrote."""
    walks = {}
    for name, verb in VERBS.items():
        of_run = runs[verb.program]
        pids = [pid for pid, process in of_run.items() if name in process.ends]
        if not pids:
            raise RuntimeError(f"the walk {name}: {verb.function} was not called")
        walk = walks[name] = Walk(returns=sum(of_run[pid].ends[name][1] for pid in pids))
        for pid in pids:
            process = of_run[pid]
            walk.entered |= process.steps[name]
            if verb.children:
                begin, end = process.begins[name], process.ends[name][0]
                for child in of_run.values():
                    if child.parent == pid:
                        walk.entered |= {p for p, t in child.enters.items() if begin < t < end}
    del walks["built"], walks["synced"]
    (trainer,) = (pid for pid, process in runs["grpo"].items() if "built" in process.begins)
    built = runs["grpo"][trainer].begins["built"]
    synced = runs["grpo"][trainer].ends["synced"][0]
    start, value = walks["start"], walks["value"] = Walk(), Walk()
    for process in launcher_and_trainer(runs["grpo"], trainer):
        start.entered |= {p for p, t in process.enters.items() if t < built}
        value.entered |= {p for p, t in process.values.items() if t < synced}
    return walks


def launcher_and_trainer(run: Mapping[int, Process], trainer: int) -> Iterator[Process]:
    """Yields all processes but servers and those that the trainer started."""
    for process in run.values():
        is_server = any(file.startswith(SERVER) for file, _ in process.enters)
        if not is_server and process.parent != trainer:
            yield process


def syncs(home: Path) -> None:
    """Sends a model's weights from one trainer to what takes them as SGLang does: as slices, and
    in a stream of whole tensors."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    from tests.dist.engine_jobs import make_engine
    from tests.stock_server import StockServer
    from tests.tiny import save_tiny

    path = save_tiny(home / "syncs_model", "qwen3", layers=2)
    tensors = load_file(path / "model.safetensors")
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    dist.init_process_group("gloo", init_method=f"file://{home}/store", rank=0, world_size=1)
    with StockServer(shapes, tp=2, whole=True) as server:
        for sync in (slices, stream):
            engine = make_engine(str(path), {})
            sync(engine, server.address)
            assert server.holds(tensors)
            engine.destroy()
    dist.destroy_process_group()


def slices(engine: Any, address: str) -> None:
    """Sends slices."""
    engine.upload_weights(whither(address, version=1, sharded="on"))


def stream(engine: Any, address: str) -> None:
    """Sends whole tensors."""
    engine.upload_weights(whither(address, version=2, sharded="off", verify="full"))


def whither(address: str, **how: Any) -> Any:
    """Returns the record of a sync with one server."""
    from megarl.api.records import WeightUpdateMeta

    return WeightUpdateMeta(
        type="distributed", addresses=(address,), timeout=60.0, server_timeout=30.0, **how
    )


def limits() -> dict[str, dict[str, int]]:
    """Returns what [tool.house.walks] allows: by walk, `files` and `functions`."""
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return dict(stated["tool"]["house"]["walks"])


def table(walks: Mapping[str, Walk]) -> str:
    """Returns the walks beside their limits."""
    allowed, lines = limits(), [f"{'walk':12s} files      functions   returns"]
    for name in WALKS:
        walk, most = walks[name], allowed.get(name, {})
        files = f"{len(walk.files)}/{most.get('files', '-')}"
        functions = f"{len(walk.entered)}/{most.get('functions', '-')}"
        returns = "-" if walk.returns is None else str(walk.returns)
        lines.append(f"{name:12s} {files:10s} {functions:11s} {returns}")
    return "\n".join(lines)


def listing(walk: Walk) -> str:
    """Returns the files of a walk, and under each its functions."""
    lines: list[str] = []
    for file in walk.files:
        lines.append(file)
        lines += sorted(f"    {function}" for f, function in walk.entered if f == file)
    return "\n".join(lines)


def main() -> None:
    """Prints the table, or what one walk enters."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", choices=WALKS, help="print the files and functions of a walk")
    parser.add_argument("--syncs", type=Path, help=argparse.SUPPRESS)  # the program itself
    args: Any = parser.parse_args()
    if args.syncs is not None:
        return syncs(args.syncs)
    walks = measure()
    print(listing(walks[args.list]) if args.list else table(walks))


if __name__ == "__main__":
    main()
