"""Knows our keys by their names in TRL, verl, AReaL, slime, NeMo-RL and Megatron-LM.

foreign/keys.yaml has a row for each of our keys, with its names in each system; foreign/SYSTEM.yaml
has the system's keys without one of ours, behind an advice. A name stands for the end of a
dotted name (`rollout.n` for `actor_rollout_ref.rollout.n`), or with `.*` for a section; the longest
end counts. In our key, a first `*` is the role that the name mentions, else the trained one; a last
`*` is the rest of their name; `=...` is a value to give the key. The other sections serve the
commands that convert a recipe (megarl/cli/convert.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

ROLES = ("actor", "model")  # the trained model of a recipe: the first it has
_SAME_ROLE = {"policy": "actor", "reference": "ref", "ref_model": "ref", "value_model": "critic"}
WITH_ADVICE = ("verl", "AReaL", "earlier")
_SEAM = ("type", "options")
_KEY = re.compile(r"[\w.*]+(=.*)?")
# of supervised fine-tuning, where the names of RL mean something else or nothing
_LENGTHS = ("max_seq_len", "max_seq_length", "max_model_len", "max_length")
_SFT = dict.fromkeys(_LENGTHS, "train_dataset.max_length") | {"dataset": "train_dataset.path"}


@cache
def foreign_tables(name: str) -> dict[str, dict[str, Any]]:
    """Returns the sections of foreign/NAME.yaml."""
    from megarl.config.compose import read_yaml, untyped  # which imports this module

    path = Path(__file__).with_name("foreign") / f"{name}.yaml"
    tables: dict[str, dict[str, Any]] = untyped(read_yaml(path.read_text(encoding="utf-8")))
    return tables


@cache
def foreign_keys(system: str = "") -> dict[str, str]:
    """Returns their names, each with our key or an advice. system: "" is all of them; a section
    with an advice is for a conversion from its own system."""
    advised: dict[str, str] = {}
    for name in [system] if system else WITH_ADVICE:
        for text, names in foreign_tables(name)["advice"].items():
            advised |= dict.fromkeys(_listed(names), text)
    merged: dict[str, str] = {}
    for ours, row in foreign_tables("keys").items():
        for name in [system] if system else row:
            merged |= dict.fromkeys(_listed(row.get(name, [])), ours)
    if system:
        return merged | advised
    return {name: text for name, text in advised.items() if not name.endswith(".*")} | merged


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names


def is_key(ours: str) -> bool:
    """Returns whether an entry of `keys` is a key, not an advice."""
    return _KEY.fullmatch(ours) is not None


def entries(table: Mapping[str, str], name: str) -> Iterator[str]:
    """Yields the entries for a dotted name, that of the longest end first."""
    parts = name.split(".")
    for start in range(len(parts)):
        for end in range(len(parts), start, -1):
            front, rest = ".".join(parts[start:end]), ".".join(parts[end:])
            if (ours := table.get(f"{front}.*" if rest else front)) is not None:
                last = rest or parts[-1]
                yield ours[:-1] + last if ours.endswith(".*") else ours


def advice(name: str) -> str | None:
    """Returns the advice on another system's key that megarl does not need. None if megarl has such
    a key, or if no system has the name."""
    found = next(entries(foreign_keys(), name), None)
    return None if found is None or is_key(found) else found


def aliased(
    keys: Mapping[str, object], name: str, table: Mapping[str, str] | None = None
) -> str | None:
    """Returns our name for the dotted `name` in a recipe of these `keys`; None for no alias.
    table: the names to look among; None is those of all systems."""
    if table is None:
        table = foreign_keys() if "gconfig" in keys else {**foreign_keys(), **_SFT}
    role, main = role_of(keys, name), main_role(keys)
    for target in filter(is_key, entries(table, name)):
        if get_close_matches(target.partition(".options.")[2].partition(".")[0], _SEAM):
            continue  # a misspelt key of the section, not one of its options
        for ours in dict.fromkeys(re.sub(r"^\*", r, target) for r in (role, main)):
            own, key = ours.replace(".options.", "."), ours.partition("=")[0]
            if own in keys:
                return own
            above = key.rpartition(".")[0]
            around = (keys.get(above), keys.get(above.rpartition(".")[0]))
            if key in keys or any(getattr(k, "free_form", False) for k in around):
                return ours
    return None


def main_role(keys: Mapping[str, object]) -> str:
    """Returns the section of the model that this recipe is about: actor in RL, model in SFT."""
    return next(role for role in ROLES if role in keys)


def role_of(keys: Mapping[str, object], name: str) -> str:
    """Returns the last role that `name` mentions, else the main one."""
    known = (*ROLES, "ref", "critic", "reward_model")
    for part in reversed(name.split(".")[:-1]):
        role = _SAME_ROLE.get(part, part)
        if role in known and role in keys:
            return role
    return main_role(keys)
