"""Configures an environment of the verifiers package."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RENDERER = {"name": "custom", "import_path": "megarl_template.TemplateRenderer"}


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Configures one environment, and the workers that run it.

    python: the interpreter that has verifiers. id: the taskset's, as `vf-eval` takes it. args: its
    options. env: further parts of verifiers' EnvConfig (id, the agents by their roles, timeout).
    harness: of agents that name none: megarl_chat answers without tools in the worker itself, null
    is verifiers' own chat program with tools, empty is the taskset's. renderer: how chats become
    tokens, as verifiers' client takes it; the default follows any chat template.
    path: directories with modules of your own. variables: names of environment variables that the
    workers get besides a few that everything needs.
    workers: processes. concurrent: episodes at once in each. start_timeout, episode_timeout:
    seconds.
    """

    python: str
    id: str
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    harness: str = "megarl_chat"
    renderer: dict[str, Any] = field(default_factory=lambda: dict(RENDERER))
    path: list[str] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)
    workers: int = 1
    concurrent: int = 64
    start_timeout: float = 300.0
    episode_timeout: float = 1200.0

    def __post_init__(self) -> None:
        if not Path(self.python).is_file():
            raise ValueError(
                f"options.python={self.python!r}: no such interpreter; make one with "
                "python3 -m venv DIR && DIR/bin/pip install verifiers==0.4.0 uv, and name "
                "DIR/bin/python"
            )
        if not self.id:
            raise ValueError("options.id is empty: name the taskset, as vf-eval takes it")
        for name in ("workers", "concurrent", "start_timeout", "episode_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"options.{name}={getattr(self, name)}: must be > 0")
        if missing := [p for p in self.path if not Path(p).is_dir()]:
            raise ValueError(f"options.path: {missing[0]!r} is no directory")

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> EnvironmentConfig:
        """Returns the configuration of a data set's options. Raises ValueError for an option that
        there is not, is missing or is wrong."""
        names = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(options) - names):
            raise ValueError(f"options.{unknown[0]}: there is no such option; use {sorted(names)}")
        if missing := [n for n in ("python", "id") if n not in options]:
            raise ValueError(f"options.{missing[0]} is missing")
        return cls(**options)

    @property
    def key(self) -> str:
        """Returns a text that equal configurations share."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @property
    def settings(self) -> dict[str, Any]:
        """Returns what a worker is told at its start."""
        env = {**self.env, "taskset": {**self.env.get("taskset", {}), **self.args, "id": self.id}}
        return {"env": env, "harness": self.harness, "concurrent": self.concurrent}
