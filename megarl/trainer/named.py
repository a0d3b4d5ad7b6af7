"""Checks of what a configuration names: a place for the run, a tokenizer, data, code.

They come before any process group or server exists. None imports torch, but `check_code` where the
code that is named does.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.config.check import engines, model_path
from megarl.config.dataset import DatasetConfig
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.loader import run_dir
from megarl.config.recipes import BaseConfig, GRPOConfig
from megarl.config.rollout import RolloutConfig
from megarl.data import check_batches, load_problems
from megarl.data.problem import Problem
from megarl.rollout.rewards import check_rows, get_reward_fn, is_registered
from megarl.trainer.user_code import Named, code_problems
from megarl.utils.isolated import call_isolated

IMPORT_TIMEOUT = 300.0  # seconds the import of a user's modules may take
_TOKENIZER_FILES = ("*tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


def check_place(cfg: BaseConfig) -> None:
    """Raises ConfigError where the run directory cannot be made. Writes nothing."""
    directory = run_dir(cfg).absolute()
    try:
        there = next(p for p in (directory, *directory.parents) if p.exists())
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))
    except OSError as e:
        raise ConfigError(
            [f"the run directory {directory} cannot be made: {e}; set another fileroot"]
        ) from e


def check_tokenizer(cfg: BaseConfig) -> None:
    """Raises ConfigError where the tokenizer's directory holds nothing of a tokenizer."""
    name = next(iter(engines(cfg)))
    key, path = f"{name}.path", Path(cfg.tokenizer_path or model_path(cfg, name))
    if path.is_dir() and not any(found for p in _TOKENIZER_FILES for found in path.glob(p)):
        key = "tokenizer_path" if cfg.tokenizer_path else key
        raise ConfigError(
            [
                f"{key}={path}: has no tokenizer (tokenizer.json, tokenizer_config.json, ...); set "
                "tokenizer_path to a directory that has one"
            ]
        )


def datasets(cfg: BaseConfig) -> dict[str, DatasetConfig]:
    """The data sets of a recipe by their key."""
    found = {"train_dataset": cfg.train_dataset, "valid_dataset": cfg.valid_dataset}
    return {key: data for key, data in found.items() if data is not None}


def check_data(cfg: BaseConfig) -> dict[str, tuple[str, ...]]:
    """Reads all data, as the run will. Raises ConfigError naming each set that is not sound; by
    key, what a reward gets of a row.
    """
    problems, row_keys = [], {}
    for key, data in datasets(cfg).items():
        try:
            rows = load_problems(data, seed=cfg.seed)
            if key == "train_dataset":  # the other is not cut into batches
                check_batches(len(rows), data)
            _check_answers(cfg, data, rows)
            row_keys[key] = rows[0].row_keys
        except ValueError as e:
            problems.append(f"{key}: {e}")
    raise_if_any(problems)
    return row_keys


def _check_answers(cfg: BaseConfig, data: DatasetConfig, problems: Sequence[Problem]) -> None:
    """Has a reward of megarl's own look at every row. Others are checked when the run begins, for
    their code is not imported here.
    """
    name = data.reward or data.type
    if isinstance(cfg, GRPOConfig) and is_registered(name):
        rows = (
            {"row_id": i, "answer": p.answer, "task": p.task, **p.extra}
            for i, p in enumerate(problems)
        )
        check_rows(get_reward_fn(name), rows)


def check_code(
    cfg: BaseConfig,
    row_keys: dict[str, tuple[str, ...]],
    *,
    isolated: bool = False,
    path: Sequence[str] = (),
) -> None:
    """Imports the workflow and the rewards that are not megarl's own. Raises ConfigError for each
    that is not to be had or does not take what it is given. `isolated`: in a process of its own,
    with `path` in front of the import path.
    """
    if not isinstance(cfg, GRPOConfig):
        return
    named = list(_named_code(cfg, row_keys))
    if isolated:  # what a script defines itself, it finds itself
        named = [code for code in named if not code.target.startswith("__main__:")]
    if not named:
        return
    if not isolated:
        raise_if_any(code_problems(named, path))
        return
    try:
        raise_if_any(call_isolated(code_problems, named, path, timeout=IMPORT_TIMEOUT))
    except (TimeoutError, ChildProcessError) as e:
        targets = ", ".join(f"{code.key}={code.target}" for code in named)
        raise ConfigError([f"{targets}: cannot be imported: {e}"]) from e


def _named_code(cfg: GRPOConfig, row_keys: dict[str, tuple[str, ...]]) -> Iterator[Named]:
    own_workflow = cfg.rollout.workflow != RolloutConfig().workflow
    if own_workflow:
        yield Named(key="rollout.workflow", target=cfg.rollout.workflow, kind="workflow")
    for key, data in datasets(cfg).items():
        if not is_registered(data.reward or data.type):
            row = None if own_workflow else row_keys[key]
            yield Named(key=f"{key}.reward", target=data.reward, kind="reward", row=row)
