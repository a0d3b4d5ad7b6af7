"""Checks, from outside, a job whose processes run in a container: the paths of its configuration
are those inside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from megarl.config.errors import ConfigError
from megarl.config.recipes import BaseConfig

T = TypeVar("T")


def seen_from_here(cfg: BaseConfig) -> BaseConfig:
    """Returns the configuration with the paths of cluster.container_mounts as this machine has
    them; the very same without a container."""
    if not cfg.cluster.container:
        return cfg
    outside = copy.deepcopy(cfg)
    for owner, name, path in _paths(outside):
        setattr(owner, name, _outside(cfg, path) or path)
    return outside


def checked_from_here(cfg: BaseConfig, check: Callable[[BaseConfig], T], otherwise: T) -> T:
    """Returns what `check` gives for the configuration as this machine sees it. What it objects to
    about a path that only the container has is left to the processes inside: `otherwise` is
    returned where there is nothing else. Raises ConfigError."""
    try:
        return check(seen_from_here(cfg))
    except ConfigError as e:
        if not cfg.cluster.container:
            raise
        hidden = {path for _, _, path in _paths(cfg) if _outside(cfg, path) is None}
        problems = [p for p in e.problems if not any(path in p for path in hidden)]
        if problems:
            raise ConfigError(problems) from e
        return otherwise


def _outside(cfg: BaseConfig, path: str) -> str | None:
    """Returns where this machine has a path of the container, None where no mount has it."""
    for mount in cfg.cluster.container_mounts:  # /here or /here:/there[:flags]
        here, _, rest = mount.partition(":")
        there = rest.partition(":")[0] or here
        if Path(path).is_relative_to(there) and Path(here).is_dir():
            return str(Path(here) / Path(path).relative_to(there))
    return None


def _paths(section: Any) -> Iterator[tuple[Any, str, str]]:
    """Yields (section, key, value) of every absolute path in a configuration's sections."""
    for field in fields(section):
        value = getattr(section, field.name)
        if isinstance(value, str) and value.startswith("/"):
            yield section, field.name, value
        parts = value.values() if isinstance(value, dict) else [value]
        for part in parts:
            if is_dataclass(part) and not isinstance(part, type) and field.name != "cluster":
                yield from _paths(part)
