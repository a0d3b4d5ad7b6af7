"""Renders --help, every key of the recipes with type, default, choices and its one-line meaning;
and says which key an unknown one was meant to be."""

from __future__ import annotations

import difflib
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields

from megarl.config.aliases import advice, aliased, role_of
from megarl.config.errors import ConfigError
from megarl.config.recipes import RECIPES, BaseConfig, find_recipe
from megarl.config.schema import Key, all_keys, children, key_table, show

INDENT = 34


def render_help(recipes: Sequence[str] = tuple(RECIPES), *, width: int | None = None) -> str:
    """Returns the keys shared by every recipe, then each recipe's own, grouped by section. `width`
    is in characters; None takes the terminal's, at most 120."""
    width = width or _terminal_width()
    lines = ["keys of every recipe", *_group(list(children(BaseConfig)), width)]
    shared = {f.name for f in fields(BaseConfig)}
    for name in recipes:
        own = [k for k in children(find_recipe(name)) if k.name not in shared]
        lines += ["", f"keys of recipe={name}", *_group(own, width)]
    return "\n".join(lines)


def render_section(section: str, recipes: Sequence[str] = tuple(RECIPES)) -> str:
    """Returns the keys of one section (or one key), such as `rollout` or `actor.optimizer`, as
    `render_help` shows them. Where recipes differ in it, each version names its recipes. Raises
    ConfigError, with the nearest name, for a section that no recipe has."""
    width = _terminal_width()
    recipes_of: dict[str, list[str]] = {}  # by the text
    names: set[str] = set()
    for recipe in recipes:
        for key in all_keys(find_recipe(recipe)):
            names.add(key.name)
            if key.name == section:
                text = "\n".join(_group([key], width)).strip("\n")
                recipes_of.setdefault(text, []).append(recipe)
    if not recipes_of:
        near = difflib.get_close_matches(section, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "--help alone lists all"
        raise ConfigError(f"--help {section}: no section or key of that name; {hint}")
    if len(recipes_of) == 1:
        return next(iter(recipes_of))
    return "\n\n".join(f"recipe={', '.join(names)}\n{text}" for text, names in recipes_of.items())


def _terminal_width() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def _group(keys: list[Key], width: int) -> Iterator[str]:
    """Yields plain keys, then each section under its title."""
    for key in keys:
        if key.section is None:
            yield from _one_key(key, width)
    for key in keys:
        if key.section is not None:
            off = " (null unless one of its keys is set)" if key.nullable else ""
            yield from ("", f"  {key.name}: {key.help}{off}")
            yield from _group(list(key.inner()), width)


def _one_key(key: Key, width: int) -> list[str]:
    head = f"  {key.name}"
    words = [*map(show, key.choices or ()), *(["pkg.module:name"] if key.or_path else [])]
    choices = f" {{{', '.join(words)}}}" if words else ""
    required = key.default is MISSING
    value = "required" if required else f"default {show(key.default)}"
    body = f"{key.help} [{key.type_name}, {value}]{choices}"
    lines = textwrap.wrap(body, max(width - INDENT, 40))
    if len(head) >= INDENT - 1:
        return [head, *(" " * INDENT + line for line in lines)]
    return [head.ljust(INDENT) + lines[0], *(" " * INDENT + line for line in lines[1:])]


# unknown keys


def unknown_key(cls: type, name: str) -> str:
    """Returns the line on a key that `cls` lacks."""
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
    """Returns what to do about a key that `cls` lacks, as the end of a line."""
    if (known := advice(name)) is not None:
        return f"; {known}"
    near = _nearest_key(key_table(cls), name)
    return f"; did you mean {near}?" if near else "; --help lists all keys"


def _nearest_key(table: dict[str, Key], name: str) -> str | None:
    """Returns the key that `name` was probably meant to be, None where none is like it.

    It looks for another trainer's name of a key (aliases.py), then for the same last part (`tp` ->
    `actor.parallel.tp`), then for similar names inside the section that the front of `name` does
    reach, then for a similar last part anywhere. Among equals, the key of most of the sections of
    `name` comes first, then that of the role it mentions, else of the recipe's main role.
    """
    if (ours := aliased(table, name)) is not None:
        return ours
    names = [k for k in table if not name.startswith(k + ".")]
    alike = [k for k in names if _last(k) == _last(name)]
    if not alike:
        fronts = ["", *(f"{k}." for k, key in table.items() if key.section is not None)]
        front = max((f for f in fronts if name.startswith(f)), key=len)
        inside = [k.removeprefix(front) for k in names if k.startswith(front)]
        if near := difflib.get_close_matches(name.removeprefix(front), inside, n=1, cutoff=0.65):
            return front + near[0]
        near = difflib.get_close_matches(_last(name), {_last(k) for k in names}, n=1, cutoff=0.75)
        alike = [k for k in names if _last(k) in near]
    sections, role = set(name.split(".")[:-1]), role_of(table, name)

    def distance(key: str) -> tuple[int, bool]:
        own = key.split(".")[:-1]
        return -len(sections.intersection(own)), own[:1] != [role]

    return min(alike, key=distance, default=None)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
