"""Runs a cluster's recipe small, on this machine, before it costs a GPU hour.

    megarl rehearse X.yaml [--ranks N] [--out DIR] [--every-rank] [key=value ...]

    --ranks N      trainer processes at most (8)
    --out DIR      keep everything in DIR, which must not exist; else a temporary directory, which
                   stays only after a failure
    --every-rank   construct every rank of the smallest world that fits, instead of one of each
                   pipeline stage
    --timeout S    seconds that each of the two starts may take (900)

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
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.cli.rehearse.construct import Constructed, construct, sample_ranks
from megarl.cli.rehearse.job import STEPS, changes, shrink_config
from megarl.cli.rehearse.model import write_model
from megarl.cli.rehearse.plan import Plan, check_recipe, make_plan
from megarl.cli.rehearse.real import Ran, RehearsalFailed, check_saved, start
from megarl.cli.rehearse.table import Report
from megarl.config.command_line import CommandLine, help_or_command_line, one_config
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config, run_dir, save_config
from megarl.config.recipe_engines import engines, smallest_world_size
from megarl.config.recipes import BaseConfig
from megarl.utils.importing import add_working_directory
from megarl.utils.isolated import call_isolated

FAILED = 1
CONSTRUCT_TIMEOUT = 1800.0  # seconds for all ranks of one engine
MOST_RANKS = 32  # constructed of one engine, without --every-rank


def main(argv: Sequence[str] | None = None) -> int:
    """Rehearses the configuration that `argv` names and returns the exit status. Raises ConfigError
    for a wrong one."""
    command = help_or_command_line(
        argv, __doc__ or "", options=("config", "ranks", "out", "timeout"), switches=("every-rank",)
    )
    if command is None:
        return 0
    add_working_directory()
    source = one_config(command, "megarl rehearse X.yaml [key=value ...]")
    cfg = load_config(str(source), command.overrides)
    check_recipe(cfg)
    plan = make_plan(cfg, cards=source.parent / "models", ranks=_number(command, "ranks", 8))
    out, kept = _place(command), "out" in command.options
    report = Report(plan, source)
    report.begin()
    try:
        _rehearse(plan, out, report, command)
    except RehearsalFailed as e:
        report.failed(str(e), out)
        return FAILED
    if not kept:
        shutil.rmtree(out)
    report.passed(out if kept else None)
    return 0


def _rehearse(plan: Plan, out: Path, report: Report, command: CommandLine) -> None:
    """Does all parts in turn. Raises RehearsalFailed for the first that fails."""
    with report.part("construct"):
        ranks = None if "every-rank" in command.switches else MOST_RANKS
        for made in _construct(plan, out, ranks):
            report.constructed(made)
    small = _write(plan, out)
    report.changed(changes(plan.cfg, small))
    config, run = out / "rehearsal.yaml", run_dir(small)
    save_config(small, config)
    timeout = float(_number(command, "timeout", 900))
    world = plan.layouts.world_size

    def run_to(steps: int) -> Ran:
        return start(config, run, processes=world, steps=steps, timeout=timeout)

    with report.part("train"):
        report.ran(run_to(STEPS))
    with report.part("save"):
        check_saved(run)
    with report.part("resume"):
        report.ran(run_to(STEPS + 1))


def _construct(plan: Plan, out: Path, limit: int | None) -> Iterator[Constructed]:
    """Constructs at most `limit` ranks of each engine's whole layout; None is all of them."""
    world = smallest_world_size(plan.cfg)
    for name, engine in engines(plan.cfg).items():
        engine = copy.deepcopy(engine)
        folder = out / "shapes" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(plan.raw[name]))
        # what a CPU lacks does not change which shapes a rank has
        engine.path, engine.init_from_scratch, engine.optimizer = str(folder), False, None
        engine.fp8, engine.attention = "none", "auto"
        engine.parallel.cp_comm_type, engine.moe.token_dispatcher = "auto", "alltoall"
        whole = list(range(world))
        ranks = whole if limit is None else sample_ranks(world, engine.parallel.pp, limit)
        made = call_isolated(construct, name, engine, world, ranks, timeout=CONSTRUCT_TIMEOUT)
        if isinstance(made, str):
            raise RehearsalFailed(made)
        yield made


def _write(plan: Plan, out: Path) -> BaseConfig:
    """Writes the small models, and returns the small configuration."""
    written: dict[str, str] = {}
    models = {}
    for name, engine in engines(plan.cfg).items():
        path = plan.paths[name]
        if path not in written:
            folder = out / "models" / name
            write_model(plan.small[name], folder, head=engine.head, seed=plan.cfg.seed)
            written[path] = str(folder)
        models[name] = written[path]
    return shrink_config(plan.cfg, plan.layouts, models, fileroot=str(out / "runs"))


def _number(command: CommandLine, name: str, default: int) -> int:
    text = command.options.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError([f"--{name} {text}: must be a whole number > 0"])
    return int(text)


def _place(command: CommandLine) -> Path:
    """Makes the directory that everything is written to."""
    if "out" not in command.options:
        return Path(tempfile.mkdtemp(prefix="megarl-rehearsal-"))
    out = Path(command.options["out"]).absolute()
    if out.exists():
        raise ConfigError([f"--out {out}: exists already; name a new directory"])
    out.mkdir(parents=True)
    return out
