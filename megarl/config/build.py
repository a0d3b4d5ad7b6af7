"""Makes a recipe's dataclass of a tree of plain values: types, interpolations, unknown keys.

`_filled` gives the words of the tree the types of their keys and puts the tree above the defaults,
OmegaConf follows interpolations, and `_Maker` makes the objects, whose plain values pydantic
checks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from megarl.config.allocation import AllocationMode
from megarl.config.base import SeamConfig
from megarl.config.compose import merged
from megarl.config.errors import ConfigError
from megarl.config.hints import unknown_key
from megarl.config.recipes import BaseConfig, main_role
from megarl.config.schema import Key, children, key_table, show
from megarl.config.secrets import Path, from_environment, interpolations, remember
from megarl.config.words import Word, as_type

Tree = dict[str, Any]
_REQUIRED = "???"  # OmegaConf's sign of a value that is still to be given


def build(cls: type[BaseConfig], tree: Tree, problems: list[str]) -> BaseConfig | None:
    """Returns the dataclass `cls` with the values of `tree`, a tree of words and plain values. Adds
    a line to `problems` for all that is wrong; None where no object can be made."""
    whole = _filled(cls, tree)
    if whole.get("allocation_mode"):
        whole = _filled(cls, merged(_allocated(cls, whole, problems), tree))
    texts = dict(interpolations(whole))
    hidden = {".".join(map(str, path)): texts[path] for path in from_environment(texts)}
    maker = _Maker(cls, problems, hidden)
    try:
        resolved = _resolved(whole, texts)
    except OmegaConfBaseException as e:
        first = str(e).splitlines()[0]
        problems.append(f"{e.full_key}: {first}" if e.full_key else first)
        there = {str(path[0]) for path in texts}
        maker.make(cls, {k: v for k, v in whole.items() if k not in there})
        return None
    cfg: BaseConfig | None = maker.make(cls, resolved)
    if cfg is not None:
        remember(cfg, texts)
    return cfg


def _resolved(whole: Tree, texts: Mapping[Path, str]) -> Tree:
    """Returns the tree without interpolations, which are `texts`. OmegaConf gets the sections alone
    that they stand in or name, as it takes its time for each value; all where a name is
    interpolated itself."""
    words = " ".join(texts.values())
    names = {path[0] for path in texts} | set(re.findall(r"\w+", words))
    nested = re.search(r"\{[^}]*\$\{", words)
    part = {name: value for name, value in whole.items() if nested or name in names}
    values: Any = OmegaConf.to_container(OmegaConf.create(part), resolve=True) if texts else {}
    return whole | values


def is_seam(key: Key | None) -> bool:
    """Returns whether the key names code, of which a text is the short form."""
    return key is not None and key.section is not None and issubclass(key.section, SeamConfig)


def is_interpolation(value: Any) -> bool:
    """Returns whether a value is a text that OmegaConf replaces."""
    return isinstance(value, str) and "${" in value


def leaves(value: Any, name: str = "") -> list[str]:
    """Returns the dotted names of the plain values below `name`."""
    if not isinstance(value, dict) or not value:
        return [name]
    return [leaf for k, v in value.items() for leaf in leaves(v, f"{name}.{k}".lstrip("."))]


def _filled(cls: type, tree: Tree, parent: Any = None) -> Tree:
    """Returns the tree with every word as its key takes it, every seam in its long form, and the
    defaults of `cls`, or of its instance `parent`, where it has no value. Keys that there are not
    stay."""
    given = {str(name): value for name, value in tree.items()}
    filled: Tree = {}
    for key in children(cls, parent=parent):
        value = given.pop(key.name, MISSING)
        if is_seam(key) and isinstance(value, str) and not is_interpolation(value):
            value = {"type": value}
        if value is MISSING:
            filled[key.name] = _REQUIRED if key.default is MISSING else _plain(key.default)
        elif key.section is not None and isinstance(value, dict):
            own = key.default if is_dataclass(key.default) else None
            filled[key.name] = _filled(key.section, value, own)
        elif key.element is not None and isinstance(value, dict):
            filled[key.name] = {n: _plain(v) for n, v in key.default.items()} | {
                str(n): _filled(key.element, v, key.default.get(n)) if isinstance(v, dict) else v
                for n, v in value.items()
            }
        else:
            filled[key.name] = _meant(key, value)
    return filled | {name: as_type(value, Any) for name, value in given.items()}


def _meant(key: Key, value: Any) -> Any:
    """Returns a word as its key takes it. YAML 1.1 reads off, on, no, yes as booleans: so may they
    be meant where one is a choice."""
    typed = as_type(value, key.annotation)
    if key.limits and not key.allows(typed) and isinstance(value, Word):
        alike: tuple[str, ...] = ("off", "no", "false")
        if value.untyped() is True:
            alike = ("on", "yes", "true", key.limits.true or "true")
        typed = next((word for word in alike if key.allows(word)), typed)
    return typed


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, list) else value


def _allocated(cls: type[BaseConfig], whole: Tree, problems: list[str]) -> Tree:
    """Returns the keys that allocation_mode decides. Those that are set stay above them, and the
    checks (check.py) compare both."""
    tree: Tree = {}
    try:
        text = OmegaConf.create(whole).allocation_mode
        decided = AllocationMode.from_str(str(text)).keys(main_role(cls))
    except ConfigError as e:
        problems += e.problems
        return tree
    except OmegaConfBaseException:  # which is reported with all others
        return tree
    for name, value in decided.items():
        if name in key_table(cls):
            *sections, last = name.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
    return tree


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


class _Maker:
    """Makes the objects of resolved trees; adds a line to `problems` for what is wrong in them.
    hidden: texts that read the environment, by key, to show in place of their values."""

    def __init__(self, root: type, problems: list[str], hidden: Mapping[str, str]) -> None:
        self.root, self.problems, self.hidden = root, problems, hidden

    def make(self, cls: type, tree: Tree, prefix: str = "", parent: Any = None) -> Any:
        """Returns an object of `cls`; None where a value of it has no default and is wrong."""
        values: dict[str, Any] = {}
        keys = {key.name.removeprefix(prefix): key for key in children(cls, prefix, parent)}
        for name, value in tree.items():
            key = keys.get(name)
            # a choice of ours may be a section elsewhere, as `algorithm` is in verl
            if key is None or (key.choices and value and isinstance(value, dict)):
                lines = [unknown_key(self.root, n) for n in leaves(value, f"{prefix}{name}")]
                self.problems += lines
            else:
                values[name] = self.value(key, value)
        given = {name: value for name, value in values.items() if value is not MISSING}
        absent = [n for n, key in keys.items() if n not in tree and key.default is MISSING]
        missing = [n for n in keys if tree.get(n) == _REQUIRED or n in absent]
        self.problems += [f"{prefix}{name}: required, set it" for name in missing]
        complete = all(n in given or key.default is not MISSING for n, key in keys.items())
        return cls(**given) if complete else None

    def value(self, key: Key, value: Any) -> Any:
        """Returns the value of one key, MISSING for a wrong one, whose default stands in."""
        if value == _REQUIRED and isinstance(value, str):
            return MISSING
        if value is None:
            needs = f"{key.name}=null: needs a value of type {key.type_name}"
            return None if key.nullable else self._wrong(needs)
        if key.element is not None and isinstance(value, dict):
            made = {n: self._element(f"{key.name}.{n}", key.element, v) for n, v in value.items()}
            return {name: section for name, section in made.items() if section is not MISSING}
        if key.section is None:
            return self._plain(key, value)
        if not isinstance(value, dict):
            inside = ", ".join(k.name for k in children(key.section, key.name + "."))
            problem = f"{key.name}={show(value)}: a section, not a value; it has {inside}"
            return self._wrong(problem)
        own = key.default if isinstance(key.default, key.section) else None
        made = self.make(key.section, value, key.name + ".", own)
        return MISSING if made is None else made

    def _element(self, name: str, cls: type, value: Any) -> Any:
        if isinstance(value, dict):
            made = self.make(cls, value, name + ".")
            return MISSING if made is None else made
        return self._wrong(f"{name}={show(value)}: a section, not a value")

    def _plain(self, key: Key, value: Any) -> Any:
        typed = value
        if isinstance(value, str) and key.base_type is not str:  # as an interpolation brings it
            typed = as_type(Word(value), key.annotation)
        if key.base_type is str and isinstance(value, int | float):
            typed = str(value)
        number = isinstance(typed, str) and key.base_type in (int, float)
        own = isinstance(key.base_type, type) and key.base_type.__module__ != "builtins"
        if own and issubclass(key.base_type, Enum):
            typed = key.base_type.__members__.get(value, value)
        try:
            return _adapter(key.annotation).validate_python(typed, strict=not (number or own))
        except ValidationError:
            return self._wrong(self._not_of_type(key, value))

    def _not_of_type(self, key: Key, value: Any) -> str:
        """Says so without showing a value of the environment."""
        if (text := self.hidden.get(key.name)) is not None:
            return f"{key.name}={text}: the value behind it is not of the key's type"
        fix = "; write [a,b]" if key.type_name.startswith("list") else ""
        return f"{key.name}={show(value)}: not of type {key.type_name}{fix}"

    def _wrong(self, problem: str) -> Any:
        self.problems.append(problem)
        return MISSING
