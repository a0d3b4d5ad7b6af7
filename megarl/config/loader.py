"""Makes a recipe dataclass of YAML files and dotted overrides.

    cfg = load_config("configs/x.yaml", ["actor.optimizer.lr=1e-5", "+train_dataset.options.n=3"])
    cfg = load_config(sys.argv[1:])                  # --config X.yaml a.b=c +new.key=v
    cfg = load_config(sys.argv[1:], cls=MyConfig)    # a dataclass of one's own: keys beside ours

`a.b=c` sets a key, as `+a.b=c` and `++a.b=c` do, which Hydra tells apart. `group=name` and
`+group=name` choose files (compose.py). Setting any key of a section that is null
by default (actor.optimizer, ref, valid_dataset) makes the section real. YAML interpolation
(`${actor.path}`, `${oc.env:HOME}`) works in both. All problems are collected and raised as one
ConfigError.

One reading of files and overrides along the keys of the dataclass gives every key its value, and a
line to the problems for what is wrong. Interpolations stay texts in it; OmegaConf follows them
among the values of all keys, and the result is read once more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, overload

from megarl.config import presets
from megarl.config.command_line import parse_command_line
from megarl.config.compose import (
    Override,
    Tree,
    Word,
    as_correction,
    compose,
    is_interpolation,
    is_same_type,
    merged,
    parse_overrides,
    put,
    read_yaml,
    untyped,
    write_yaml,
)
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.help import unknown_key
from megarl.config.presets import AllocationMode
from megarl.config.recipes import BaseConfig, main_role, own_code, recipe_class
from megarl.config.rollout import recommended_sampling
from megarl.config.schema import UNIONS, Key, children, find_key, key_table, not_a_choice, show
from megarl.config.secrets import (
    Place,
    as_written,
    at,
    from_environment,
    interpolations,
    plain,
    remember,
    written_tree,
)
from megarl.utils.files import write_whole

_REQUIRED = "???"  # OmegaConf's sign of a value that is still to be given
_UNFIT = (ValueError, OverflowError)  # of a value that is not of its key's type
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
    parsed = parse_overrides(overrides, problems)
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
    if "actor.use_decoupled_loss" not in key_table(cls):  # not one of a user's own
        as_correction(tree.get("actor"))
    if foreign:
        names = {field.name for field in fields(cls)}
        tree = {name: value for name, value in tree.items() if name in names}
    cfg = _build(cls, tree, problems)
    object.__setattr__(cfg, _SET, tuple(_leaves(tree)))
    return cfg


def own_class(source: str | os.PathLike[str] | None, overrides: Sequence[str] = ()) -> str | None:
    """Returns "recipe=name" or "trainer=name" where code of the user's decides the dataclass of a
    configuration, else None. Imports none of it. Raises ConfigError for a file that is no YAML."""
    tree, parsed = _read(source, overrides, [])
    return own_code(tree, _values(parsed))


def keys_set(cfg: BaseConfig) -> tuple[str, ...]:
    """Returns the dotted names of the keys that a file or the command line set."""
    return vars(cfg).get(_SET, ())


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
    parsed = parse_overrides(overrides, problems)
    if source is None:
        return presets.below(_values(parsed)), parsed
    return compose(Path(source), parsed)


def _values(parsed: Sequence[Override]) -> dict[str, Any]:
    return {name: value for _, name, value in parsed}


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
        changes.append((name, value))
        if key is not None and name.endswith(".type"):
            with contextlib.suppress(LookupError, TypeError, AttributeError):  # not in the file
                section = at(tree, name.split(".")[:-1])
                if not is_same_type(section.get("type", key.default), value):
                    section.pop("options", None)
    for name, value in changes:
        try:
            if f"{name}.".startswith("actor.correction."):
                as_correction(tree.get("actor"))
            put(tree, name, value)
        except ConfigError as e:
            problems += e.problems


def _build(cls: type[BaseConfig], tree: Tree, problems: Sequence[str] = ()) -> BaseConfig:
    """Returns the dataclass `cls` with the values of `tree`, a tree of words and plain values.
    Raises ConfigError with all that is wrong, after the `problems` that are known."""
    reading = _Reading(cls)
    whole = reading.whole(tree)
    if reading.texts is not None and (decided := _decided(cls, whole, reading.problems)):
        reading = _Reading(cls, reading.problems)
        whole = reading.whole(merged(decided, tree))
    cfg: BaseConfig = reading.section(cls, whole)
    texts = reading.texts or {}
    read = [(texts[place], at(whole, place)) for place in from_environment(texts)]
    raise_if_any(as_written(dict.fromkeys([*problems, *reading.problems]), read))
    remember(cfg, texts)
    return cfg


def _decided(cls: type[BaseConfig], whole: Tree, problems: list[str]) -> Tree:
    """Returns the keys that allocation_mode and gconfig.from_model decide. Those that are set stay
    above them, and the checks (check.py) compare them with the allocation."""
    tree, decided, main = Tree(), Tree(), main_role(cls)
    try:
        if whole["allocation_mode"]:
            decided |= AllocationMode.from_str(str(whole["allocation_mode"])).keys(main)
    except ConfigError as e:
        problems += e.problems
    for key in (name for name in _leaves(whole) if name.endswith("gconfig.from_model")):
        if at(whole, key.split(".")):
            path, section = whole[main]["path"], key.removesuffix("from_model")
            try:
                decided |= {section + name: v for name, v in recommended_sampling(path).items()}
            except (OSError, ValueError) as e:  # ValueError: no JSON, or no name that a hub allows
                why = f"{main}.path={path} recommends nothing ({' '.join(str(e).split())})"
                problems.append(f"{key}=true: {why}; set {section}temperature instead")
    for name, value in decided.items():
        if name in key_table(cls):
            put(tree, name, value)
    return tree


def _leaves(value: Any, name: str = "") -> list[str]:
    """Returns the dotted names of the plain values below `name`."""
    if not isinstance(value, dict) or not value:
        return [name]
    return [leaf for k, v in value.items() for leaf in _leaves(v, f"{name}.{k}".lstrip("."))]


@dataclass
class _Reading:
    """Reads trees along the keys of `root`; adds a line to `problems` for what is wrong in them.
    texts: the interpolations, by their places, as soon as they are followed."""

    root: type
    problems: list[str] = field(default_factory=list)
    texts: Mapping[Place, str] | None = None

    def whole(self, tree: Tree) -> Tree:
        """Returns the tree with a value for every key, and without interpolations."""
        whole: Tree = self.section(self.root, tree)
        texts = dict(interpolations(whole))
        try:
            whole = _followed(whole) if texts else whole
        except ConfigError as e:
            self.problems += e.problems
            return whole
        self.texts = texts
        return whole

    def section(self, cls: type, tree: Tree, prefix: str = "", parent: Any = None) -> Any:
        """Returns the section with a value for every key: the one of the tree, or the default,
        which the instance `parent` gives where there is one. It is an object of `cls`; a dict of
        its keys where interpolations stay or something is wrong."""
        given = {str(name): value for name, value in tree.items()}
        values: Tree = {}
        for key in children(cls, prefix, parent):
            name, default = key.name.removeprefix(prefix), plain(key.default)
            value = given.pop(name, default)
            if key.choices and value and isinstance(value, dict):
                # a section elsewhere, as `algorithm` is in verl
                given[name], value = value, default
            values[name], problem = self.value(key, value)
            if problem:
                self.problems.append(problem)
                values[name] = _REQUIRED if default is MISSING else default
        for name, value in given.items():
            self.problems += [unknown_key(self.root, n) for n in _leaves(value, prefix + name)]
        if self.texts is None or self.problems:
            return values
        try:
            return cls(**values)
        except ValueError as e:  # of a check in a class of the user's
            self.problems.append(f"{prefix.rstrip('.') or cls.__name__}: {e}")
            return values

    def value(self, key: Key, value: Any) -> tuple[Any, str]:
        """Returns the value of one key, and what is wrong with it."""
        if value is MISSING or value == _REQUIRED:
            return None, f"{key.name}: required, set it"
        if key.seam and isinstance(value, str) and not self._stays(value):
            value = {"type": value}
        try:
            typed = self.typed(value, key.annotation, key.name, key.default)
        except _UNFIT:
            return None, self._unfit(key, value)
        if key.limits is None or self._stays(typed) or key.limits.allow(typed):
            return typed, ""
        meant = key.limits.meant(untyped(value))
        return meant, "" if meant is not None else not_a_choice(key, _shown(value))

    def typed(self, value: Any, annotation: Any, name: str = "", default: Any = None) -> Any:
        """Returns a value, of dicts, lists and words, as the annotation takes it, with pydantic for
        what is not one of YAML's types; a section has the dotted `name` and its own `default`.
        Raises one of _UNFIT."""
        origin, inner = get_origin(annotation) or annotation, get_args(annotation)
        if self._stays(value):
            return str(value)
        if annotation is Any:
            return untyped(value)
        if origin in UNIONS:
            return self._one_of(value, inner, name, default)
        if is_dataclass(annotation) and value is not None:
            return self._inner(value, annotation, name, default)
        if origin is list and isinstance(value, list):
            return [self.typed(v, inner[0] if inner else Any, name) for v in value]
        if origin is dict and isinstance(value, dict):
            kind, of = inner or (Any, Any)
            names = {self.typed(k, kind): v for k, v in value.items()}
            return {k: self.typed(v, of, f"{name}.{k}") for k, v in names.items()}
        if origin in (str, bool, int, float):
            return _scalar(value, origin)
        if value is None or origin in (list, dict):
            raise ValueError
        return _foreign(value, annotation)

    def _inner(self, value: Any, cls: Any, name: str, default: Any) -> Any:
        own = default if isinstance(default, cls) else None
        if isinstance(value, dict):
            return self.section(cls, value, f"{name}.", own)
        inside = ", ".join(key.name for key in children(cls, f"{name}."))
        self.problems.append(f"{name}={_shown(value)}: a section, not a value; it has {inside}")
        return value if default is None else plain(default)  # null may be no value of it

    def _one_of(self, value: Any, kinds: Sequence[Any], name: str, default: Any) -> Any:
        if value is None and type(None) in kinds:
            return None
        for kind in kinds:
            with contextlib.suppress(*_UNFIT):
                if kind is not type(None):
                    return self.typed(value, kind, name, default)
        raise ValueError

    def _stays(self, value: Any) -> bool:
        """Returns whether a value is an interpolation that is not followed yet."""
        return self.texts is None and is_interpolation(value)

    def _unfit(self, key: Key, value: Any) -> str:
        shown = f"{key.name}={_shown(value)}"
        if value is None:
            return f"{shown}: needs a value of type {key.type_name}"
        forms = {"list": "; write [a,b]", "dict": "; write {name: value}"}
        fix = forms.get(key.type_name[:4], "")
        return f"{shown}: not of type {key.type_name}{fix}"


def _shown(value: Any) -> str:
    return show(value if isinstance(value, str) else untyped(value))


def _followed(whole: Tree) -> Tree:
    """Returns the tree without interpolations. Raises ConfigError for one that leads nowhere."""
    from omegaconf import OmegaConf  # here: a plain configuration needs none
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = OmegaConf.create(whole, flags={"allow_objects": True})
        followed: Any = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as e:
        first = str(e).splitlines()[0]
        raise ConfigError(f"{e.full_key}: {first}" if e.full_key else first) from e
    return followed


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


def _foreign(value: Any, annotation: Any) -> Any:
    from pydantic import TypeAdapter  # here, as no key of ours needs it, and its import is long

    members = getattr(annotation, "__members__", {})
    if isinstance(value, str) and value in members:
        return members[value]
    adapter = TypeAdapter(annotation)
    try:
        return adapter.validate_python(untyped(value))
    except ValueError:
        return adapter.validate_python(value)  # a path may be a number
