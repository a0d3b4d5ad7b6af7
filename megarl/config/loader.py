"""YAML + dotted overrides -> a recipe dataclass, by OmegaConf's structured configs.

    cfg = load_config("configs/x.yaml", ["actor.optimizer.lr=1e-5", "+train_dataset.options.n=3"])
    cfg = load_config(sys.argv[1:])    # --config X.yaml a.b=c +new.key=v

`a.b=c` sets a key of the recipe; `+a.b=c` adds one to a free-form dict. Setting any key of a
section that is null by default (actor.optimizer, ref, valid_dataset) makes the section real.
YAML interpolation (`${actor.path}`, `${oc.env:HOME}`) works in both. All problems are collected
and raised as one ConfigError.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from megarl.config.aliases import aliased
from megarl.config.command_line import parse_command_line
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.recipes import RECIPES, BaseConfig
from megarl.config.schema import (
    Key,
    children,
    choice_problems,
    free_form_parent,
    key_table,
    nearest_keys,
    not_a_choice,
    show,
)
from megarl.config.secrets import reads_environment, remember, written_tree
from megarl.utils.staging import write_whole

DEFAULT_RECIPE = "grpo"
Tree = dict[str, Any]


def load_config(
    source: str | os.PathLike[str] | Sequence[str] | None, overrides: Sequence[str] = ()
) -> BaseConfig:
    """`source` is a YAML path, or a command line (`--config X.yaml a.b=c ...`), or None."""
    if source is not None and not isinstance(source, str | os.PathLike):
        command = parse_command_line(source, options=("config",))
        overrides = [*command.words, *command.overrides, *overrides]
        source = command.options.get("config")
    problems: list[str] = []
    tree = _read_yaml(Path(source)) if source is not None else {}
    parsed = _parse_overrides(overrides, problems)
    cls = _recipe_class(tree, parsed)
    for plus, name, value in parsed:
        _apply_override(tree, cls, plus, name, value, problems)
    node = OmegaConf.structured(cls)
    _merge(node, tree, cls, "", problems)
    cfg = _to_object(node, problems)
    if cfg is not None:  # again on the whole: interpolated values are known only now
        problems += [p for p in choice_problems(cfg) if p not in problems]
    raise_if_any(problems)
    assert isinstance(cfg, cls)
    remember(cfg, OmegaConf.to_container(node, resolve=False))
    return cfg


def config_yaml(cfg: BaseConfig) -> str:
    """Every key with its value; values of the environment as the interpolations they were written
    as, so that what stands in a file is no secret.
    """
    return OmegaConf.to_yaml(OmegaConf.create(written_tree(cfg)))


def save_config(cfg: BaseConfig, path: str | os.PathLike[str]) -> None:
    """Writes what `load_config(path)` reads back as an equal config, in the same environment."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, config_yaml(cfg))


def run_dir(cfg: BaseConfig) -> Path:
    """Where everything a run writes goes."""
    return Path(cfg.fileroot) / cfg.experiment_name / cfg.trial_name


def _read_yaml(path: Path) -> Tree:
    if not path.is_file():
        raise ConfigError([f"--config {path}: no such file"])
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as e:
        raise ConfigError([f"--config {path}: not valid YAML: {' '.join(str(e).split())}"]) from e
    if not isinstance(tree, dict):
        raise ConfigError([f"--config {path}: the top level must be keys and values"])
    return {str(k): v for k, v in tree.items()}


def _parse_overrides(overrides: Sequence[str], problems: list[str]) -> list[tuple[bool, str, Any]]:
    """(has a plus, dotted name, value as YAML reads it) of every well-formed override."""
    parsed = []
    for text in overrides:
        name, equals, value = text.removeprefix("+").partition("=")
        if not equals or not all(name.split(".")):
            problems.append(f"{text!r}: an override is key=value or +key=value")
            continue
        try:
            box = OmegaConf.to_container(OmegaConf.from_dotlist([f"v={value}"]), resolve=False)
        except (yaml.YAMLError, OmegaConfBaseException) as e:
            reason = " ".join(str(e).split())
            problems.append(f"{text!r}: the value is not valid YAML, quote it: {reason}")
            continue
        assert isinstance(box, dict)
        parsed.append((text.startswith("+"), name, box["v"] if value.strip() else ""))
    return parsed


def _recipe_class(tree: Tree, overrides: list[tuple[bool, str, Any]]) -> type[BaseConfig]:
    name = next((v for _, k, v in reversed(overrides) if k == "recipe"), tree.get("recipe"))
    name = DEFAULT_RECIPE if name is None else name
    if not isinstance(name, str) or name not in RECIPES:
        raise ConfigError([f"recipe={name}: not one of {', '.join(RECIPES)}"])
    tree["recipe"] = name
    return RECIPES[name]


def _apply_override(
    tree: Tree, cls: type[BaseConfig], plus: bool, name: str, value: Any, problems: list[str]
) -> None:
    inside = free_form_parent(cls, name)
    if plus and name in key_table(cls):
        problems.append(f"+{name}: already a key of this recipe; drop the +")
        return
    if plus and inside is None:
        free = [k.name for k in key_table(cls).values() if k.free_form]
        problems.append(
            f"+{name}: keys can be added only inside {', '.join(free)}{_hint(cls, name)}"
        )
        return
    *parents, last = name.split(".")
    for depth, part in enumerate(parents, start=1):
        if not isinstance(tree.get(part), dict):
            if tree.get(part) is not None:
                above = ".".join(parents[:depth])
                problems.append(f"{name}: {above}={show(tree[part])} is a value, not a section")
                return
            tree[part] = {}
        tree = tree[part]
    tree[last] = value


def _merge(
    node: DictConfig,
    tree: Tree,
    cls: type,
    prefix: str,
    problems: list[str],
    root: type | None = None,
) -> None:
    """Sets the values of `tree` in the structured `node` of dataclass `cls`, key by key."""
    root = root or cls
    keys = {k.name.removeprefix(prefix): k for k in children(cls, prefix)}
    for name, value in tree.items():
        key = keys.get(str(name))
        if key is None:
            problems += [_unknown(root, n) for n in _leaves(value, f"{prefix}{name}")]
        elif key.section is None or value is None or _is_interpolation(value):
            _set(node, str(name), key, value, problems)
        elif not isinstance(value, dict):
            inside = ", ".join(k.name for k in children(key.section, key.name + "."))
            problems.append(f"{key.name}={show(value)}: a section, not a value; it has {inside}")
        else:
            if OmegaConf.is_interpolation(node, name) or node[name] is None:
                OmegaConf.update(node, name, OmegaConf.structured(key.section))
            _merge(node[name], value, key.section, key.name + ".", problems, root)


def _leaves(value: Any, name: str) -> list[str]:
    """Dotted names of the plain values below `name`."""
    if not isinstance(value, dict) or not value:
        return [name]
    return [leaf for k, v in value.items() for leaf in _leaves(v, f"{name}.{k}")]


def _set(node: DictConfig, name: str, key: Key, value: Any, problems: list[str]) -> None:
    if value is None and not key.nullable:
        problems.append(f"{key.name}=null: needs a value of type {key.type_name}")
        return
    if isinstance(value, bool) and key.base_type is str:
        # YAML 1.1 reads off, on, no, yes as booleans: take them back where the word is a choice
        words = ("on", "yes", "true") if value else ("off", "no", "false")
        word = next((w for w in words if w in (key.choices or ())), None)
        if word is None:
            problems.append(f"{key.name}={show(value)}: YAML reads a boolean; quote the text")
            return
        value = word
    try:
        OmegaConf.update(node, name, value, merge=False)
    except OmegaConfBaseException:
        fix = "; write [a,b]" if key.type_name.startswith("list") else ""
        problems.append(f"{key.name}={show(value)}: not of type {key.type_name}{fix}")
        return
    if key.choices and not _is_interpolation(value) and node[name] not in key.choices:
        problems.append(not_a_choice(key, value))


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _unknown(cls: type, name: str) -> str:
    if name in key_table(cls):
        return f"{name}: dots are for the command line; in YAML nest the key in its section"
    elsewhere = _elsewhere(cls, name)
    if aliased(key_table(cls), name) is None and elsewhere:
        return f"{name}: unknown key of this recipe; {elsewhere}"
    also = f" ({elsewhere})" if elsewhere.endswith(" it") else ""
    return f"{name}: unknown key{_hint(cls, name)}{also}"


def _elsewhere(cls: type, name: str) -> str:
    """Which other recipe has the key, under this name or under ours; empty where none has."""
    for recipe, other in RECIPES.items():
        table = key_table(other)
        if other is not cls and name in table:
            return f"recipe={recipe} has it"
        if other is not cls and (ours := aliased(table, name)) is not None:
            return f"recipe={recipe} has {ours}"
    return ""


def _hint(cls: type, name: str) -> str:
    near = nearest_keys(cls, name)
    return f"; did you mean {near[0]}?" if near else "; --help lists all keys"


def _to_object(node: DictConfig, problems: list[str]) -> Any:
    """The dataclass with interpolations resolved; None, with the reason noted, if it cannot be."""
    try:
        if missing := sorted(OmegaConf.missing_keys(node)):
            problems += [f"{name}: required, set it" for name in missing]
            return None
        return OmegaConf.to_object(node)
    except OmegaConfBaseException as e:
        problems.append(_unreadable(node, e))
        return None


def _unreadable(node: DictConfig, e: OmegaConfBaseException) -> str:
    """Why a value is none; the environment's is not shown."""
    first = str(e).splitlines()[0]
    if not e.full_key:
        return first
    text = _as_written(node, e.full_key) if isinstance(e, ValidationError) else None
    if text and reads_environment(text, OmegaConf.to_container(node, resolve=False)):
        return f"{e.full_key}={text}: the value behind it is not of the key's type"
    return f"{e.full_key}: {first}"


def _as_written(node: DictConfig, name: str) -> str | None:
    """The text of the interpolation at the dotted `name`, None where there is another value."""
    value: Any = OmegaConf.to_container(node, resolve=False)
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value if _is_interpolation(value) else None
