"""Declares families of models, a file each: parameters, config.json, megatron-core's settings.

To add a family put a file here (or call `register` from a package of your own) with its entry in
FAMILIES: a Family whose fields say what differs from Llama, or a subclass of it. Loading, saving,
streaming, coverage checks, random weights, costs and the planner follow. See docs/add-a-model.md.

Only functions that the megatron-core side calls import torch or megatron.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from megarl.config.engine import TEXT
from megarl.models.families.base import Family
from megarl.models.shapes import ModelConfig, Wrapper

FAMILIES: dict[str, Family] = {}


def register(family: Family) -> None:
    """Adds a family. Raises ValueError if another has its name."""
    if FAMILIES.setdefault(family.name, family) != family:
        raise ValueError(f"a model family {family.name!r} exists already; choose another name")


def family_of(m: ModelConfig) -> Family:
    """Returns the family of a ModelConfig. Raises KeyError where it was not registered."""
    return FAMILIES[m.family]


def find_family(raw: Mapping[str, Any], source: str) -> Family:
    """Returns the family of a config.json by its architectures. Without architectures, or with that
    of a complete model, the model_type of a language model decides, as in transformers. Raises
    ValueError, listing the known ones, if there is none. `source` names the file."""
    names, kind = raw.get("architectures") or [], raw.get("model_type")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{source}: architectures={names!r}; expected a list of names")
    fits = [
        f
        for f in FAMILIES.values()
        if ({f.architecture, f.classifier}.intersection(names) and f.model_type in (None, kind))
        or (f.name == kind and set(names) <= {w.architecture for w in f.wrappers})
    ]
    if fits:
        return max(fits, key=lambda f: f.model_type is not None)
    if wrapped := find_wrapper(raw):
        return wrapped[0]
    raise ValueError(
        f"{source}: architecture {names or kind!r} is not supported; supported: "
        f"{', '.join(dict.fromkeys(name for f in FAMILIES.values() for name in _names(f)))}"
    )


def find_wrapper(raw: Mapping[str, Any]) -> tuple[Family, Wrapper] | None:
    """Returns the family of the language model within a config.json, and what wraps it, or None
    where no family has a wrapper of its architectures, or the config is the language model's."""
    names = raw.get("architectures")
    if not isinstance(names, list):
        return None
    pairs = ((f, w) for f in FAMILIES.values() for w in f.wrappers if w.architecture in names)
    found = next(pairs, None)
    return found if found and (TEXT in raw or raw.get("model_type") != found[0].name) else None


def _names(family: Family) -> list[str]:
    return [family.architecture, *(w.architecture for w in family.wrappers)]


for _info in pkgutil.iter_modules(__path__):
    for _family in getattr(importlib.import_module(f"{__name__}.{_info.name}"), "FAMILIES", ()):
        register(_family)
