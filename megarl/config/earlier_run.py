"""Compares what a run directory holds from an earlier start with the configuration now. No torch.

<run>/recover/step_000123/ is a checkpoint: trainer.pt and a directory for each trained engine
(actor, critic, ...) hold the state; trainer.json describes it and is written last. The directory is
renamed into place when it is whole (utils/files.py), so a name without its trainer.json was not
written by us, or damaged since.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.config.compose import NOT_YAML
from megarl.config.engine import overridden
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.loader import config_yaml, run_dir
from megarl.config.recipe_engines import engines, model_override, model_path, saved_engines
from megarl.config.recipes import BaseConfig
from megarl.config.secrets import MASK, flat, masked
from megarl.utils.files import broken_seal

STATS_FILE, CONFIG_FILE = "stats.jsonl", "config.yaml"
RECOVER_DIR, MARKER, FINAL_DIR = "recover", "trainer.json", "final"
_STEP = re.compile(r"step_(\d{6,})")
# of config.json: what says nothing about the function the model computes
_VOLATILE = ("transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache")
# what a launcher gives anew at every start
_PER_START = ("rollout.addresses.",)
# what another run of the same work has otherwise
_OF_A_RUN = (*_PER_START, "fileroot.", "experiment_name.", "trial_name.", "record.", "replay.")
Flat = dict[str, Any]  # values by dotted names


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Names a whole checkpoint. `info` is its trainer.json: version, epoch, elapsed_s, models (the
    config.json of each), and the checksum of trainer.pt."""

    path: Path
    step: int
    info: dict[str, Any]


def checkpoints(directory: Path) -> tuple[list[Checkpoint], list[Path]]:
    """Returns the whole checkpoints of a run directory, oldest first, and the incomplete ones."""
    whole, broken = [], []
    for path in (directory / RECOVER_DIR).glob("step_*"):
        if (match := _STEP.fullmatch(path.name)) is None:
            continue
        try:
            info = json.loads((path / MARKER).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            info = None
        if broken_seal(info):
            broken.append(path)
        else:
            whole.append(Checkpoint(path=path, step=int(match[1]), info=info))
    return sorted(whole, key=lambda c: c.step), sorted(broken)


def check_run_dir(cfg: BaseConfig, seen: BaseConfig | None = None) -> None:
    """Raises ConfigError where `cfg` may not use its run directory, or cannot continue its run.
    seen: the same with paths as this machine has them, where those are others."""
    seen = seen or cfg
    directory = run_dir(seen)
    if cfg.recover.mode == "disabled":
        if (directory / STATS_FILE).exists():
            fix = "set another trial_name, recover.mode=auto to continue the run, or move it"
            raise ConfigError(f"recover.mode=disabled: {directory} holds a run already; {fix}")
        return
    whole, _ = checkpoints(directory)
    if whole:
        raise_if_any(_contradictions(cfg, seen, whole[-1]))


def ended(cfg: BaseConfig) -> str | None:
    """Returns a line where nothing is left of the run in `cfg`'s directory: its newest checkpoint
    is of step total_train_steps or beyond, and the final model is there. None where something is,
    and where only the data tell (total_train_epochs)."""
    total, run = cfg.total_train_steps, run_dir(cfg)
    whole, _ = checkpoints(run) if cfg.recover.mode != "disabled" else ([], [])
    if total is None or not whole or whole[-1].step < total:
        return None
    if cfg.saver.final and not is_newer(run / FINAL_DIR, whole[-1].path / MARKER):
        return None
    return ended_line(run, whole[-1].step, total)


def ended_line(run: Path, step: int, total: int) -> str:
    """Says that a start finds nothing to do."""
    return f"the run in {run} ended at step {step} of {total}: nothing to do"


def is_newer(final: Path, marker: Path) -> bool:
    """Returns whether the model in `final` was saved after the checkpoint of `marker`."""
    return final.exists() and final.stat().st_mtime >= marker.stat().st_mtime


def _contradictions(cfg: BaseConfig, seen: BaseConfig, newest: Checkpoint) -> Iterator[str]:
    run = newest.path.parent.parent
    away = f"the run in {run} cannot continue so; set another trial_name, or move it"
    tree = _saved_tree(run)
    before, now = flat(tree), flat(yaml.safe_load(config_yaml(cfg)))
    if before.get("recipe", cfg.recipe) != cfg.recipe:
        yield f"recipe={cfg.recipe}: it was {before['recipe']}; {away}"
        return
    saved = saved_engines(cfg)  # what is frozen is loaded anew
    if "ref" in newest.info["models"] and "ref" not in saved:
        why = "the reference of this run has followed the policy, and is not that of ref.path"
        fix = "set more steps than the run has to keep it as it is, or set another trial_name"
        yield f"ref.refresh_every=null: {why}; {fix}"
    for name in (n for n in saved if n in newest.info["models"]):
        key, path = f"{name}.path", engines(cfg)[name].path
        behind = _value_now(tree, key)  # an empty path is one, too
        if behind is not None and Path(behind).resolve() != Path(path).resolve():
            yield f"{key}={now[key]}: it was {before[key]}; {away}"
            continue
        apart = differences(newest.info["models"][name], architecture(seen, name))
        changed = [f"{k} {a} -> {b}" for k, a, b in apart if k.split(".")[-1] not in _VOLATILE]
        if changed:
            names = ", ".join(sorted(changed))
            yield f"{key}={now[key]}: its config.json has changed since ({names}); {away}"


def architecture(cfg: BaseConfig, name: str) -> dict[str, Any]:
    """Returns the engine's config.json, with the keys of override_config as that has them."""
    file = Path(model_path(cfg, name)) / "config.json"
    return overridden(json.loads(file.read_text(encoding="utf-8")), model_override(cfg, name))


def config_changes(cfg: BaseConfig) -> list[str]:
    """Returns `key: old -> new` for every key that differs from the run directory's config.yaml, by
    how it is written: a variable that has another value now is no difference."""
    before, now = flat(_saved_tree(run_dir(cfg))), flat(yaml.safe_load(config_yaml(cfg)))
    return _lines_apart(before, now, "->", _PER_START) if before else []


def configs_apart(a: Path, b: Path) -> list[str]:
    """Returns `key: a's value | b's value` for every key of which two run directories' config.yaml
    differ, but for those that name a run or record it."""
    return _lines_apart(flat(_saved_tree(a)), flat(_saved_tree(b)), "|", _OF_A_RUN)


def _lines_apart(a: Flat, b: Flat, sign: str, but: tuple[str, ...]) -> list[str]:
    """Returns a line for each key that differs, and is or lies in none of `but`, each with a dot
    at its end."""
    keys = [key for key, _, _ in differences(a, b) if not f"{key}.".startswith(but)]
    return [f"{k}: {_shown(a, k, b)} {sign} {_shown(b, k, a)}" for k in keys]


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields (dotted key, value before, value after) for each plain value that differs."""
    old, new = flat(before), flat(after)
    for key in old | new:
        if old.get(key) != new.get(key):
            yield key, old.get(key), new.get(key)


def _shown(config: Flat, key: str, other: Flat) -> Any:
    """Returns a value as the log may show it: masked where the other start takes it from the
    environment, since it may be what that start hides there."""
    value = config.get(key)
    hidden = "${" in str(other.get(key)) and "${" not in str(value) and value is not None
    return MASK if hidden else masked(value, key)


def _value_now(tree: dict[str, Any], key: str) -> Any:
    """Returns the value of a key with the environment of now; as it is written where that lacks a
    variable, and None where there is no such key."""
    from omegaconf import OmegaConf  # here, as only a run that goes on needs its long import
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.select(OmegaConf.create(tree), key)
    except OmegaConfBaseException:
        return flat(tree).get(key)


def _saved_tree(directory: Path) -> dict[str, Any]:
    """Returns what config.yaml holds, nothing where there is none. Raises ConfigError."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (*NOT_YAML, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: damaged: no YAML of keys; remove it to continue the run")
    return tree
