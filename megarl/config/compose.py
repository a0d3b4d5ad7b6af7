"""Reads a YAML file together with the files that its `defaults:` list names.

    defaults:
      - base/sums            # a file, relative to this one; .yaml may be left out
      - model: qwen3         # a group: the file model/qwen3.yaml; model=llama on the command line
                             # takes model/llama.yaml instead, model=null none

Every file holds keys from the top level down. Later entries win over earlier ones, and the file's
own keys win over all, unless `_self_` in the list puts them elsewhere; just below them is the
preset that they name in `algorithm` (presets.py). Sections are merged key by key; lists are
replaced.

To YAML 1.1 `010` is eight, `12:30` seven hundred and fifty and `no` false, which is not what the
name of a run or a path means. So a plain word is read as a `Word`, its text, of which loader.py
makes what its key takes. Null alone is null at once.
"""

from __future__ import annotations

import re
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from os.path import exists
from pathlib import Path
from typing import Any

import yaml

from megarl.config import presets
from megarl.config.errors import ConfigError
from megarl.config.rollout import ALIASES
from megarl.config.schema import show

Tree = dict[str, Any]
Commented = tuple[str, Any, str]  # a dotted name, its value, a comment
Override = tuple[str, str, Any]  # its plus signs, its dotted name, its value with words
_DECOUPLED = ("use_decoupled_loss", "behav_imp_weight_cap")  # AReaL's keys
_DEFAULTS, _SELF = "defaults", "_self_"
# keys whose values name a file or a directory; any other value does as file.py:name
FILE_KEYS = ("path", "files", "tokenizer_path", "chat_template", "adapter_path")
# what `read_yaml` raises for a text that is no YAML, has a tag that its value does not fit, or has
# more nodes or levels than these
NOT_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError)
_MOST_NODES, _MOST_LEVELS = 100_000, 100
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_KEPT = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
_STR = "tag:yaml.org,2002:str"
# Python reads no decimal number of more than 4300 digits
_INT = re.compile(
    r"[-+]?(0|[1-9][0-9_]{0,4000}|0x_*[0-9a-fA-F][0-9a-fA-F_]{0,3000}|0b_*[01][01_]{0,3000})"
)
_FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
)
_BOOL = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


class Word(str):
    """Is a plain word of a YAML text, as it was typed."""

    def untyped(self) -> Any:
        """Returns the value where no type is known, as in options: a number, a boolean or text. A
        number has base 10, or begins with 0x or 0b; one that begins with 0 besides is text, and so
        is 12:30."""
        text = str(self)
        if _INT.fullmatch(text):
            return int(text.replace("_", ""), 0)
        if _FLOAT.fullmatch(text):
            plain = text.replace("_", "").lower()
            return float(plain.replace(".inf", "inf").replace(".nan", "nan"))
        spellings = (text.lower(), text.capitalize(), text.upper())
        return _BOOL.get(text.lower(), text) if text in spellings else text


class _Loader(_Base):  # type: ignore[misc]
    """Leaves plain words as they were typed, but for null and <<; a key that comes twice is an
    error."""

    yaml_implicit_resolvers: typing.ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT]
        for first, resolvers in _Base.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            raise yaml.MarkedYAMLError(None, None, f"duplicate key {twice[0]}", node.start_mark)
        return super().construct_mapping(node, deep)


def _scalar(loader: Any, node: yaml.ScalarNode) -> str:
    return node.value if node.style else Word(node.value)


_Loader.add_constructor(_STR, _scalar)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Puts in quotes each text that a plain word would not be read as."""


def _text(dumper: Any, value: str | Enum) -> yaml.ScalarNode:
    text = value.name if isinstance(value, Enum) else str(value)
    style = None if isinstance(Word(text).untyped(), str) else "'"
    return dumper.represent_scalar(_STR, text, style=style)


for _kind in (str, Enum):
    _Dumper.add_multi_representer(_kind, _text)
_Dumper.add_representer(str, _text)


def write_yaml(tree: Any, **style: Any) -> str:
    """Returns YAML of dicts, lists and plain values, which `read_yaml` reads as they are. style: of
    yaml.dump."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, **style)


def write_commented(rows: Iterable[Commented]) -> str:
    """Returns YAML with a value and its comment on each line."""
    tree: Tree = {}
    for name, value, comment in rows:
        put(tree, name, (value, comment))
    return "".join(_commented(tree))


def _commented(tree: Tree, indent: str = "") -> Iterator[str]:
    for name, inner in tree.items():
        if isinstance(inner, dict):
            yield f"{indent}{name}:\n"
            yield from _commented(inner, indent + "  ")
        else:
            flow = write_yaml({name: inner[0]}, default_flow_style=True, width=1 << 30)
            yield f"{indent + flow.strip()[1:-1]:<38}  # {inner[1]}\n"


def read_yaml(text: str) -> Any:
    """Returns the tree of a YAML text, with words. Raises one of NOT_YAML. An alias counts as often
    as it is used, because whoever copies the tree copies its nodes as often."""
    sizes: dict[Any, tuple[int, int]] = {}  # nodes and levels, by anchor
    inside = [(None, 0, 0)]  # anchor, nodes and levels so far of each open collection
    for event in yaml.parse(text, Loader=_Loader):
        anchor, nodes, levels = getattr(event, "anchor", None), 1, 1
        mark: Any = event.start_mark
        if isinstance(event, yaml.CollectionStartEvent):
            inside.append((anchor, 1, 1))
            if len(inside) > _MOST_LEVELS:
                raise yaml.MarkedYAMLError(None, None, "too many levels", mark)
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, nodes, levels = inside.pop()
            sizes[anchor] = nodes, levels
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == outer for outer, _, _ in inside):
                why = f"*{anchor}: an alias of what it is in"
                raise yaml.MarkedYAMLError(None, None, why, mark)
            nodes, levels = sizes.get(anchor, (1, 1))
        outer, total, deepest = inside[-1]
        inside[-1] = outer, total + nodes, max(deepest, levels + 1)
        if total + nodes > _MOST_NODES or len(inside) + levels > _MOST_LEVELS:
            raise yaml.MarkedYAMLError(None, None, "too many nodes or levels", mark)
    return yaml.load(text, Loader=_Loader)


def read_override(text: str) -> Any:
    """Returns the value of an override key=text. Raises one of NOT_YAML. A plain word is all of the
    text: a name may hold what a file takes for a comment."""
    read = read_yaml(text) if text.strip() else ""
    whole = isinstance(read, Word) or (read is None and text.lstrip().startswith("#"))
    return Word(text.strip()) if whole else read


def untyped(value: Any) -> Any:
    """Returns `value`, of dicts, lists and words, without words: each as what it looks like."""
    if isinstance(value, dict):
        return {untyped(k): untyped(v) for k, v in value.items()}
    if isinstance(value, list):
        return [untyped(v) for v in value]
    return value.untyped() if isinstance(value, Word) else value


def parse_overrides(overrides: Sequence[str], problems: list[str]) -> list[Override]:
    """Returns every override that is well-formed, and adds a line to `problems` for each other."""
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


# files


def compose(path: Path, overrides: Sequence[Override]) -> tuple[Tree, list[Override]]:
    """Returns the keys of the file with its defaults, and the overrides that chose no file. Raises
    ConfigError naming a file that is missing, is no YAML, or includes itself."""
    plain = {name: value for plus, name, value in overrides if plus != "+" and "." not in name}
    switches = {k: v for k, v in plain.items() if v is None or isinstance(v, str)}
    composer = _Composer(switches=switches)
    tree, rest = merged(composer.read(path), presets.below(plain)), []
    for plus, name, value in overrides:
        group = "." not in name and (path.parent / name).is_dir()
        if plus == "+" and isinstance(value, str) and group:
            tree = merged(tree, composer.read(_group_file(path, name, value)))
        elif not (name in composer.groups and (value is None or isinstance(value, str))):
            rest.append((plus, name, value))
    return tree, rest


@dataclass(kw_only=True)
class _Composer:
    """Reads files; `switches` maps a group to the option that the command line wants for it, or to
    None for no option. `groups` collects the groups that were met."""

    switches: Mapping[str, Any]
    groups: set[str] = field(default_factory=set)

    def read(self, path: Path, inside: tuple[Path, ...] = ()) -> Tree:
        """Returns the merged keys of `path` and its defaults; `inside` are the files that led
        here."""
        if path.resolve() in inside:
            chain = " -> ".join(str(p) for p in (*inside, path.resolve()))
            raise ConfigError(f"--config {inside[0]}: a file is among its own defaults: {chain}")
        own = read_file(path)
        entries = own.pop(_DEFAULTS, [])
        if not isinstance(entries, list):
            raise ConfigError(f"--config {path}: defaults: must be a list of files and groups")
        tree: Tree = {}
        for entry in entries if _SELF in entries else [*entries, _SELF]:
            if entry == _SELF:
                tree = merged(merged(tree, presets.below(own)), own)
                continue
            for file in self._files(path, entry):
                tree = merged(tree, self.read(file, (*inside, path.resolve())))
        return tree

    def _files(self, path: Path, entry: Any) -> Iterator[Path]:
        """Yields the file that one entry of the list of `path` stands for, or nothing."""
        if isinstance(entry, str):
            yield _existing(path, path.parent / entry, f"defaults: {entry}")
            return
        if not isinstance(entry, dict) or len(entry) != 1:
            fix = "write a file, or one group as `group: name`"
            raise ConfigError(f"--config {path}: defaults: {entry}: {fix}")
        ((group, option),) = entry.items()
        self.groups.add(str(group))
        option = self.switches.get(str(group), option)
        if option is not None:
            yield _group_file(path, str(group), str(option))


def _group_file(path: Path, group: str, option: str) -> Path:
    return _existing(path, path.parent / group / option, f"{group}={option}")


def _existing(path: Path, file: Path, wanted: str) -> Path:
    for candidate in (file, file.with_name(file.name + ".yaml")):
        if candidate.is_file():
            return candidate
    known = sorted(f.stem for f in file.parent.glob("*.yaml"))
    there = f"there are {', '.join(known)}" if known else f"{file.parent} holds no .yaml"
    raise ConfigError(f"--config {path}: {wanted}: no such file {file}; {there}")


def read_file(path: Path) -> Tree:
    """Returns the keys of a file by itself. Raises ConfigError if it is missing or no YAML."""
    if not path.is_file():
        raise ConfigError(f"--config {path}: no such file")
    try:
        tree = read_yaml(path.read_text(encoding="utf-8")) or {}
    except NOT_YAML as e:
        raise ConfigError(f"--config {path}: not valid YAML: {' '.join(str(e).split())}") from e
    if not isinstance(tree, dict):
        raise ConfigError(f"--config {path}: the top level must be keys and values")
    return {str(k): _with_neighbours(v, str(k), path.parent) for k, v in tree.items()}


def _with_neighbours(value: Any, key: str, folder: Path) -> Any:
    """Returns a value of the file in `folder` with its names of files: one that is not in the
    working directory, and is beside the file, is meant there."""
    if isinstance(value, dict):
        return {k: _with_neighbours(v, str(k), folder) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_neighbours(v, key, folder) for v in value]
    if not isinstance(value, str) or not value or "${" in value:
        return value
    file, colon, name = value.rpartition(":")
    if not (file.endswith(".py") and name.isidentifier() and len(value.split()) == 1):
        if key not in FILE_KEYS:
            return value
        file, colon, name = value, "", ""
    there = folder / file
    return f"{there}{colon}{name}" if not exists(file) and exists(there) else value


def is_same_type(one: Any, other: Any) -> bool:
    """Returns whether two words for a section's `type` mean the same."""
    return bool(ALIASES.get(str(one), one) == ALIASES.get(str(other), other))


def merged(below: Any, above: Any) -> Any:
    """Returns `above` over `below`, section by section. A section that names another `type` than
    the one below it names drops the `options` below, which were the other type's. One with a
    correction takes AReaL's keys below as the correction that they mean."""
    is_name = isinstance(untyped(below), str) and not is_interpolation(below)
    if is_name and below and isinstance(above, dict):
        below = {"type": below}  # a seam in its short form
    is_seam = isinstance(below, dict) and "options" in below and below.keys() <= {"type", "options"}
    if is_seam and isinstance(untyped(above), str) and not is_interpolation(above):
        above = {"type": above}
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    kept = dict(below)
    if "type" in above and not is_same_type(above["type"], below.get("type", above["type"])):
        kept.pop("options", None)
    if "correction" in above:
        as_correction(kept)
    return kept | {k: merged(kept[k], v) if k in kept else v for k, v in above.items()}


def put(tree: Tree, name: str, value: Any) -> None:
    """Sets a dotted key of a tree, and makes the sections that it lies in. Raises ConfigError where
    one is a value, but for a text, which is a seam in its short form."""
    *sections, last = name.split(".")
    for depth, section in enumerate(sections, start=1):
        inner = tree.get(section)
        if isinstance(untyped(inner), str) and not is_interpolation(inner):
            inner = {"type": inner}
        elif inner is not None and not isinstance(inner, dict):
            above = ".".join(sections[:depth])
            raise ConfigError(f"{name}: {above}={show(inner)} is a value, not a section")
        tree[section] = tree = {} if inner is None else inner
    tree[last] = value


def is_interpolation(value: Any) -> bool:
    """Returns whether a value is a text that OmegaConf replaces."""
    return isinstance(value, str) and "${" in value


def as_correction(actor: Any) -> None:
    """Replaces AReaL's use_decoupled_loss and behav_imp_weight_cap in a section, which may be
    anything, by the correction that they mean. Raises ConfigError where they mean none."""
    if not isinstance(actor, dict) or actor.keys().isdisjoint(_DECOUPLED):
        return
    areals = {key: untyped(actor.pop(key)) for key in _DECOUPLED if key in actor}
    on, cap = (areals.get(key) for key in _DECOUPLED)
    shown = ", ".join(f"actor.{key}={show(value)}" for key, value in areals.items())
    if actor.get("correction") is not None:
        why = "actor.correction says how tokens are weighed; leave it out, or set that to null"
        raise ConfigError(f"{shown}: {why}")
    if not isinstance(on, bool) and (cap is not None or "use_decoupled_loss" in areals):
        raise ConfigError(f"{shown}: needs actor.use_decoupled_loss=true, or false")
    if on:
        mask = "none" if cap is None else "token"
        actor["correction"] = presets.CORRECTION | {"mask": mask, "mask_high": cap}
