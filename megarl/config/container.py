"""Checks, from outside, a job whose processes run in a container: the paths of its configuration
are those inside."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from os.path import normpath
from pathlib import Path
from typing import Any, TypeVar

from megarl.config.errors import ConfigError
from megarl.config.recipes import BaseConfig
from megarl.config.secrets import as_written, written_values

T = TypeVar("T")
# the last words of keys that name a file or a directory; fileroot has one name on both sides
_FILES = ("path", "file", "files", "template", "dir", "directory", "folder", "run")


class View:
    """A configuration as this machine sees it. `seen` has the paths of cluster.container_mounts as
    this machine has them; it is the very same without a container, and `inside` of one."""

    def __init__(self, cfg: BaseConfig, *, inside: bool = False) -> None:
        self.seen, self._hidden = (cfg, set[str]()) if inside else _translated(cfg)

    def check(self, check: Callable[[BaseConfig], T]) -> T | None:
        """Returns what `check` gives for `seen`. What it objects to about a path that only the
        container has is left to the processes inside: None is returned where there is nothing
        else. Raises ConfigError, with the environment's values as they were written."""
        try:
            return check(self.seen)
        except ConfigError as e:
            hidden = self._hidden
            problems = [p for p in e.problems if not any(_mentions(p, path) for path in hidden)]
            if problems:  # not from e, whose text has the environment's values
                raise ConfigError(as_written(problems, written_values(self.seen))) from None
            return None


def check_fileroot(cfg: BaseConfig) -> None:
    """Raises ConfigError where the container has another name for the directory of runs."""
    here = _outside(cfg, cfg.fileroot) if cfg.cluster.container else None
    if here is not None and Path(here).resolve() != Path(cfg.fileroot).resolve():
        why = f"this machine has it as {here}, and the launcher writes there too"
        fix = f"give it the same name: fileroot={here}, cluster.container_mounts=[{here}:{here}]"
        raise ConfigError(f"fileroot={cfg.fileroot}: {why}; {fix}")


def _mentions(problem: str, path: str) -> bool:
    """Returns whether a line names the path, or what lies below it."""
    return re.search(rf"(?<![\w./-]){re.escape(path)}(?![\w-]|\.\w)", problem) is not None


def _translated(cfg: BaseConfig) -> tuple[BaseConfig, set[str]]:
    """Returns the configuration with this machine's paths, and the paths that no mount has."""
    hidden: set[str] = set()
    if not cfg.cluster.container:
        return cfg, hidden

    def translate(value: Any, key: str = "") -> Any:
        if isinstance(value, str) and value.startswith("/"):
            if (path := _outside(cfg, value)) is not None:
                return path
            file, colon, _ = value.rpartition(".py:")
            if colon:
                hidden.add(f"{file}.py")
            elif key.rpartition("_")[2] in _FILES and value.strip("/"):
                hidden.add(value.rstrip("/"))
            return value
        if isinstance(value, list):
            return [translate(v, key) for v in value]
        if isinstance(value, dict):
            return {k: translate(v, str(k)) for k, v in value.items()}
        if is_dataclass(value) and value is not outside.cluster:
            for field in fields(value):
                setattr(value, field.name, translate(getattr(value, field.name), field.name))
        return value

    outside = copy.deepcopy(cfg)
    translate(outside)
    return outside, hidden


def _outside(cfg: BaseConfig, path: str) -> str | None:
    """Returns where this machine has a path of the container, None where no mount has it. Of mounts
    within each other the innermost has it."""
    path, mounts = normpath(path), {}
    for mount in cfg.cluster.container_mounts:  # /here or /here:/there[:flags]
        here, _, rest = mount.partition(":")
        mounts[normpath(rest.partition(":")[0] or here)] = Path(here)
    inside = [there for there in mounts if Path(path).is_relative_to(there)]
    if not inside or not mounts[there := max(inside, key=len)].exists():
        return None
    return str(mounts[there] / Path(path).relative_to(there))
