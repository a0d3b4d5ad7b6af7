"""Says which key an unknown one was meant to be."""

from __future__ import annotations

from megarl.config.aliases import NEEDLESS, aliased
from megarl.config.recipes import RECIPES
from megarl.config.schema import key_table, nearest_keys


def unknown_key(cls: type, name: str) -> str:
    """Returns the line on a key that `cls` lacks."""
    if name in key_table(cls):
        return f"{name}: dots are for the command line; in YAML nest the key in its section"
    elsewhere = _elsewhere(cls, name)
    if aliased(key_table(cls), name) is None and elsewhere:
        return f"{name}: unknown key of this recipe; {elsewhere}"
    also = f" ({elsewhere})" if elsewhere.endswith(" it") else ""
    return f"{name}: unknown key{hint(cls, name)}{also}"


def _elsewhere(cls: type, name: str) -> str:
    """Says which other recipe has the key, under this name or under ours; empty where none has."""
    for recipe, other in RECIPES.items():
        table = key_table(other)
        if other is not cls and name in table:
            return f"recipe={recipe} has it"
        if other is not cls and (ours := aliased(table, name)) is not None:
            return f"recipe={recipe} has {ours}"
    return ""


def hint(cls: type, name: str) -> str:
    """Returns what to do about a key that `cls` lacks, as the end of a line."""
    if (needless := NEEDLESS.get(name.rpartition(".")[2])) is not None:
        return f"; {needless}"
    near = nearest_keys(cls, name)
    return f"; did you mean {near[0]}?" if near else "; --help lists all keys"
