"""Converts the keys of another system's recipe by the tables of megarl/config/foreign."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config.aliases import aliased, entries, foreign_keys, foreign_tables, is_key
from megarl.config.compose import Commented, read_file, untyped, write_commented
from megarl.config.errors import raise_if_any
from megarl.config.loader import checked_config
from megarl.config.recipes import GRPOConfig
from megarl.config.schema import key_table, show
from megarl.config.secrets import flat

_KEY = re.compile(r"\$\{([\w.]+)\}")
_OFF = ("null", "false", "-1")  # values of a key that changes nothing
_PASSED_ON = re.compile(r"(apply_chat_template_kwargs|override_config)\.")  # where no value is off


def keys_of(file: Path) -> dict[str, Any]:
    """Returns the values of a YAML file by dotted key. Raises ConfigError if it is no YAML."""
    return flat(untyped(read_file(file)))


def followed(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values with each `${key}` of these keys replaced. Other interpolations stay."""

    def value_of(value: Any, seen: tuple[str, ...] = ()) -> Any:
        names = [n for n in _KEY.findall(value) if n in keys] if isinstance(value, str) else []
        raise_if_any(f"{n}={keys[n]}: refers to itself" for n in names if n in seen)
        for name in names:
            inner = value_of(keys[name], (*seen, name))
            value = inner if value == f"${{{name}}}" else value.replace(f"${{{name}}}", str(inner))
        return value

    return {name: value_of(value, (name,)) for name, value in keys.items()}


def flag(keys: dict[str, Any], name: str, default: bool, problems: list[str]) -> bool:
    """Takes a switch out of `keys` and returns its value, or `default` if the key is missing. Adds
    to `problems` if the value is neither true nor false."""
    value = keys.pop(name, default)
    if not isinstance(value, bool):
        problems.append(f"{name}={show(value)}: write true or false")
    return value is True


def converted(
    system: str, keys: Mapping[str, Any], rows: Sequence[Commented], problems: Sequence[str]
) -> str:
    """Returns the YAML of a GRPO recipe with the system's defaults, `rows` and these of its keys.

    Raises ConfigError with `problems` and one for every key without a counterpart, or one for every
    value that our key cannot have.
    """
    tables, names = foreign_tables(system), foreign_keys(system)
    ours_by_name = key_table(GRPOConfig)
    off = {name for name, value, _ in rows if value is None}  # sections
    rows = [(n, v, f"{system}'s default") for n, v in tables["defaults"].items()] + [*rows]
    needless, problems = list[str](), [*problems]
    for name, value in keys.items():
        found = name if name in ours_by_name else next(entries(names, name), name)
        ours = (aliased(ours_by_name, name, {name: found}) or "").partition("=")[0]
        known = tables["values"].get(ours, tables["values"].get(ours.rpartition(".")[2], {}))
        value = known.get(value, value) if isinstance(value, Hashable) else value
        is_dropped = value is None and not getattr(ours_by_name.get(ours), "nullable", False)
        if is_key(found) and ours and not is_dropped and ours.partition(".")[0] not in off:
            value = [value] if ours.endswith(".files") and isinstance(value, str) else value
            rows.append((ours, value, name))
        elif (is_key(found) and ours) or _changes_nothing(name, value) or _is_met(found, value):
            needless.append(name)
        else:
            advice = "has no counterpart; take it out" if is_key(found) else found
            problems.append(f"{name}={show(value)}: {advice}")
    raise_if_any(problems)
    checked_config(text := write_commented(rows), ())
    return f"{text}# not needed: {', '.join(needless)}"


def _changes_nothing(name: str, value: Any) -> bool:
    """Returns whether a value turns off the feature of its key. 0 may turn something on, and so may
    false where a section is passed on to another library."""
    return show(value) in _OFF and not _PASSED_ON.search(name)


def _is_met(advice: str, value: Any) -> bool:
    """Returns whether an advice is to leave the key out, or to use the value that it has."""
    return advice.startswith("leave it out") or advice.endswith(f"use {show(value)}")
