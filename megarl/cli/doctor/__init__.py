"""Looks whether a host, or a whole cluster, is ready for a recipe.

    megarl doctor X.yaml [--wait S] [key=value ...]
    srun --ntasks-per-node=1 megarl doctor X.yaml               (every host of a Slurm allocation)
    torchrun --nnodes N ... -m megarl.cli doctor X.yaml         (every host)

    --wait S     seconds to wait for the other hosts' findings (120)

A line for each thing: OK, WARN or FAIL, with the fix. It looks at the configuration, models and
tokenizer, versions, GPUs and NCCL's environment, the file root (room, speed, and on several hosts
whether they really share it), ports, credentials. It writes 128 MiB into the file root and removes
them. On several hosts each writes its findings there, too, and the first host prints them all. The
exit status is 1 where something FAILs, 2 where the configuration cannot be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.cli.doctor.host import (
    credential_findings,
    environment_findings,
    gpus_here,
    memory_findings,
    place_findings,
    port_findings,
)
from megarl.cli.doctor.peers import (
    FAIL,
    OK,
    WARN,
    Finding,
    Place,
    gather,
    merged,
    print_findings,
    tell,
    this_place,
)
from megarl.cli.doctor.versions import version_findings
from megarl.config.check import check_config
from megarl.config.command_line import help_or_command_line, one_config
from megarl.config.earlier_run import check_run_dir
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.config.recipe_engines import engines, model_path
from megarl.config.recipes import BaseConfig
from megarl.models.hf_config import check_layout, parse_hf_config
from megarl.models.value_model import language_model
from megarl.planning.shapes import find_shapes
from megarl.trainer.named import check_tokenizer
from megarl.trainer.preflight import check_models
from megarl.utils.importing import add_working_directory

_ABSENT = ("no such directory", "no such file")  # words of problems that `model` reports


def main(argv: Sequence[str] | None = None) -> int:
    """Examines what `argv` names and returns the exit status. Raises ConfigError where the
    configuration cannot be read."""
    command = help_or_command_line(argv, __doc__ or "", options=("config", "wait"))
    if command is None:
        return 0
    add_working_directory()
    source = one_config(command, "megarl doctor X.yaml [key=value ...]")
    cfg = load_config(str(source), command.overrides)
    try:
        place, wait = this_place(os.environ), float(command.options.get("wait", "120"))
    except ValueError as e:
        raise ConfigError([str(e)]) from e
    if place is not None and not place.speaks:
        return 0
    shown = list(findings(cfg, source.parent / "models"))
    if place is None:
        why = "not looked at: this is one host; under srun or torchrun every host writes there"
        shown.append(Finding(OK, "shared storage", why))
    elif (everyone := _of_all_hosts(place, Path(cfg.fileroot).absolute(), shown, wait)) is not None:
        shown = everyone
    if place is None or place.node == 0:
        print_findings(shown)
    return int(any(f.status == FAIL for f in shown))


def _of_all_hosts(
    place: Place, root: Path, own: Sequence[Finding], wait: float
) -> list[Finding] | None:
    """Returns what the first host prints; None on others. A host that cannot write into the file
    root prints its own findings."""
    try:
        tell(place, root, own)
        return merged(gather(place, root, wait)) if place.node == 0 else None
    except OSError as e:
        fix = "set fileroot to a directory that every host can write to"
        lost = Finding(FAIL, "shared storage", f"{root}: {e.strerror}", fix)
        if place.node:
            print_findings([*own, lost])
        return [*own, lost]


def findings(cfg: BaseConfig, cards: Path) -> Iterator[Finding]:
    """Yields what there is to say about this host. cards: a directory with the config.json of
    models that are not here."""
    gpus = gpus_here()
    yield from config_findings(cfg)
    yield from model_findings(cfg, cards)
    yield from version_findings(cfg, gpus=gpus)
    yield from environment_findings(cfg, os.environ, gpus)
    yield from memory_findings()
    yield from place_findings(cfg, cards)
    yield from port_findings(cfg, os.environ)
    yield from credential_findings(cfg, os.environ)


def config_findings(cfg: BaseConfig) -> Iterator[Finding]:
    """Yields a finding for each problem of the configuration itself and of its run directory."""
    found = []
    for check in (check_config, check_run_dir):
        try:
            check(cfg)
        except ConfigError as e:
            found += [p for p in e.problems if not any(words in p for words in _ABSENT)]
    for problem in found:
        text, _, fix = problem.partition("; ")
        yield Finding(FAIL, "configuration", text, fix)
    if not found:
        yield Finding(OK, "configuration", "is sound")


def model_findings(cfg: BaseConfig, cards: Path) -> Iterator[Finding]:
    """Yields findings about models: whether they are here, fit their layouts and have room for
    every token of their tokenizer."""
    paths = {name: model_path(cfg, name) for name in engines(cfg)}
    absent = {path for path in paths.values() if not Path(path).is_dir()}
    for name, path in paths.items():
        yield _layout(cfg, name, path, cards)
    for path in sorted(absent):
        fix = f"hf download {path} --local-dir DIR on storage that all hosts share, and name DIR"
        text = f"{path} is not a directory here, so its tokenizer was not looked at"
        yield Finding(WARN if "/" in path else FAIL, "model", text, fix)
    if absent:
        return
    try:
        check_models(cfg)
        check_tokenizer(cfg)
    except ConfigError as e:
        for problem in e.problems:
            text, _, fix = problem.partition("; ")
            yield Finding(FAIL, "tokenizer and model", text, fix)
        return
    yield Finding(OK, "tokenizer and model", "every token has its row in the models' vocabularies")


def _layout(cfg: BaseConfig, name: str, path: str, cards: Path) -> Finding:
    try:
        raw = find_shapes(path, cards)
        m = parse_hf_config(language_model(raw), path)
        check_layout(m, engines(cfg)[name].parallel)
    except ValueError as e:
        text, _, fix = str(e).partition("; ")
        return Finding(FAIL, f"{name} layout", text, fix)
    return Finding(OK, f"{name} layout", f"{m.family} with {m.num_layers} layers fits its layout")
