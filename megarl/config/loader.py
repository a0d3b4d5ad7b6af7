"""Makes a recipe dataclass of YAML files and dotted overrides, by OmegaConf's structured configs.

    cfg = load_config("configs/x.yaml", ["actor.optimizer.lr=1e-5", "+train_dataset.options.n=3"])
    cfg = load_config(sys.argv[1:])                  # --config X.yaml a.b=c +new.key=v
    cfg = load_config(sys.argv[1:], cls=MyConfig)    # a dataclass of one's own: keys beside ours

`a.b=c` sets a key of the recipe; `+a.b=c` adds one to a free-form dict; `++a.b=c` does either.
`group=name` and `+group=name` choose files (compose.py). Setting any key of a section that is null
by default (actor.optimizer, ref, valid_dataset) makes the section real. YAML interpolation
(`${actor.path}`, `${oc.env:HOME}`) works in both. All problems are collected and raised as one
ConfigError.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, overload

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from megarl.config import presets
from megarl.config.aliases import NEEDLESS, aliased
from megarl.config.allocation import AllocationMode
from megarl.config.base import SeamConfig
from megarl.config.command_line import parse_command_line
from megarl.config.compose import Composer, Tree, group_file, has_group, merged
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.hub import fetch_hub_models
from megarl.config.recipes import RECIPES, BaseConfig, main_role, own_code, recipe_class
from megarl.config.schema import (
    Key,
    children,
    choice_problems,
    find_key,
    free_form_parent,
    key_table,
    nearest_keys,
    not_a_choice,
    show,
)
from megarl.config.secrets import reads_environment, remember, written_tree
from megarl.config.unread import begin_script, note_set
from megarl.config.words import NOT_YAML, Word, as_type, read_override
from megarl.utils.collective_timeout import set_collective_timeout
from megarl.utils.quiet import quiet_libraries
from megarl.utils.staging import write_whole

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
    cls = recipe_class(tree, _values(parsed), cls)
    parsed = [(plus, _type_of_seam(cls, name, value), value) for plus, name, value in parsed]
    for _, name, value in parsed:
        _drop_options(tree, cls, name, value)
    for plus, name, value in parsed:
        _apply_override(tree, cls, plus, name, value, problems)
    if foreign:
        known = {field.name for field in fields(cls)}
        tree = {name: value for name, value in tree.items() if name in known}
    node = copy.deepcopy(_defaults(cls))  # type: ignore[arg-type]  # a class has a hash
    _merge(node, tree, cls, "", problems)
    _allocate(node, tree, cls, problems)
    cfg = _to_object(node, problems)
    if cfg is not None:  # again on the whole: interpolated values are known only now
        problems += [p for p in choice_problems(cfg) if p not in problems]
    raise_if_any(problems)
    assert isinstance(cfg, cls)
    remember(cfg, OmegaConf.to_container(node, resolve=False))
    note_set(cfg, _leaves(tree))
    return cfg


@functools.cache
def _defaults(cls: type[BaseConfig]) -> DictConfig:
    node = OmegaConf.structured(cls)
    assert isinstance(node, DictConfig)
    return node


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
    return OmegaConf.to_yaml(OmegaConf.create(written_tree(cfg)))


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
            OmegaConf.from_dotlist([f"v={value}"])
            read = read_override(value)
        except NOT_YAML as e:
            reason = " ".join(str(e).split())
            problems.append(f"{text!r}: the value is not valid YAML, quote it: {reason}")
            continue
        parsed.append((plus, name, read))
    return parsed


def _apply_override(
    tree: Tree, cls: type[BaseConfig], plus: str, name: str, value: Any, problems: list[str]
) -> None:
    table = key_table(cls)
    if plus == "+" and name in table:
        problems.append(f"+{name}: already a key of this recipe; drop the +")
        return
    if plus == "+" and free_form_parent(cls, name) is None:
        ours = aliased(table, name)
        if ours and free_form_parent(cls, ours):
            problems.append(_unknown(cls, name))
            return
        free = [k.name for k in table.values() if k.free_form]
        problems.append(
            f"+{name}: keys can be added only inside {', '.join(free)}{_hint(cls, name)}"
        )
        return
    *parents, last = name.split(".")
    for depth, part in enumerate(parents, start=1):
        above = ".".join(parents[:depth])
        if _is_seam(find_key(cls, above)) and isinstance(tree.get(part), str):
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
    short = isinstance(value, str) and not _is_interpolation(value)
    return f"{name}.type" if short and _is_seam(find_key(cls, name)) else name


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


def _is_seam(key: Key | None) -> bool:
    return key is not None and key.section is not None and issubclass(key.section, SeamConfig)


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
    for name, value in ((str(n), v) for n, v in tree.items()):
        key = keys.get(name)
        if _is_seam(key) and isinstance(value, str) and not _is_interpolation(value):
            value = {"type": value}
        # a choice of ours may be a section elsewhere, as `algorithm` is in verl
        if key is None or (key.choices and value and isinstance(value, dict)):
            problems += [_unknown(root, n) for n in _leaves(value, f"{prefix}{name}")]
        elif key.element is not None and isinstance(value, dict):
            _merge_elements(node[name], key.name, key.element, value, problems, root)
        elif key.section is None or value is None or _is_interpolation(value):
            _set(node, name, key, value, problems)
        elif not isinstance(value, dict):
            inside = ", ".join(k.name for k in children(key.section, key.name + "."))
            problems.append(f"{key.name}={show(value)}: a section, not a value; it has {inside}")
        else:
            if OmegaConf.is_interpolation(node, name) or node[name] is None:
                OmegaConf.update(node, name, OmegaConf.structured(key.section), merge=False)
            _merge(node[name], value, key.section, key.name + ".", problems, root)


def _merge_elements(
    node: DictConfig, key: str, element: type, sections: Tree, problems: list[str], root: type
) -> None:
    """Sets the sections of the dict at `key`, by name, each of the dataclass `element`."""
    for name, value in ((str(n), v) for n, v in sections.items()):
        if not isinstance(value, dict):
            problems.append(f"{key}.{name}={show(value)}: a section, not a value")
            continue
        if name not in node:
            node[name] = OmegaConf.structured(element)
        _merge(node[name], value, element, f"{key}.{name}.", problems, root)


def _allocate(node: DictConfig, tree: Tree, cls: type[BaseConfig], problems: list[str]) -> None:
    """Sets the keys that allocation_mode decides, but for those that `tree` has: the checks
    (check_cluster.py) compare them."""
    try:
        text = node.allocation_mode
        decided = AllocationMode.from_str(text).keys(main_role(cls)) if text else {}
    except ConfigError as e:
        problems += e.problems
        return
    except OmegaConfBaseException:  # an interpolation, which is reported with all others
        return
    for name, value in decided.items():
        if name in key_table(cls) and not _has(tree, name):
            OmegaConf.update(node, name, value)


def _has(tree: Any, name: str) -> bool:
    """Returns whether the dotted `name` is set in `tree`."""
    for part in name.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


def _leaves(value: Any, name: str = "") -> list[str]:
    """Returns the dotted names of the plain values below `name`."""
    if not isinstance(value, dict) or not value:
        return [name]
    return [leaf for k, v in value.items() for leaf in _leaves(v, f"{name}.{k}".lstrip("."))]


def _set(node: DictConfig, name: str, key: Key, value: Any, problems: list[str]) -> None:
    if value is None and not key.nullable:
        problems.append(f"{key.name}=null: needs a value of type {key.type_name}")
        return
    typed = as_type(value, key.annotation)
    if key.choices and not key.allows(typed) and isinstance(value, Word):
        # YAML 1.1 reads off, on, no, yes as booleans: so may they be meant where one is a choice
        alike = (
            ("on", "yes", "true", key.true) if value.untyped() is True else ("off", "no", "false")
        )
        typed = next((word for word in alike if word in key.choices), typed)
    try:
        if key.base_type is bool and isinstance(value, Word) and not _is_truth(typed):
            raise ValidationError(value)  # OmegaConf takes every number
        OmegaConf.update(node, name, typed, merge=False)
    except OmegaConfBaseException:
        fix = "; write [a,b]" if key.type_name.startswith("list") else ""
        shown = show(value if isinstance(value, str) else typed)
        problems.append(f"{key.name}={shown}: not of type {key.type_name}{fix}")
        return
    if key.choices and not _is_interpolation(value) and not key.allows(node[name]):
        problems.append(not_a_choice(key, value))


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or _is_interpolation(value)


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
    """Says which other recipe has the key, under this name or under ours; empty where none has."""
    for recipe, other in RECIPES.items():
        table = key_table(other)
        if other is not cls and name in table:
            return f"recipe={recipe} has it"
        if other is not cls and (ours := aliased(table, name)) is not None:
            return f"recipe={recipe} has {ours}"
    return ""


def _hint(cls: type, name: str) -> str:
    if (needless := NEEDLESS.get(name.rpartition(".")[2])) is not None:
        return f"; {needless}"
    near = nearest_keys(cls, name)
    return f"; did you mean {near[0]}?" if near else "; --help lists all keys"


def _to_object(node: DictConfig, problems: list[str]) -> Any:
    """Returns the dataclass with interpolations resolved; None, and notes why, if it cannot be."""
    try:
        if missing := sorted(OmegaConf.missing_keys(node)):
            problems += [f"{name}: required, set it" for name in missing]
            return None
        return OmegaConf.to_object(node)
    except OmegaConfBaseException as e:
        problems.append(_unreadable(node, e))
        return None


def _unreadable(node: DictConfig, e: OmegaConfBaseException) -> str:
    """Says why a value cannot be read, without showing a value of the environment."""
    first = str(e).splitlines()[0]
    if not e.full_key:
        return first
    text = _as_written(node, e.full_key) if isinstance(e, ValidationError) else None
    if text and reads_environment(text, OmegaConf.to_container(node, resolve=False)):
        return f"{e.full_key}={text}: the value behind it is not of the key's type"
    return f"{e.full_key}: {first}"


def _as_written(node: DictConfig, name: str) -> str | None:
    """Returns the text of the interpolation at the dotted `name`, None for another value."""
    value: Any = OmegaConf.to_container(node, resolve=False)
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value if _is_interpolation(value) else None
