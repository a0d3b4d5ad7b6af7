"""Makes a recipe's dataclass of a tree of words and plain values.

One reading of the tree along the keys of the dataclass gives every key its value, and a line to the
problems for what is wrong. Interpolations stay texts in it; OmegaConf follows them among the values
of all keys, and the result is read once more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, is_dataclass, replace
from typing import Any, get_args, get_origin

from megarl.config.allocation import AllocationMode
from megarl.config.compose import Tree, Word, merged, untyped
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.help import unknown_key
from megarl.config.recipes import BaseConfig, main_role
from megarl.config.schema import UNIONS, Key, children, key_table, make, not_a_choice, show
from megarl.config.secrets import Path, at, from_environment, interpolations, remember

_REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+)*)\}")
_REQUIRED = "???"  # OmegaConf's sign of a value that is still to be given
_FOR_TRUE, _FOR_FALSE = ("on", "yes", "true"), ("off", "no", "false")


def build(cls: type[BaseConfig], tree: Tree, problems: Sequence[str] = ()) -> BaseConfig:
    """Returns the dataclass `cls` with the values of `tree`, a tree of words and plain values.
    Raises ConfigError with all that is wrong, after the `problems` that are known."""
    reading = _Reading(cls)
    whole, texts = reading.resolved(tree)
    if whole.get("allocation_mode") and not is_interpolation(whole["allocation_mode"]):
        reading = _Reading(cls)
        whole, texts = reading.resolved(merged(_allocated(cls, whole, reading.problems), tree))
    raise_if_any(dict.fromkeys([*problems, *reading.problems]))
    cfg: BaseConfig = make(cls, whole)
    remember(cfg, texts)
    return cfg


def _allocated(cls: type[BaseConfig], whole: Tree, problems: list[str]) -> Tree:
    """Returns the keys that allocation_mode decides. Those that are set stay above them, and the
    checks (check.py) compare both."""
    tree: Tree = {}
    try:
        decided = AllocationMode.from_str(whole["allocation_mode"]).keys(main_role(cls))
    except ConfigError as e:
        problems += e.problems
        return tree
    for name, value in decided.items():
        if name in key_table(cls):
            put(tree, name, value)
    return tree


def put(tree: Tree, name: str, value: Any) -> None:
    """Sets a dotted key of a tree, and makes the sections that it lies in."""
    *sections, last = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = value


def is_interpolation(value: Any) -> bool:
    """Returns whether a value is a text that OmegaConf replaces."""
    return isinstance(value, str) and "${" in value


def leaves(value: Any, name: str = "") -> list[str]:
    """Returns the dotted names of the plain values below `name`."""
    if not isinstance(value, dict) or not value:
        return [name]
    return [leaf for k, v in value.items() for leaf in leaves(v, f"{name}.{k}".lstrip("."))]


@dataclass
class _Reading:
    """Reads trees along the keys of `root`; adds a line to `problems` for what is wrong in them.
    texts: interpolations that are followed already, by their places; None as long as they stay.
    hidden: of these the ones that read the environment, whose values are not shown."""

    root: type
    problems: list[str] = field(default_factory=list)
    texts: Mapping[Path, str] | None = None
    hidden: Mapping[str, str] = field(default_factory=dict)

    def resolved(self, tree: Tree) -> tuple[Tree, Mapping[Path, str]]:
        """Returns the tree with the value of every key, and the interpolations that were in it."""
        whole = self.section(self.root, tree)
        texts = dict(interpolations(whole))
        if not texts:
            return whole, texts
        try:
            values = _referred(whole, texts) or _followed(whole, texts)
        except ConfigError as e:
            self.problems += e.problems
            return whole, texts
        self.texts = texts
        self.hidden = {".".join(map(str, path)): texts[path] for path in from_environment(texts)}
        return self.section(self.root, values), texts

    def section(self, cls: type, tree: Tree, prefix: str = "", parent: Any = None) -> Tree:
        """Returns the values of all keys of a section: the one of the tree, or the default, which
        the instance `parent` gives where there is one."""
        given = {str(name): value for name, value in tree.items()}
        values: Tree = {}
        for key in children(cls, prefix, parent):
            name = key.name.removeprefix(prefix)
            value = given.pop(name, _plain(key.default))
            # a choice of ours may be a section elsewhere, as `algorithm` is in verl
            if key.choices and value and isinstance(value, dict):
                given[name], value = value, _plain(key.default)
            values[name] = self.value(key, value)
        for name, value in given.items():
            self.problems += [unknown_key(self.root, n) for n in leaves(value, prefix + name)]
        return values

    def value(self, key: Key, value: Any) -> Any:
        """Returns the value of one key; the default for a wrong one."""
        if self.texts is None and is_interpolation(value):
            return str(value)
        if value is MISSING or (value == _REQUIRED and isinstance(value, str)):
            return self._wrong(key, f"{key.name}: required, set it")
        if value is None:
            needs = f"{key.name}=null: needs a value of type {key.type_name}"
            return None if key.nullable else self._wrong(key, needs)
        if key.seam and isinstance(value, str):
            value = {"type": value}
        if key.section is not None:
            return self._section(key, value)
        if key.element is not None and isinstance(value, dict):
            values = dict(_plain(key.default))
            for name, section in value.items():
                own = key.default.get(name, MISSING)
                one = replace(
                    key,
                    name=f"{key.name}.{name}",
                    default=own,
                    annotation=key.element,
                    section=key.element,
                    element=None,
                )
                values[str(name)] = self.value(one, section)
            return values
        return self._leaf(key, value)

    def _section(self, key: Key, value: Any) -> Any:
        assert key.section is not None
        if isinstance(value, dict):
            own = key.default if isinstance(key.default, key.section) else None
            return self.section(key.section, value, key.name + ".", own)
        inside = ", ".join(inner.name for inner in children(key.section, key.name + "."))
        a_value = f"{key.name}={self._shown(key, value)}: a section, not a value; it has {inside}"
        return self._wrong(key, a_value)

    def _leaf(self, key: Key, value: Any) -> Any:
        try:
            typed = self.typed(value, key.annotation)
        except (ValueError, TypeError, OverflowError):
            if self._hidden(key):
                why = "the value behind it is not of the key's type"
            else:
                fix = "; write [a,b]" if key.type_name.startswith("list") else ""
                why = f"not of type {key.type_name}{fix}"
            return self._wrong(key, f"{key.name}={self._shown(key, value)}: {why}")
        if key.limits is None or key.limits.allow(typed) or is_interpolation(typed):
            return typed
        # YAML 1.1 reads off, on, no, yes as booleans: so may they be meant where one is a choice
        truth = untyped(value) if isinstance(value, Word) else None
        alike = {True: (*_FOR_TRUE, key.limits.true), False: _FOR_FALSE}
        words = alike.get(truth, ()) if isinstance(truth, bool) else ()
        meant = [word for word in words if key.limits.allow(word)]
        return meant[0] if meant else self._wrong(key, not_a_choice(key, self._shown(key, value)))

    def typed(self, value: Any, annotation: Any) -> Any:
        """Returns a value, of dicts, lists and words, as the annotation takes it. Raises ValueError
        where it takes none such; with pydantic for what is not one of YAML's types."""
        if self.texts is None and is_interpolation(value):
            return str(value)
        origin, inner = get_origin(annotation) or annotation, get_args(annotation)
        if annotation is Any:
            return untyped(value)
        if origin in UNIONS:
            return self._any_of(value, inner)
        if origin is list and isinstance(value, list):
            return [self.typed(v, *(inner or (Any,))) for v in value]
        if origin is dict and isinstance(value, dict):
            name, of = inner or (Any, Any)
            return {self.typed(k, name): self.typed(v, of) for k, v in value.items()}
        if origin in (str, bool, int, float):
            return _scalar(value, origin)
        if origin in (list, dict):
            raise ValueError
        from pydantic import TypeAdapter  # here, as no key of ours needs it, and its import is long

        members = getattr(annotation, "__members__", {})
        if isinstance(value, str) and value in members:
            return members[value]
        adapter = TypeAdapter(annotation)
        try:
            return adapter.validate_python(untyped(value))
        except ValueError:
            return adapter.validate_python(value)  # a path may be a number

    def _any_of(self, value: Any, annotations: tuple[Any, ...]) -> Any:
        if value is None and type(None) in annotations:
            return None
        for annotation in filter(lambda each: each is not type(None), annotations):
            try:
                return self.typed(value, annotation)
            except (ValueError, TypeError, OverflowError):
                continue
        raise ValueError

    def _shown(self, key: Key, value: Any) -> str:
        """Returns a value for a message; of the environment's the interpolation."""
        plain = value if isinstance(value, str) else untyped(value)
        return ", ".join(self._hidden(key)) or show(plain)

    def _hidden(self, key: Key) -> list[str]:
        """Returns the texts of the environment's values in the key, or in what it lies in."""
        own = key.name + "."
        texts = ((name + ".", text) for name, text in self.hidden.items())
        return [text for name, text in texts if name.startswith(own) or own.startswith(name)]

    def _wrong(self, key: Key, problem: str) -> Any:
        self.problems.append(problem)
        return _REQUIRED if key.default is MISSING else _plain(key.default)


def _referred(whole: Tree, texts: Mapping[Path, str]) -> Tree | None:
    """Returns the tree without interpolations where each of them, `texts`, is the name of a key
    or section that has none; else None."""
    values: dict[Path, Any] = {}
    for path, text in texts.items():
        name = _REFERENCE.fullmatch(text)
        try:
            values[path] = at(whole, name[1].split(".")) if name else text
        except (LookupError, TypeError):
            return None
        if any(interpolations(values[path])):
            return None
    for path, value in values.items():
        at(whole, path[:-1])[path[-1]] = value
    return whole


def _followed(whole: Tree, texts: Mapping[Path, str]) -> Tree:
    """Returns the tree without interpolations, which are `texts`. Raises ConfigError for one that
    leads nowhere. OmegaConf gets the sections alone that they stand in or name, as it takes its
    time for each value; all where a name is interpolated itself."""
    from omegaconf import OmegaConf  # here: its import takes as long as half of a start's checks
    from omegaconf.errors import OmegaConfBaseException

    words = " ".join(texts.values())
    names = {path[0] for path in texts} | set(re.findall(r"\w+", words))
    nested = re.search(r"\{[^}]*\$\{", words)
    part = {name: value for name, value in whole.items() if nested or name in names}
    try:
        values: Any = OmegaConf.to_container(OmegaConf.create(part), resolve=True)
    except OmegaConfBaseException as e:
        first = str(e).splitlines()[0]
        raise ConfigError([f"{e.full_key}: {first}" if e.full_key else first]) from e
    return whole | values


def _plain(value: Any) -> Any:
    """Returns a default as a tree has it."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return list(value) if isinstance(value, list) else value


def _scalar(value: Any, kind: type) -> Any:
    """Returns a text, number or boolean as the type takes it; raises ValueError where it does not.
    A text, as a word is one, is read as YAML reads it, but 010 is ten."""
    plain = Word(value).untyped() if isinstance(value, str) else value
    if kind is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    if kind is bool and (isinstance(plain, bool) or value in ("0", "1")):
        return plain is True or value == "1"
    if kind in (int, float) and isinstance(plain, str):
        plain = kind(plain)
    if kind is int and type(plain) is int:
        return plain
    if kind is float and type(plain) in (int, float):
        return float(plain)
    raise ValueError
