"""Checks, from outside, a job whose processes run in a container: the paths of its configuration
are those inside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from megarl.config.errors import ConfigError
from megarl.config.recipes import BaseConfig

T = TypeVar("T")


def seen_from_here(cfg: BaseConfig) -> BaseConfig:
    """Returns the configuration with the paths of cluster.container_mounts as this machine has
    them; the very same without a container."""
    return _translated(cfg)[0]


def checked_from_here(cfg: BaseConfig, check: Callable[[BaseConfig], T], otherwise: T) -> T:
    """Returns what `check` gives for the configuration as this machine sees it. What it objects to
    about a path that only the container has is left to the processes inside: `otherwise` is
    returned where there is nothing else. Raises ConfigError."""
    outside, hidden = _translated(cfg)
    try:
        return check(outside)
    except ConfigError as e:
        problems = [p for p in e.problems if not any(path in p for path in hidden)]
        if problems:
            raise ConfigError(problems) from e
        return otherwise


def _translated(cfg: BaseConfig) -> tuple[BaseConfig, set[str]]:
    """Returns the configuration as this machine sees it, and the paths that no mount of it has."""
    hidden: set[str] = set()
    if not cfg.cluster.container:
        return cfg, hidden

    def translate(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("/"):
            if (path := _outside(cfg, value)) is None:
                hidden.add(value)
            return path or value
        if isinstance(value, list):
            return [translate(v) for v in value]
        if isinstance(value, dict):
            return {k: translate(v) for k, v in value.items()}
        if is_dataclass(value) and value is not outside.cluster:
            for field in fields(value):
                setattr(value, field.name, translate(getattr(value, field.name)))
        return value

    outside = copy.deepcopy(cfg)
    translate(outside)
    return outside, hidden


def _outside(cfg: BaseConfig, path: str) -> str | None:
    """Returns where this machine has a path of the container, None where no mount has it."""
    for mount in cfg.cluster.container_mounts:  # /here or /here:/there[:flags]
        here, _, rest = mount.partition(":")
        there = rest.partition(":")[0] or here
        if Path(path).is_relative_to(there) and Path(here).is_dir():
            return str(Path(here) / Path(path).relative_to(there))
    return None
