"""Reads which keys a recipe has off its dataclasses: for --help, nearest-key hints and checks.

A key is a field of a dataclass. Its annotation may give bounds or choices (base.py), and the text
below the field is its help. It needs the standard library alone, so that --help is instant.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any

from megarl.config.aliases import aliased, role_of
from megarl.config.base import ANY_FLOAT, ANY_INT, Bounds, Choices, is_finite


@dataclass(frozen=True, kw_only=True)
class Key:
    """Describes one dotted key, a field of the dataclass `owner`. section: its dataclass where it
    is a group of further keys. element: of a dict of sections by name, the dataclass of each."""

    name: str
    owner: type
    annotation: Any
    default: Any  # dataclasses.MISSING when a value is required
    section: type | None
    element: type | None
    bounds: Bounds | None
    limits: Choices | None

    @property
    def help(self) -> str:
        """Returns the text below the field."""
        return _texts(self.owner).get(_last(self.name), "")

    @property
    def choices(self) -> tuple[Any, ...] | None:
        """Returns the values that it may have, None for any of its type."""
        return self.limits.values if self.limits else None

    @property
    def or_path(self) -> bool:
        """Returns whether an import path is a value beside the choices."""
        return self.limits is not None and self.limits.or_path

    def allows(self, value: Any) -> bool:
        """Returns whether `value` is one of the choices, or an import path where those are."""
        return self.limits is None or self.limits.allow(value)

    @property
    def nullable(self) -> bool:
        """Returns whether null is a value of the key."""
        return type(None) in typing.get_args(self.annotation)

    @property
    def free_form(self) -> bool:
        """Returns whether the key is a plain dict, which takes keys of any name."""
        return typing.get_origin(self.annotation) is dict and self.element is None

    @property
    def base_type(self) -> Any:
        """Returns the annotation without `| None`."""
        return _strip_none(self.annotation)

    @property
    def type_name(self) -> str:
        """Returns the annotation as --help and messages spell it."""
        return _type_name(self.annotation)


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    if (element := _element(annotation)) is not None:
        return f"dict[str, {element.__name__}]"
    if typing.get_origin(annotation) is typing.Union:  # as Annotated[int, ...] | None is one
        return " | ".join("None" if a is type(None) else _type_name(a) for a in annotation.__args__)
    return str(annotation).replace("typing.", "")


def _strip_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return annotation
    rest = [a for a in typing.get_args(annotation) if a is not type(None)]
    return rest[0] if len(rest) == 1 else annotation


def _element(annotation: Any) -> type | None:
    """Returns the dataclass of a dict of sections, None for any other annotation."""
    if typing.get_origin(annotation) is not dict:
        return None
    value = typing.get_args(annotation)[1]
    return value if isinstance(value, type) and dataclasses.is_dataclass(value) else None


def _default(field: dataclasses.Field[Any], parent: Any) -> Any:
    if parent is not None:
        return getattr(parent, field.name)
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


@cache
def _annotations(cls: type) -> dict[str, tuple[Any, list[Any]]]:
    """Returns, by field, its type and what its annotation says of the values."""
    plain, whole = typing.get_type_hints(cls), typing.get_type_hints(cls, include_extras=True)
    return {name: (plain[name], _said(whole[name])) for name in plain}


def _said(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Annotated:
        return list(annotation.__metadata__)
    if typing.get_origin(annotation) in (types.UnionType, typing.Union, list):
        return [x for part in typing.get_args(annotation) for x in _said(part)]
    return []


@cache
def _texts(cls: type) -> dict[str, str]:
    """Returns, by field, the text below it in the source of `cls` and of those that it extends."""
    texts: dict[str, str] = {}
    for owner in reversed(inspect.getmro(cls)[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        except (OSError, SyntaxError):  # typed in at a prompt
            continue
        (definition,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
        for node, below in itertools.pairwise(definition.body):
            match node, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = " ".join(text.split())
    return texts


def children(cls: type, prefix: str = "", parent: Any = None) -> Iterator[Key]:
    """Yields the keys directly in `cls`; defaults come from the instance `parent`, if given."""
    assert dataclasses.is_dataclass(cls)
    for field in dataclasses.fields(cls):
        annotation, said = _annotations(cls)[field.name]
        base = _strip_none(annotation)
        yield Key(
            name=prefix + field.name,
            owner=cls,
            annotation=annotation,
            default=_default(field, parent),
            section=base if dataclasses.is_dataclass(base) and isinstance(base, type) else None,
            element=_element(annotation),
            bounds=next((x for x in said if isinstance(x, Bounds)), None),
            limits=next((x for x in said if isinstance(x, Choices)), None),
        )


def all_keys(cls: type, *, parent: Any = None) -> Iterator[Key]:
    """Yields every key of `cls` in order, each section before its own keys; of the instance
    `parent`, if given, those that it has, with its values as defaults."""
    return _below(cls, "", parent, nulls=parent is None)


def _below(cls: type, prefix: str, parent: Any, *, nulls: bool) -> Iterator[Key]:
    """Yields the keys of a section; nulls: those of sections that are null, too."""
    for key in children(cls, prefix, parent):
        yield key
        if key.section is not None and (nulls or key.default is not None):
            default = key.default if isinstance(key.default, key.section) else None
            yield from _below(key.section, key.name + ".", default, nulls=nulls)
        if key.element is not None and parent is not None:
            for name, element in key.default.items():
                yield from _below(key.element, f"{key.name}.{name}.", element, nulls=nulls)


def key_table(cls: type) -> dict[str, Key]:
    """Returns every key by its name; callers must not change the dict."""
    return _key_table(cls)


@cache
def _key_table(cls: type) -> dict[str, Key]:
    return {k.name: k for k in all_keys(cls)}


def find_key(cls: type, name: str) -> Key | None:
    """Returns the key `name`, which may lie in a dict of sections (valid_datasets.math.size); None
    for one that there is not."""
    if (key := key_table(cls).get(name)) is not None:
        return key
    for above in key_table(cls).values():
        _, _, rest = name.removeprefix(above.name + ".").partition(".")
        if above.element is not None and name.startswith(above.name + ".") and rest:
            return find_key(above.element, rest)
    return None


def nearest_keys(cls: type, name: str) -> list[str]:
    """Returns the keys that `name` was probably meant to be, best first.

    It looks for another trainer's name of a key (aliases.py), then for the same last part (`tp` ->
    `actor.parallel.tp`), then for similar names inside the section that the front of `name` does
    reach, then for a similar last part anywhere. Among equals, the role that `name` mentions comes
    first, else the recipe's main role.
    """
    table = key_table(cls)
    if (ours := aliased(table, name)) is not None:
        return [ours]
    names = [k for k in table if not name.startswith(k + ".")]
    last = _last(name)
    if same := [k for k in names if _last(k) == last]:
        return _ranked(same, table, name)
    fronts = ["", *(f"{k}." for k, key in table.items() if key.section is not None)]
    front = max((f for f in fronts if name.startswith(f)), key=len)
    inside = {k.removeprefix(front): k for k in names if k.startswith(front)}
    if close := difflib.get_close_matches(name.removeprefix(front), inside, cutoff=0.65):
        return [inside[c] for c in close]
    lasts = difflib.get_close_matches(last, {_last(k) for k in names}, n=1, cutoff=0.75)
    return _ranked([k for k in names if _last(k) in lasts], table, name)


def _ranked(names: list[str], table: dict[str, Key], wrong: str) -> list[str]:
    """Sorts keys: most of the sections of `wrong` first, then its role's, then in recipe order."""
    sections, role = set(wrong.split(".")[:-1]), role_of(table, wrong)

    def distance(name: str) -> tuple[int, bool]:
        own = name.split(".")[:-1]
        return -len(sections.intersection(own)), own[:1] != [role]

    return sorted(names, key=distance)


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def choice_problems(cfg: Any) -> list[str]:
    """Returns a line for each value of `cfg` that is not among the choices of its key."""
    return [
        not_a_choice(key, key.default)
        for key in all_keys(type(cfg), parent=cfg)
        if not key.allows(key.default)
    ]


def not_a_choice(key: Key, value: Any) -> str:
    """Returns the line that says which choices the key has."""
    path = " (or pkg.module:name)" if key.or_path else ""
    return f"{key.name}={show(value)}: not one of {', '.join(map(show, key.choices or ()))}{path}"


def number_problems(cfg: Any, prefix: str = "") -> Iterator[str]:
    """Yields a line for each number of the dataclass `cfg` that is not finite, or outside the
    bounds of its key; `prefix` is the section that `cfg` is, with its dot."""
    for key in all_keys(type(cfg), parent=cfg):
        values = key.default if isinstance(key.default, list) else [key.default]
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            largest = ANY_INT if isinstance(value, int) else ANY_FLOAT
            wrong = [b for b in (key.bounds, largest) if b is not None and not b.allow(value)]
            if wrong:
                yield _out_of(wrong[0], prefix, key, finite=is_finite(value))
                break


def _out_of(bounds: Bounds, prefix: str, key: Key, *, finite: bool) -> str:
    each = "each " if isinstance(key.default, list) else ""
    kind = "" if finite else "a finite number "
    null = ", or null" if key.nullable else ""
    note = f" ({bounds.note})" if bounds.note else ""
    return f"{prefix}{key.name}={show(key.default)}: {each}must be {kind}{bounds}{null}{note}"


def show(value: Any) -> str:
    """Returns a value as YAML spells it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)
