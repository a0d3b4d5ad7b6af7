"""Where problems come from, by DatasetConfig.type. Imports no torch, so that a start can look at
its data before anything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megarl.config.dataset import DatasetConfig
from megarl.data.arithmetic import arithmetic
from megarl.data.gsm8k import gsm8k
from megarl.data.problem import Problem
from megarl.data.reasoning_gym import reasoning_gym

# to add a source: a function (cfg, *, seed) -> list[Problem], here and in DatasetConfig.type
SOURCES: dict[str, Callable[..., list[Problem]]] = {
    "arithmetic": arithmetic,
    "gsm8k": gsm8k,
    "reasoning_gym": reasoning_gym,
}
# options every source takes: they shape the prompt, not the problems
_PROMPT_OPTIONS: dict[str, type] = {"system": str, "chat_template_kwargs": dict}


def load_problems(cfg: DatasetConfig, *, seed: int) -> list[Problem]:
    """At least one problem. Raises ValueError naming the option, the file and the line, or the
    number of rows that is wrong.
    """
    if cfg.type not in SOURCES:
        raise ValueError(f"dataset type {cfg.type!r}: use one of {sorted(SOURCES)}")
    for name, value in prompt_options(cfg).items():
        if value is not None and not isinstance(value, _PROMPT_OPTIONS[name]):
            kind = "text" if _PROMPT_OPTIONS[name] is str else "keys and values"
            raise ValueError(f"dataset type {cfg.type}: options.{name}={value!r}: not {kind}")
    own = {k: v for k, v in cfg.options.items() if k not in _PROMPT_OPTIONS}
    problems = SOURCES[cfg.type](replace(cfg, options=own), seed=seed)
    if not problems:
        raise ValueError(f"{describe(cfg)} is empty: its source has 0 rows")
    return problems


def prompt_options(cfg: DatasetConfig) -> dict[str, Any]:
    return {k: v for k, v in cfg.options.items() if k in _PROMPT_OPTIONS}


def check_batches(rows: int, cfg: DatasetConfig) -> None:
    """Raises ValueError where `rows` rows give no batch."""
    if cfg.drop_last and rows < cfg.batch_size:
        raise ValueError(
            f"dataset {cfg.type}, split {cfg.split}: {rows} rows do not fill one batch of "
            f"batch_size={cfg.batch_size}; lower it or set drop_last=false"
        )


def describe(cfg: DatasetConfig) -> str:
    where = f" ({cfg.path})" if cfg.path else ""
    return f"dataset {cfg.type}{where}, split {cfg.split},"
