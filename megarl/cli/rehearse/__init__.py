"""Runs a cluster's recipe small, on this machine, before it costs a GPU hour.

The recipe, the model's family and the dimensions of its layout stay; sizes shrink. First ranks of
the whole layout are constructed with the model's own shapes, one after the other, without memory.
Then the small job runs over gloo: servers, two steps, a checkpoint; and it is started again, to go
on from there for one more step. Weights are random. Of a model that is not here the shapes are
those in models/ beside the configuration, as for tools/plan.py.

The exit status is 0 if all of it went well, 1 with the reason if not, 2 for a wrong configuration.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cli import CommandParser, positive
from megarl.cli.rehearse.small import (
    Layouts,
    changes,
    shrink_config,
    shrink_layouts,
    shrink_model,
    write_model,
)
from megarl.config.check import check_config
from megarl.config.earlier_run import checkpoints, differences
from megarl.config.engine import TrainEngineConfig
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.loader import run_dir, save_config
from megarl.config.recipe_engines import engines, model_path, smallest_world_size
from megarl.config.recipes import BaseConfig
from megarl.config.secrets import masked
from megarl.models.hf_config import check_layout, language_model, parse_hf_config
from megarl.observability.report.runs import load_run
from megarl.planning.job import expected_memory, find_shapes
from megarl.planning.memory import parameters
from megarl.utils.child import Child, Signals, spelled, stop_all

FAILED = 1  # exit status
STEPS = 2  # and one more after the resume
TERM_TIMEOUT = 60.0  # seconds the launcher has to end what it started
NUMBERS = ("reward/mean", "loss", "grad_norm", "weight_sync/bytes")


class RehearsalFailed(RuntimeError):
    """Says which part of a rehearsal failed, and why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Rehearses the configuration that `argv` names and returns the exit status. Raises ConfigError
    for a wrong one."""
    parser = CommandParser("rehearse", __doc__)
    parser.option("ranks", positive, "trainer processes at most (8)", 8)
    parser.option("out", Path, "new directory that keeps everything (else only after a failure)")
    parser.switch("every-rank", "construct every rank, not one of each pipeline stage")
    parser.option("timeout", positive, "seconds that each of the two starts may take (900)", 900)
    args, cfg = parser.recipe(argv)
    check_recipe(cfg)
    plan = make_plan(cfg, cards=args.config.parent / "models", ranks=args.ranks)
    if args.out is not None and args.out.exists():
        raise ConfigError(f"--out {args.out}: exists already; name a new directory")
    out = (args.out or Path(tempfile.mkdtemp(prefix="megarl-rehearsal-"))).absolute()
    out.mkdir(parents=True, exist_ok=True)
    print(f"rehearsal of {args.config}", *describe(plan), sep="\n", flush=True)
    try:
        rehearse(plan, out, every_rank=args.every_rank, timeout=args.timeout)
    except RehearsalFailed as e:
        print(f"rehearsal FAILED: {e}\neverything is in {out}")
        return FAILED
    if args.out is None:
        shutil.rmtree(out)
    print("rehearsal passed" + (f"; everything is in {out}" if args.out else ""))
    return 0


# the plan


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Holds what a rehearsal runs. raw, small: by the path of the cluster's model its config.json,
    and the small one."""

    cfg: BaseConfig
    layouts: Layouts
    raw: dict[str, dict[str, Any]]
    small: dict[str, dict[str, Any]]


def check_recipe(cfg: BaseConfig) -> None:
    """Raises ConfigError for what is wrong in the cluster's configuration itself, but for models
    and files that only the cluster has."""
    try:
        check_config(cfg)
    except ConfigError as e:
        absent = ("no such directory", "no such file")
        raise_if_any(p for p in e.problems if not any(words in p for words in absent))


def make_plan(cfg: BaseConfig, *, cards: Path, ranks: int) -> Plan:
    """Plans the rehearsal of `cfg` on at most `ranks` ranks. cards: a directory with the
    config.json of models that are not here. Raises ConfigError where a model is not known, or does
    not fit its layout."""
    raw: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for name, engine in engines(cfg).items():
        path = model_path(cfg, name)
        try:
            raw[path] = find_shapes(path, cards)
            check_layout(parse_hf_config(language_model(raw[path]), path), engine.parallel)
        except ValueError as e:
            problems.append(f"{name} with {name}.path={path}: {e}")
    raise_if_any(problems)
    cluster = {name: engine.parallel for name, engine in engines(cfg).items()}
    layouts, tp = shrink_layouts(cluster, ranks=ranks), max(p.tp for p in cluster.values())
    small = {
        path: shrink_model(shapes, layers=layouts.layers, cluster_tp=tp)
        for path, shapes in raw.items()
    }
    return Plan(cfg=cfg, layouts=layouts, raw=raw, small=small)


def describe(plan: Plan) -> Iterator[str]:
    """Yields what the cluster has beside what is here, line by line."""
    yield f"trainers: multiples of {smallest_world_size(plan.cfg)} -> {plan.layouts.world_size}"
    if left_out := plan.layouts.left_out:
        yield f"not run, only constructed: {', '.join(left_out)}"
    for path, raw in plan.raw.items():
        before, after = dict(language_model(raw)), dict(language_model(plan.small[path]))
        sizes = [parameters(parse_hf_config(shapes, path))[0] for shapes in (before, after)]
        yield f"{Path(path).name}: {sizes[0] / 1e9:.1f}B parameters -> {sizes[1]:,}, random"
        yield from (f"  {key}={old} -> {new}" for key, old, new in differences(before, after))
    yield from expected_memory(plan.cfg, plan.raw)


# the rehearsal


def rehearse(plan: Plan, out: Path, *, every_rank: bool, timeout: float) -> None:
    """Does all parts in turn, in the directory `out`, and prints how each went. Raises
    RehearsalFailed for the first that fails."""
    with _part("construct") as notes:
        for name in engines(plan.cfg):
            notes.append(_construct(plan, name, out, every_rank=every_rank))
    small = write_small(plan, out)
    print("changed keys of the configuration:")
    for key, old, new in changes(plan.cfg, small):
        print(f"  {key}={masked(old, key)} -> {masked(new, key)}")
    config, run, world = out / "rehearsal.yaml", run_dir(small), plan.layouts.world_size
    save_config(small, config)
    with _part("train") as notes:
        notes += start(config, run, processes=world, steps=STEPS, timeout=timeout)
    with _part("save"):
        check_saved(run)
    with _part("resume") as notes:
        notes += start(config, run, processes=world, steps=STEPS + 1, timeout=timeout)


@contextmanager
def _part(name: str) -> Iterator[list[str]]:
    """Prints how a part went when it has ended, with the notes that the list has by then."""
    notes: list[str] = []
    begun, word = time.monotonic(), "FAIL"
    try:
        yield notes
        word = "ok"
    finally:
        seconds = f"{time.monotonic() - begun:.0f} s"
        print(f"{word:6}{name:10}{seconds:>7}  {', '.join(notes)}", flush=True)


def _construct(plan: Plan, name: str, out: Path, *, every_rank: bool) -> str:
    """Constructs ranks of an engine's whole layout, and says what was constructed."""
    engine = copy.deepcopy(engines(plan.cfg)[name])
    folder = out / "shapes" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(plan.raw[model_path(plan.cfg, name)]))
    # what a CPU lacks does not change which shapes a rank has
    engine.path, engine.init_from_scratch, engine.optimizer = str(folder), False, None
    engine.fp8, engine.attention, engine.options = "none", "auto", {}
    world = smallest_world_size(plan.cfg)
    ranks = list(range(world)) if every_rank else sample_ranks(world, engine.parallel.pp)
    most = construct(name, engine, world, ranks)
    seen = f"{len(ranks)} of {world} ranks, with up to {most / 1e9:.2f}B parameters"
    return f"{name}: {seen}, have the shapes that the piece table says"


def sample_ranks(world_size: int, stages: int) -> list[int]:
    """Returns ranks to construct: one of every pipeline stage, with its place among the stage's
    ranks going round, then the last of all. Pipeline stages are blocks of neighbouring ranks."""
    block = world_size // stages
    return sorted({*(s * block + s % block for s in range(stages)), world_size - 1})


def construct(name: str, engine: TrainEngineConfig, world_size: int, ranks: Sequence[int]) -> int:
    """Constructs the model of an engine on each of `ranks`, without memory and without peers, in a
    process without process groups; returns the most parameters of a rank. engine.path: a directory
    with the model's config.json. Raises RehearsalFailed for a rank that cannot be constructed."""
    from megarl.engine.setup import construct_rank  # here, so that --help is instant

    most = 0
    for rank in ranks:
        try:
            with warnings.catch_warnings(action="ignore"):  # of fake groups, which keep no time
                most = max(most, construct_rank(engine, world_size, rank))
        except Exception as e:
            why = f"{type(e).__name__}: {str(e) or 'no reason given'}"
            raise RehearsalFailed(f"{name} on rank {rank} of {world_size}: {why}") from e
    return most


def write_small(plan: Plan, out: Path) -> BaseConfig:
    """Writes the small models to `out`, and returns the small configuration."""
    folders: dict[str, Path] = {}
    models: dict[str, str] = {}
    for name, engine in engines(plan.cfg).items():
        path = model_path(plan.cfg, name)
        if path not in folders:
            folders[path] = out / "models" / name
            write_model(plan.small[path], folders[path], head=engine.head, seed=plan.cfg.seed)
        models[name] = str(folders[path])
    return shrink_config(plan.cfg, plan.layouts, models, fileroot=str(out / "runs"))


def start(config: Path, run: Path, *, processes: int, steps: int, timeout: float) -> list[str]:
    """Starts the job of `config`, whose run directory is `run`, up to step `steps`, and says what
    it did. Raises RehearsalFailed where it ends badly, where its metrics are not finite numbers of
    those steps, or after `timeout` seconds."""
    log = config.with_name(f"to_step_{steps}.log")
    command = [sys.executable, "-m", "megarl.launcher.local", "--config", str(config)]
    command += ["--nproc", str(processes), f"total_train_steps={steps}"]
    env = {"OMP_NUM_THREADS": "1"} | os.environ | {"MEGARL_DEVICE": "cpu"}
    launcher = Child("launcher", command, env=env, log_path=log)
    try:
        launcher.wait(timeout)
    except subprocess.TimeoutExpired:
        raise RehearsalFailed(f"no end within {timeout:g} s{launcher.tail()}") from None
    finally:
        stop_all([launcher], Signals(), timeout=TERM_TIMEOUT)
    if status := launcher.poll():
        raise RehearsalFailed(f"exit status {spelled(status)}{launcher.tail()}")
    rows = [row for row in load_run(run).rows if row["step"] > 0]
    if [row["step"] for row in rows] != list(range(1, steps + 1)):
        raise RehearsalFailed(f"stats.jsonl has steps {[row['step'] for row in rows]}; see {log}")
    for row in rows:
        for name in NUMBERS:
            if name in row and not math.isfinite(math.nan if row[name] is None else row[name]):
                raise RehearsalFailed(f"{name} of step {row['step']} is not finite; see {log}")
    last = [f"{name} {rows[-1][name]:.4g}" for name in NUMBERS if name in rows[-1]]
    return [f"up to step {steps} on {processes} ranks", *last]


def check_saved(run: Path) -> None:
    """Raises RehearsalFailed unless the run has a whole checkpoint of its last step and a final
    model."""
    whole, broken = checkpoints(run)
    if broken or not whole or whole[-1].step != STEPS:
        names = [c.path.name for c in whole] + [f"{p.name} (broken)" for p in broken]
        raise RehearsalFailed(f"no checkpoint of step {STEPS} in {run / 'recover'}: {names}")
    if not any((run / "final").glob("*.safetensors")):
        raise RehearsalFailed(f"{run / 'final'} has no weights")
