"""Reads which keys a recipe has off its dataclasses: for loading, checks and --help.

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

from megarl.config.base import ANY_FLOAT, ANY_INT, Bounds, Choices, OptionsOf, SeamConfig, is_finite
from megarl.utils.importing import type_name

UNIONS = (types.UnionType, typing.Union)


@dataclass(frozen=True, kw_only=True)
class Key:
    """Describes one dotted key, a field of the dataclass `owner`. section: its dataclass where it
    is a group of further keys. element: of a dict of sections by name, the dataclass of each."""

    name: str
    default: Any  # dataclasses.MISSING when a value is required
    owner: type
    annotation: Any
    section: type | None
    element: type | None
    bounds: Bounds | None
    limits: Choices | None
    options_of: OptionsOf | None

    @property
    def help(self) -> str:
        """Returns the text below the field."""
        return _texts(self.owner).get(self.name.rpartition(".")[2], "")

    @property
    def choices(self) -> tuple[Any, ...] | None:
        """Returns the values that it may have, None for any of its type."""
        return self.limits.values if self.limits else None

    @property
    def or_path(self) -> bool:
        """Returns whether an import path is a value beside the choices."""
        return self.limits is not None and self.limits.or_path

    @property
    def nullable(self) -> bool:
        """Returns whether null is a value of the key."""
        return type(None) in typing.get_args(self.annotation)

    @property
    def free_form(self) -> bool:
        """Returns whether the key is a plain dict, which takes keys of any name."""
        return typing.get_origin(self.base_type) is dict and self.element is None

    @property
    def seam(self) -> bool:
        """Returns whether the key names code, of which a text is the short form."""
        return self.section is not None and issubclass(self.section, SeamConfig)

    @property
    def base_type(self) -> Any:
        """Returns the annotation without `| None`."""
        return _strip_none(self.annotation)

    def inner(self) -> Iterator[Key]:
        """Yields the keys of the section."""
        assert self.section is not None
        parent = self.default if isinstance(self.default, self.section) else None
        return children(self.section, f"{self.name}.", parent)

    @property
    def type_name(self) -> str:
        """Returns the annotation as --help and messages spell it."""
        return type_name(self.annotation)


def _strip_none(annotation: Any) -> Any:
    if typing.get_origin(annotation) not in UNIONS:
        return annotation
    rest = [a for a in typing.get_args(annotation) if a is not type(None)]
    return rest[0] if len(rest) == 1 else annotation


def _element(annotation: Any) -> type | None:
    """Returns the dataclass of a dict of sections, None for any other annotation."""
    inner = typing.get_args(annotation)[1:] if typing.get_origin(annotation) is dict else ()
    sections = (a for a in inner if isinstance(a, type) and dataclasses.is_dataclass(a))
    return next(sections, None)


def _default(field: dataclasses.Field[Any], parent: Any) -> Any:
    if parent is not None:
        return getattr(parent, field.name)
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


@cache
def _declared(cls: type) -> list[tuple[dataclasses.Field[Any], dict[str, Any]]]:
    """Returns the fields of `cls`, each with what its Key has of the declaration alone."""
    plain, whole = typing.get_type_hints(cls), typing.get_type_hints(cls, include_extras=True)
    declared = []
    for field in dataclasses.fields(cls):
        base, notes = _strip_none(plain[field.name]), _notes(whole[field.name])
        facts = {
            "owner": cls,
            "annotation": plain[field.name],
            "section": base if dataclasses.is_dataclass(base) and isinstance(base, type) else None,
            "element": _element(plain[field.name]),
            "bounds": next((x for x in notes if isinstance(x, Bounds)), None),
            "limits": next((x for x in notes if isinstance(x, Choices)), None),
            "options_of": next((x for x in notes if isinstance(x, OptionsOf)), None),
        }
        declared.append((field, facts))
    return declared


def _notes(annotation: Any) -> list[Any]:
    """Returns what an annotation says beside types."""
    if typing.get_origin(annotation) is typing.Annotated:
        return list(annotation.__metadata__)
    inner = typing.get_args(annotation) if typing.get_origin(annotation) in (*UNIONS, list) else ()
    return [note for part in inner for note in _notes(part)]


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
    for field, known in _declared(cls):
        yield Key(name=prefix + field.name, default=_default(field, parent), **known)


def all_keys(cls: type, *, parent: Any = None) -> Iterator[Key]:
    """Yields every key of `cls` in order, each section before its own keys; of the instance
    `parent`, if given, those that it has, with its values as defaults."""
    return _below(children(cls, "", parent), nulls=parent is None)


def _below(keys: Iterator[Key], *, nulls: bool) -> Iterator[Key]:
    """Yields keys and those in them; nulls: of sections that are null, too, and of no object."""
    for key in keys:
        yield key
        if key.section is not None and (nulls or key.default is not None):
            yield from _below(key.inner(), nulls=nulls)
        if key.element is not None and not nulls:
            for name, element in key.default.items():
                inner = children(key.element, f"{key.name}.{name}.", element)
                yield from _below(inner, nulls=nulls)


def key_table(cls: type) -> dict[str, Key]:
    """Returns every key by its name; callers must not change the dict."""
    return _key_table(cls)


@cache
def _key_table(cls: type) -> dict[str, Key]:
    return {k.name: k for k in all_keys(cls)}


def find_key(keys: Iterator[Key], name: str) -> Key | None:
    """Returns the key `name` of `keys` or of those in them: it may lie in a dict of sections
    (valid_datasets.math.size). None for one that there is not."""
    for key in keys:
        own, dot, _ = name.removeprefix(f"{key.name}.").partition(".")
        if key.name == name:
            return key
        if name.startswith(f"{key.name}.") and key.section is not None:
            return find_key(key.inner(), name)
        if name.startswith(f"{key.name}.") and key.element is not None and dot:
            return find_key(children(key.element, f"{key.name}.{own}."), name)
    return None


def value_problems(cfg: Any, prefix: str = "") -> Iterator[str]:
    """Yields a line for each value of the dataclass `cfg` that is not among the choices of its key,
    for each number that is not finite, or outside the bounds; `prefix` is the section that `cfg`
    is, with its dot."""
    for key in all_keys(type(cfg), parent=cfg):
        unset = key.nullable and key.default is None
        if key.limits is not None and not unset and not key.limits.allow(key.default):
            yield prefix + not_a_choice(key, show(key.default))
        for value in key.default if isinstance(key.default, list) else [key.default]:
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            largest = ANY_INT if isinstance(value, int) else ANY_FLOAT
            wrong = [b for b in (key.bounds, largest) if b is not None and not b.allow(value)]
            if wrong:
                yield prefix + _out_of(wrong[0], key, finite=is_finite(value))
                break


def not_a_choice(key: Key, shown: str) -> str:
    """Returns the line that says which choices the key has, of a value as it is to be shown."""
    path = " (or pkg.module:name)" if key.or_path else ""
    choices = [show(choice) for choice in key.choices or ()]
    near = difflib.get_close_matches(shown, choices, n=1, cutoff=0.7)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"{key.name}={shown}: not one of {', '.join(choices)}{path}{meant}"


def _out_of(bounds: Bounds, key: Key, *, finite: bool) -> str:
    each = "each " if isinstance(key.default, list) else ""
    kind = "" if finite else "a finite number "
    null = ", or null" if key.nullable else ""
    note = f" ({bounds.note})" if bounds.note else ""
    return f"{key.name}={show(key.default)}: {each}must be {kind}{bounds}{null}{note}"


def show(value: Any) -> str:
    """Returns a value as YAML spells it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)
