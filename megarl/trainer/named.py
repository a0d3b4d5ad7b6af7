"""Checks what a configuration names: a place for the run, a tokenizer, data, code.

They come before any process group or server exists. None imports torch, but `check_code` where the
code that is named does.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from megarl.config.algo import PreferenceConfig
from megarl.config.base import SeamConfig
from megarl.config.dataset import PartConfig, SourceConfig
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.loader import load_config, own_class, run_dir
from megarl.config.recipe_engines import engines, model_path
from megarl.config.recipes import (
    BaseConfig,
    DPOConfig,
    GRPOConfig,
    RMConfig,
    data_purpose,
    datasets,
    sources,
)
from megarl.config.rollout import Requirements, built_in_transport, requirements_of
from megarl.config.schema import all_keys
from megarl.config.secrets import keep_written
from megarl.data.overlap import apart, prompt_key
from megarl.data.preference import check_margins
from megarl.data.sources import check_batches, load_rows
from megarl.rollout.rewards import check_rows, get_reward_fn, is_registered, load_reward
from megarl.trainer.user_code import ALGORITHMS, Named, code_problems
from megarl.utils.importing import call_isolated, in_one_line, is_import_path

T = TypeVar("T")
Rows = Sequence[dict[str, Any]]
IMPORT_TIMEOUT = 300.0  # seconds the import of a user's modules may take
_TOKENIZER_FILES = ("*tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


def read_config(
    source: str | None, overrides: Sequence[str], *, foreign: bool, path: Sequence[str] = ()
) -> BaseConfig:
    """Returns load_config's configuration, without importing code of the user's: where this decides
    the dataclass, a process of its own imports it, with `path` in front of the import path, and
    checks all keys. Of these the result has megarl's. Raises ConfigError."""
    own = own_class(source, overrides)
    if own is None:
        return load_config(source, overrides, foreign=foreign)
    return _isolated(_read_as_ours, source, overrides, foreign, path=path, what=[own])


def _read_as_ours(source: str | None, overrides: Sequence[str], foreign: bool) -> BaseConfig:
    """Returns the configuration, which can be unpickled without the user's code."""
    cfg: BaseConfig = _as_ours(load_config(source, overrides, foreign=foreign))
    return cfg


def _as_ours(value: Any) -> Any:
    """Returns `value`, of megarl's dataclasses or of those below them, in megarl's."""
    if not is_dataclass(value):
        return value
    bases = inspect.getmro(type(value))
    ours: Any = next(base for base in bases if base.__module__.startswith("megarl."))
    made = ours(**{f.name: _as_ours(getattr(value, f.name)) for f in fields(ours)})
    keep_written(value, made)
    return made


def check_place(cfg: BaseConfig) -> None:
    """Raises ConfigError where the run directory cannot be made. Writes nothing."""
    directory = run_dir(cfg).absolute()
    there = next(p for p in (directory, *directory.parents) if os.path.exists(p))
    if not (os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)):
        why = f"{there} is no directory that can be written to; set another fileroot"
        raise ConfigError([f"the run directory {directory} cannot be made: {why}"])


def check_tokenizer(cfg: BaseConfig) -> None:
    """Raises ConfigError where the tokenizer's directory holds nothing of a tokenizer."""
    key, path = _tokenizer(cfg)
    directory = Path(path)
    if directory.is_dir() and not any(file for p in _TOKENIZER_FILES for file in directory.glob(p)):
        why = "has no tokenizer (tokenizer.json, tokenizer_config.json, ...)"
        raise ConfigError(
            [f"{key}={directory}: {why}; set tokenizer_path to a directory that has one"]
        )


def check_data(
    cfg: BaseConfig, *, isolated: bool = False, path: Sequence[str] = (), renders: bool = False
) -> dict[str, tuple[str, ...]]:
    """Reads all data as the run will; returns, by key of the source, the names that a reward gets
    of its rows. Raises ConfigError naming each that is not sound. With `isolated`, data that
    the user's code reads is read in a process of its own, with `path` in front of the import path.
    With `renders`, the run's tokenizer and chat template have to make tokens of a row of each.
    """
    own = [f"{k}={d.type}" for k, d in sources(cfg).items() if is_import_path(d.type)]
    if isolated and own:
        row_keys, first = _isolated(_read_data, cfg, path=path, what=own)
    else:
        row_keys, first = _read_data(cfg)
    if renders and not _renders_plainly(cfg, first):
        if isolated:
            what = ["the tokenizer of {1}".format(*_tokenizer(cfg))]
            _isolated(_check_rendering, cfg, first, True, what=what)
        else:
            _check_rendering(cfg, first)
    return row_keys


First = dict[str, tuple[str, dict[str, Any]]]  # of each source: what it is read for, and a row


def _tokenizer(cfg: BaseConfig) -> tuple[str, str]:
    """Returns the key that names the run's tokenizer, and its directory."""
    if cfg.tokenizer_path:
        return "tokenizer_path", cfg.tokenizer_path
    name = next(iter(engines(cfg)))
    return f"{name}.path", model_path(cfg, name)


def _renders_plainly(cfg: BaseConfig, first: First) -> bool:
    """Returns whether the tokenizer's own files make tokens of a row of each source. Where they do
    not, transformers has the last word."""
    from megarl.data.plain_tokenizer import PlainTokenizer

    template = cfg.chat_template
    try:
        text = Path(template).read_text(encoding="utf-8") if template else ""
        return not any(_unrendered(cfg, first, PlainTokenizer(Path(_tokenizer(cfg)[1]), text)))
    except Exception:  # a tokenizer's files may be wrong in any way
        return False


def _check_rendering(cfg: BaseConfig, first: First, alone: bool = False) -> None:
    """Raises ConfigError where the run's tokenizer cannot make tokens of a source's row. alone: in
    a process that does nothing else. transformers imports torch where there is one, though a
    tokenizer needs none: that is half of a start's checks."""
    if alone and not cfg.trust_remote_code:  # a tokenizer's own code may import it
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that there is no torch
    from megarl.data.tokenizer import run_tokenizer
    from megarl.utils.env import quiet_libraries

    quiet_libraries()
    key, path = _tokenizer(cfg)
    try:
        tokenizer = run_tokenizer(cfg, path)
    except Exception as e:  # a tokenizer's files may be wrong in any way
        why = f"its tokenizer cannot be loaded: {in_one_line(e)}"
        raise ConfigError([f"{key}={path}: {why}"]) from e
    raise_if_any(_unrendered(cfg, first, tokenizer))


def _unrendered(cfg: BaseConfig, first: First, tokenizer: Any) -> Iterator[str]:
    """Yields a line for each source of whose row the tokenizer cannot make tokens."""
    from megarl.data.encoding import encode_rows

    for name, (purpose, row) in first.items():
        try:
            list(encode_rows([row], sources(cfg)[name], tokenizer, purpose))
        except ValueError as e:
            yield f"{name}: {e}"


def _read_data(cfg: BaseConfig) -> tuple[dict[str, tuple[str, ...]], First]:
    """Returns what rewards get of the rows of each source, and its first row. Raises ConfigError
    naming each source that is not sound."""
    purpose = data_purpose(cfg)
    problems, row_keys, first = [], {}, First()
    trained: set[int] = set()
    count = 0
    for key, data in sources(cfg).items():
        _, _, part = key.partition(".parts.")
        trains = key.startswith("train_dataset")
        asks = _rewards(cfg) and (purpose == "rl" or not trains)
        reads = "prompts" if asks and purpose == "sft" else purpose
        try:
            rows: Rows = load_rows(data, seed=cfg.seed, purpose=reads, part=part)
            if trains:
                count += len(rows)
                trained.update(prompt_key(row, data) for row in rows)
            else:
                rows = apart(rows, data, frozenset(trained), cfg.evaluator.overlap, quiet=True)
            if asks:
                _check_answers(data, rows, cfg)
            if isinstance(cfg, RMConfig) and cfg.margin:
                check_margins(rows)
            first[key] = (reads, rows[0])
            row_keys[key] = ("row_id", *dict.fromkeys(name for row in rows for name in row))
        except ValueError as e:
            problems.append(f"{key}: {e}")
    try:
        if trained and not any(problem.startswith("train_dataset") for problem in problems):
            check_batches(count, cfg.train_dataset)
    except ValueError as e:
        problems.insert(0, f"train_dataset: {e}")
    raise_if_any(problems)
    return row_keys, first


def _check_answers(data: SourceConfig, rows: Sequence[dict[str, Any]], cfg: BaseConfig) -> None:
    """Has a reward of megarl's own look at every row. Other rewards look when the run begins, for
    their code is not imported here."""
    name = data.reward.type or data.type
    if not is_registered(name):
        return
    # made without what is of another machine or of the user: judges' addresses, and parts
    plain = inspect.isfunction(load_reward(name)) and name != "weighted"
    reward_fn = get_reward_fn(name, data.reward.options if plain else {})
    numbered = ({"row_id": i} | row for i, row in enumerate(rows))
    generates: Any = cfg if isinstance(cfg, GRPOConfig) else getattr(cfg, "generation", None)
    check_rows(reward_fn, numbered, timeout=generates.rollout.reward_timeout)


def check_code(
    cfg: BaseConfig,
    row_keys: dict[str, tuple[str, ...]],
    *,
    isolated: bool = False,
    path: Sequence[str] = (),
    recipe: bool = True,
) -> None:
    """Imports the code that the configuration names and that is not megarl's own. Raises
    ConfigError naming each function or class that cannot be loaded or does not take what it is
    given. With `isolated` a process of its own imports it, with `path` in front of the import path.
    recipe: False for a script of the user's, which makes its workflow itself.
    """
    named = [c for c in _named_code(cfg, row_keys) if recipe or c.key != "rollout.workflow"]
    if isolated:  # what a script defines itself, it finds itself
        named = [code for code in named if not code.target.startswith("__main__:")]
    what = [f"{code.key}={code.target}" for code in named]
    if isolated and named:
        raise_if_any(_isolated(code_problems, named, path=path, what=what))
    else:
        raise_if_any(code_problems(named))


def transport_needs(cfg: GRPOConfig, path: Sequence[str] = ()) -> Requirements:
    """Returns what the transport of weights needs. Raises ConfigError where it cannot be loaded. A
    user's own is imported in a process of its own, with `path` in front of the import path.
    """
    type_ = cfg.weight_sync.type
    if (built_in := built_in_transport(type_)) is not None:
        return built_in.requirements
    if type_.startswith("__main__:"):  # what a script defines itself, it finds itself
        return Requirements()
    return _isolated(_needs_of, type_, path=path, what=[f"weight_sync.type={type_}"])


def _needs_of(type_: str) -> Requirements:
    try:
        return requirements_of(type_)
    except ValueError as e:
        raise ConfigError([f"weight_sync.type: {e}"]) from e


def _isolated(fn: Callable[..., T], *args: Any, what: Sequence[str], path: Sequence[str] = ()) -> T:
    try:
        return call_isolated(fn, *args, timeout=IMPORT_TIMEOUT, path=path, answers=ConfigError)
    except (TimeoutError, ChildProcessError) as e:
        raise ConfigError([f"{', '.join(what)}: cannot be imported: {e}"]) from e


def _named_code(cfg: BaseConfig, row_keys: dict[str, tuple[str, ...]]) -> Iterator[Named]:
    if cfg.trainer.type:
        yield _named("trainer", cfg.trainer, "trainer")
    for key, data in datasets(cfg).items():
        for kind in ("collate", "sampler"):
            if (seam := getattr(data, kind)).type:
                yield _named(f"{key}.{kind}", seam, kind)
    for free in all_keys(type(cfg), parent=cfg):
        if free.options_of is not None and free.default:
            options = SeamConfig(type=free.options_of.target, options=free.default)
            yield _named(free.name, options, "options")
    if isinstance(cfg, DPOConfig) and cfg.preference != PreferenceConfig():
        target = f"megarl.algos.preferences:{cfg.preference.loss}"
        loss = SeamConfig(type=target, options=cfg.preference.options)
        yield _named("preference.options", loss, "options")
    if isinstance(cfg, GRPOConfig):
        yield from _named_rl_code(cfg, row_keys)
    elif _rewards(cfg):
        held_out = {k: data for k, data in sources(cfg).items() if not k.startswith("train")}
        yield from _named_rewards(held_out, row_keys, own_workflow=False)


def _rewards(cfg: BaseConfig) -> bool:
    """Returns whether answers of the run are rewarded."""
    return isinstance(cfg, GRPOConfig) or getattr(cfg, "generation", None) is not None


def _named_rl_code(cfg: GRPOConfig, row_keys: dict[str, tuple[str, ...]]) -> Iterator[Named]:
    ours = GRPOConfig()
    own_workflow = cfg.rollout.workflow.type != ours.rollout.workflow.type
    if cfg.rollout.workflow != ours.rollout.workflow:
        yield _named("rollout.workflow", cfg.rollout.workflow, "workflow")
    if cfg.rollout.backend != ours.rollout.backend:
        yield _named("rollout.backend", cfg.rollout.backend, "backend")
    if built_in_transport(cfg.weight_sync.type) is None or cfg.weight_sync.options:
        sync = SeamConfig(type=cfg.weight_sync.type, options=cfg.weight_sync.options)
        yield _named("weight_sync.type", sync, "transport", config=cfg)
    for kind in ALGORITHMS:
        if (seam := getattr(cfg.actor, kind)) != getattr(ours.actor, kind):
            yield _named(f"actor.{kind}", seam, kind, config=cfg.actor)
    yield from _named_rewards(sources(cfg), row_keys, own_workflow=own_workflow)


def _named_rewards(
    found: Mapping[str, SourceConfig],
    row_keys: dict[str, tuple[str, ...]],
    *,
    own_workflow: bool,
) -> Iterator[Named]:
    for key, data in found.items():
        name, own = data.reward.type or data.type, own_workflow
        if isinstance(data, PartConfig) and data.workflow.type:
            own = True
            yield _named(f"{key}.workflow", data.workflow, "workflow")
        if not is_registered(name) or data.reward.options:
            row = None if own else row_keys.get(key)
            seam = SeamConfig(type=name, options=data.reward.options)
            yield _named(f"{key}.reward", seam, "reward", row=row)


def _named(key: str, seam: SeamConfig, kind: str, **more: Any) -> Named:
    return Named(key=key, target=seam.type, kind=kind, options=seam.options, **more)
