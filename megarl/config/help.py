"""Renders --help: every key of the recipes with type, default, choices and its one-line meaning."""

from __future__ import annotations

import difflib
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields

from megarl.config.errors import ConfigError
from megarl.config.recipes import RECIPES, BaseConfig, find_recipe
from megarl.config.schema import Key, all_keys, children, show

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


def render_section(
    section: str, recipes: Sequence[str] = tuple(RECIPES), *, width: int | None = None
) -> str:
    """Returns the keys of one section (or one key), such as `rollout` or `actor.optimizer`, as
    `render_help` shows them. Where recipes differ in it, each version names its recipes. Raises
    ConfigError, with the nearest name, for a section that no recipe has."""
    width = width or _terminal_width()
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
        raise ConfigError([f"--help {section}: no section or key of that name; {hint}"])
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
            parent = key.default if isinstance(key.default, key.section) else None
            yield from _group(list(children(key.section, key.name + ".", parent)), width)


def _one_key(key: Key, width: int) -> list[str]:
    head = f"  {key.name}"
    words = [*map(show, key.choices or ()), *(["pkg.module:name"] if key.or_path else [])]
    choices = f" {{{', '.join(words)}}}" if words else ""
    required = key.default is MISSING
    value = "required" if required else f"default {show(key.default)}"
    body = f"{key.help} [{key.type_name}, {value}]{choices}"
    pad = " " * INDENT
    lines = textwrap.wrap(body, max(width - INDENT, 40))
    if len(head) < INDENT - 1:
        return [head.ljust(INDENT) + lines[0], *(pad + line for line in lines[1:])]
    return [head, *(pad + line for line in lines)]
