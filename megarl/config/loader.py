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

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, overload

from megarl.config import presets
from megarl.config.build import build, is_interpolation, is_seam, leaves
from megarl.config.command_line import parse_command_line
from megarl.config.compose import Composer, Tree, group_file, has_group, merged
from megarl.config.errors import raise_if_any
from megarl.config.hub import fetch_hub_models
from megarl.config.recipes import BaseConfig, own_code, recipe_class
from megarl.config.schema import (
    choice_problems,
    find_key,
    show,
)
from megarl.config.secrets import written_tree
from megarl.config.unread import begin_script, note_set
from megarl.config.words import NOT_YAML, read_override, read_yaml, write_yaml
from megarl.utils.env import quiet_libraries, set_collective_timeout
from megarl.utils.files import write_whole

CHECKED = "MEGARL_CHECKED_CONFIG"  # the variable with the text of `checked_config`
Override = tuple[str, str, Any]
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
    parsed = _parse_overrides(overrides, problems)
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
    changes = [(_type_of_seam(cls, name, value), value) for _, name, value in parsed]
    for name, value in changes:
        _drop_options(tree, cls, name, value)
    for name, value in changes:
        _apply_override(tree, cls, name, value, problems)
    if foreign:
        known = {field.name for field in fields(cls)}
        tree = {name: value for name, value in tree.items() if name in known}
    cfg = build(cls, tree, problems)
    if cfg is not None:
        problems += choice_problems(cfg)
    raise_if_any(problems)
    assert isinstance(cfg, cls)
    note_set(cfg, leaves(tree))
    return cfg


def own_class(source: str | os.PathLike[str] | None, overrides: Sequence[str] = ()) -> str | None:
    """Returns "recipe=name" or "trainer=name" where code of the user's decides the dataclass of a
    configuration, else None. Imports none of it. Raises ConfigError for a file that is no YAML."""
    tree, parsed = _read(source, overrides, [])
    return own_code(tree, _values(parsed))


def load_expr_config(args: Sequence[str], cls: type[C]) -> tuple[C, str | None]:
    """Returns a script's configuration and the path of its YAML file.

    cls: its dataclass, a recipe's (GRPOConfig, ...) or the script's own below one. args: the
    command line, `--config X.yaml a.b=c +new.key=v`. Models on the hub are fetched, and their paths
    are those of the snapshots; collective_timeout counts from now on. Raises ConfigError for a
    configuration that is wrong, and for a model that cannot be had. Warnings of torchdata and
    megatron-core that a user can do nothing about are hidden.
    """
    config = load_config(args, cls=cls)
    fetch_hub_models(config)
    set_collective_timeout(config.collective_timeout)
    begin_script(config)
    quiet_libraries()
    return config, parse_command_line(args, options=("config",)).options.get("config")


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
    parsed = _parse_overrides(overrides, problems)
    if source is None:
        return presets.below(_values(parsed)), parsed
    return _compose(Path(source), parsed)


def _values(parsed: Sequence[Override]) -> dict[str, Any]:
    return {name: value for _, name, value in parsed}


def _compose(path: Path, parsed: list[Override]) -> tuple[Tree, list[Override]]:
    """Returns the keys of the file with its defaults, and the overrides that chose no file."""
    plain = {name: value for plus, name, value in parsed if plus != "+" and "." not in name}
    composer = Composer(
        switches={k: v for k, v in plain.items() if v is None or isinstance(v, str)}
    )
    tree, rest = composer.read(path), []
    tree = merged(tree, presets.below(plain))
    for plus, name, value in parsed:
        if plus == "+" and "." not in name and isinstance(value, str) and has_group(path, name):
            tree = merged(tree, composer.read(group_file(path, name, value)))
        elif not (name in composer.groups and (value is None or isinstance(value, str))):
            rest.append((plus, name, value))
    return tree, rest


def _parse_overrides(overrides: Sequence[str], problems: list[str]) -> list[Override]:
    """Returns (its plus signs, dotted name, value with words) of every well-formed one."""
    parsed = []
    for text in overrides:
        name, equals, value = text.lstrip("+").partition("=")
        plus = text[: len(text) - len(text.lstrip("+"))]
        if not equals or not all(name.split(".")) or len(plus) > 2:
            problems.append(f"{text!r}: an override is key=value, +key=value or ++key=value")
            continue
        try:
            read = read_override(value)
        except NOT_YAML as e:
            reason = " ".join(str(e).split())
            problems.append(f"{text!r}: the value is not valid YAML, quote it: {reason}")
            continue
        parsed.append((plus, name, read))
    return parsed


def _apply_override(
    tree: Tree, cls: type[BaseConfig], name: str, value: Any, problems: list[str]
) -> None:
    """Sets the key `name` of the tree."""
    *parents, last = name.split(".")
    for depth, part in enumerate(parents, start=1):
        above = ".".join(parents[:depth])
        if is_seam(find_key(cls, above)) and isinstance(tree.get(part), str):
            tree[part] = {"type": tree[part]}
        if not isinstance(tree.get(part), dict):
            if tree.get(part) is not None:
                problems.append(f"{name}: {above}={show(tree[part])} is a value, not a section")
                return
            tree[part] = {}
        tree = tree[part]
    tree[last] = value


def _type_of_seam(cls: type[BaseConfig], name: str, value: Any) -> str:
    """Returns the key that `name` is short for: of a seam its type, where a text is given."""
    short = isinstance(value, str) and not is_interpolation(value)
    return f"{name}.type" if short and is_seam(find_key(cls, name)) else name


def _drop_options(tree: Tree, cls: type[BaseConfig], name: str, value: Any) -> None:
    """Drops the options that the file gave a section's type, where `name` sets another type."""
    *sections, last = name.split(".")
    key = find_key(cls, name)
    if last != "type" or key is None:
        return
    for section in sections:
        tree = tree.get(section, {})
        if not isinstance(tree, dict):
            return
    if tree.get(last, key.default) != value:
        tree.pop("options", None)
