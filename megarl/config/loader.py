"""Makes a recipe dataclass of YAML files and dotted overrides (build.py).

    cfg = load_config("configs/x.yaml", ["actor.optimizer.lr=1e-5", "+train_dataset.options.n=3"])
    cfg = load_config(sys.argv[1:])                  # --config X.yaml a.b=c +new.key=v
    cfg = load_config(sys.argv[1:], cls=MyConfig)    # a dataclass of one's own: keys beside ours

`a.b=c` sets a key, as `+a.b=c` and `++a.b=c` do, which Hydra tells apart. `group=name` and
`+group=name` choose files (compose.py). Setting any key of a section that is null
by default (actor.optimizer, ref, valid_dataset) makes the section real. YAML interpolation
(`${actor.path}`, `${oc.env:HOME}`) works in both. All problems are collected and raised as one
ConfigError.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, overload

from megarl.config import presets
from megarl.config.build import build, is_interpolation, leaves
from megarl.config.command_line import parse_command_line
from megarl.config.compose import (
    NOT_YAML,
    Override,
    Tree,
    compose,
    read_override,
    read_yaml,
    write_yaml,
)
from megarl.config.recipes import BaseConfig, own_code, recipe_class
from megarl.config.schema import children, find_key, show
from megarl.config.secrets import at, written_tree
from megarl.utils.files import write_whole

_SET = "_set_keys"  # of a configuration, beside its keys
CHECKED = "MEGARL_CHECKED_CONFIG"  # the variable with the text of `checked_config`
C = TypeVar("C", bound=BaseConfig)
Source = str | os.PathLike[str] | Sequence[str] | None


@overload
def load_config(
    source: Source, overrides: Sequence[str] = (), *, foreign: bool = False
) -> BaseConfig: ...
@overload
def load_config(source: Source, overrides: Sequence[str] = (), *, cls: type[C]) -> C: ...


def load_config(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    cls: type[BaseConfig] | None = None,
    foreign: bool = False,
) -> BaseConfig:
    """Returns the configuration. Raises ConfigError with everything that is wrong.

    source: a YAML path, or a command line (`--config X.yaml a.b=c ...`), or None. cls: the
    dataclass to make; without it `recipe` decides, or the `config_class` of the `trainer`. foreign:
    leaves out top-level keys that the dataclass lacks; a script that extends it reads them.
    """
    if source is not None and not isinstance(source, str | os.PathLike):
        command = parse_command_line(source, options=("config",))
        overrides = [*command.words, *command.overrides, *overrides]
        source = command.options.get("config")
    problems: list[str] = []
    tree, parsed = _read(source, overrides, problems)
    return _load(tree, parsed, problems, cls, foreign=foreign)


def checked_config(text: str, overrides: Sequence[str]) -> BaseConfig:
    """Returns the configuration that a launcher has checked: `text` is what `config_yaml` made of
    it, the overrides what the launcher knows only when processes start."""
    problems: list[str] = []
    parsed = _parsed(overrides, problems)
    return _load(read_yaml(text), parsed, problems)


def _load(
    tree: Tree,
    parsed: Sequence[Override],
    problems: list[str],
    cls: type[BaseConfig] | None = None,
    *,
    foreign: bool = False,
) -> BaseConfig:
    """Returns the configuration of the keys of a file and overrides of them."""
    cls = recipe_class(tree, _values(parsed), cls)
    _override(tree, cls, parsed, problems)
    if foreign:
        known = {field.name for field in fields(cls)}
        tree = {name: value for name, value in tree.items() if name in known}
    cfg = build(cls, tree, problems)
    object.__setattr__(cfg, _SET, tuple(leaves(tree)))
    return cfg


def own_class(source: str | os.PathLike[str] | None, overrides: Sequence[str] = ()) -> str | None:
    """Returns "recipe=name" or "trainer=name" where code of the user's decides the dataclass of a
    configuration, else None. Imports none of it. Raises ConfigError for a file that is no YAML."""
    tree, parsed = _read(source, overrides, [])
    return own_code(tree, _values(parsed))


def keys_set(cfg: BaseConfig) -> tuple[str, ...]:
    """Returns the dotted names of the keys that a file or the command line set."""
    return getattr(cfg, _SET, ())


def config_yaml(cfg: BaseConfig) -> str:
    """Returns YAML of every key with its value. Values of the environment stay the interpolations
    they were written as, so that a file holds no secret."""
    return write_yaml(written_tree(cfg))


def save_config(cfg: BaseConfig, path: str | os.PathLike[str]) -> None:
    """Writes a file that `load_config(path)` reads back as an equal config, in this environment."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, config_yaml(cfg))


def run_dir(cfg: BaseConfig) -> Path:
    """Returns the directory of everything that a run writes:
    <fileroot>/<experiment_name>/<trial_name>."""
    return Path(cfg.fileroot) / cfg.experiment_name / cfg.trial_name


def _read(
    source: str | os.PathLike[str] | None, overrides: Sequence[str], problems: list[str]
) -> tuple[Tree, list[Override]]:
    """Returns the keys of the file, and the overrides of them."""
    parsed = _parsed(overrides, problems)
    if source is None:
        return presets.below(_values(parsed)), parsed
    return compose(Path(source), parsed)


def _values(parsed: Sequence[Override]) -> dict[str, Any]:
    return {name: value for _, name, value in parsed}


def _parsed(overrides: Sequence[str], problems: list[str]) -> list[Override]:
    """Returns every override that is well-formed."""
    parsed = []
    for text in overrides:
        name, equals, value = text.lstrip("+").partition("=")
        plus = text[: len(text) - len(text.lstrip("+"))]
        if not equals or not all(name.split(".")) or len(plus) > 2:
            problems.append(f"{text!r}: an override is key=value, +key=value or ++key=value")
            continue
        try:
            parsed.append((plus, name, read_override(value)))
        except NOT_YAML as e:
            reason = " ".join(str(e).split())
            problems.append(f"{text!r}: the value is not valid YAML, quote it: {reason}")
    return parsed


def _override(
    tree: Tree, cls: type[BaseConfig], parsed: Sequence[Override], problems: list[str]
) -> None:
    """Sets keys of the tree. A text for a seam is its type; the options that the file gave a
    section's type go where it gets another."""
    changes = []
    for _, name, value in parsed:
        key = find_key(children(cls), name)
        if key is not None and key.seam and isinstance(value, str) and not is_interpolation(value):
            key = find_key(children(cls), name := f"{name}.type")
        changes.append((name.split("."), value))
        if key is not None and name.endswith(".type"):
            with contextlib.suppress(LookupError, TypeError, AttributeError):  # not in the file
                section = at(tree, name.split(".")[:-1])
                if section.get("type", key.default) != value:
                    section.pop("options", None)
    for parts, value in changes:
        section = tree
        for depth, part in enumerate(parts[:-1], start=1):
            above, inner = ".".join(parts[:depth]), section.get(part)
            key = find_key(children(cls), above)
            if key is not None and key.seam and isinstance(inner, str):
                inner = {"type": inner}
            elif inner is not None and not isinstance(inner, dict):
                name = ".".join(parts)
                problems.append(f"{name}: {above}={show(inner)} is a value, not a section")
                break
            section[part] = section = {} if inner is None else inner
        else:
            section[parts[-1]] = value
