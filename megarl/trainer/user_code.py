"""Checks the code that a configuration names: that it can be loaded and takes what it will be
given, and, where a launcher starts a run, that what it defines can be made.

Importing it may import torch, or do anything: run.py does so where it is about to import torch
itself, a launcher in a process of its own.
"""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

from megarl.config.algo import PreferenceConfig
from megarl.config.base import SeamConfig
from megarl.config.check_parts import transport_problems
from megarl.config.dataset import PartConfig, SourceConfig
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.loader import load_config, own_class
from megarl.config.recipe_engines import model_path
from megarl.config.recipes import BaseConfig, DPOConfig, GRPOConfig, datasets, sources
from megarl.config.rollout import (
    Requirements,
    SyncOptions,
    built_in_transport,
    requirements_of,
    transport_class,
)
from megarl.config.schema import all_keys
from megarl.config.secrets import keep_written
from megarl.data.sources import sources_of
from megarl.rollout.rewards import (
    get_reward_fn,
    is_registered,
    load_reward,
    reward_of,
    reward_problems,
    shared_pool,
)
from megarl.rollout.rewards.results import (
    OWN_ARGUMENTS,
    WeightedReward,
    is_asynchronous,
    reward_arguments,
)
from megarl.trainer.teacher_context import is_function
from megarl.trainer.workflow_check import SourceRows, workflow_problems
from megarl.utils.importing import (
    FASTER,
    call_isolated,
    call_problem,
    load_object,
    option_problems,
    within,
)
from megarl.utils.user_errors import in_one_line

T = TypeVar("T")
IMPORT_TIMEOUT = 300  # seconds the import of a user's modules may take
MAKE_TIMEOUT = 60  # seconds that one of a user's classes may take to be made
REWARD = f"reward({', '.join(OWN_ARGUMENTS)}, **row)"
EPISODE = "async def arun_episode(self, engine, data)"
# a tracker's methods, with what they are called with
SINK = {"write": ("step", "stats", "total_steps"), "close": ("outcome",)}


@dataclass(frozen=True)
class Call:
    """Describes how megarl calls a kind of code: its arguments by position and by name."""

    positional: tuple[str, ...]
    by_name: tuple[str, ...]
    shown: str


CALLS = {
    "workflow": Call(
        ("reward_fn", "gconfig", "tokenizer"),
        ("reward_pool",),
        "Workflow(reward_fn, gconfig, tokenizer, *, reward_pool)",
    ),
    "trainer": Call(("cfg", "ctx"), (), "Trainer(cfg, ctx)"),
    "tracker": Call(
        ("config",), ("run_dir", "from_step"), "Tracker(config, *, run_dir, from_step)"
    ),
    "loss": Call(("config",), (), "loss(config) -> LossSpec"),
    "surrogate": Call(("config",), (), "surrogate(config) -> function"),
    "advantages": Call(("config",), (), "advantages(config) -> AdvantageSpec"),
    "context": Call(("row",), ("feedback", "sibling"), "context(row, *, feedback, sibling)"),
    "collate": Call(("rows",), (), "collate(rows)"),
    "sampler": Call(("dataset",), ("seed",), "sampler(dataset, *, seed)"),
    "backend": Call(
        ("rollout",), ("weight_sync", "seed"), "Backend(rollout, *, weight_sync, seed)"
    ),
}
ALGORITHMS = ("loss", "surrogate", "advantages")  # kinds that megarl/algos/specs.py makes


@dataclass(frozen=True, kw_only=True)
class Named:
    """Names the code of one configuration key, with its options.

    kind: "reward", "transport", "options" of a free section, or a key of CALLS. row: what a reward
    gets by keyword, None where a workflow of the user's decides that. config: the section that a
    loss or an advantage is made of; all of an RL configuration for a transport and a workflow.
    data: the source whose rows a workflow answers. prompts: of all sources."""

    key: str
    target: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    row: tuple[str, ...] | None = None
    config: Any = None
    data: SourceConfig | None = None
    prompts: Mapping[str, SourceRows] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Returns whether it is code of megarl's that is quick to make."""
        ours = ":" not in self.target or self.target.startswith("megarl.")
        return ours and self.kind != "workflow"  # which takes a tokenizer


def read_config(
    source: str | None, overrides: Sequence[str], *, foreign: bool, path: Sequence[str] = ()
) -> BaseConfig:
    """Returns load_config's configuration, without importing code of the user's: where this decides
    the dataclass, a process of its own imports it, with `path` in front of the import path, and
    checks all keys. Of these the result has megarl's. Raises ConfigError."""
    own = own_class(source, overrides)
    if own is None:
        return load_config(source, overrides, foreign=foreign)
    return isolated(_read_as_ours, source, overrides, foreign, path=path, what=[own])


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
    plain = ours(**{f.name: _as_ours(getattr(value, f.name)) for f in fields(ours)})
    keep_written(value, plain)
    return plain


def transport_needs(cfg: GRPOConfig, path: Sequence[str] = ()) -> Requirements:
    """Returns what the transport of weights needs. Raises ConfigError where it cannot be loaded. A
    user's own is imported in a process of its own, with `path` in front of the import path.
    """
    type_ = cfg.weight_sync.type
    if (built_in := built_in_transport(type_)) is not None:
        return built_in.requirements
    if type_.startswith("__main__:"):  # what a script defines itself, it finds itself
        return Requirements()
    return isolated(_needs_of, type_, path=path, what=[f"weight_sync.type={type_}"])


def _needs_of(type_: str) -> Requirements:
    try:
        return requirements_of(type_)
    except ValueError as e:
        raise ConfigError(f"weight_sync.type: {e}") from e


def isolated(
    fn: Callable[..., T],
    *args: Any,
    what: Sequence[str],
    path: Sequence[str] = (),
    timeout: float = IMPORT_TIMEOUT,
) -> T:
    """Returns fn(*args), called in a process of its own with `path` in front of the import path.
    Raises its ConfigError, and one that names `what` where the process ends or does not answer
    within `timeout` seconds."""
    try:
        return call_isolated(fn, *args, timeout=timeout, path=path, answers=ConfigError)
    except (TimeoutError, ChildProcessError) as e:
        fix = f"; {FASTER}" if isinstance(e, TimeoutError) else ""
        raise ConfigError(f"{', '.join(what)}: cannot be imported: {e}{fix}") from e


def check_code(
    cfg: BaseConfig,
    rows: Mapping[str, SourceRows],
    *,
    in_child: bool = False,
    path: Sequence[str] = (),
    recipe: bool = True,
    makes: bool = False,
) -> None:
    """Imports the code that the configuration names and that is not megarl's own. Raises
    ConfigError naming each function or class that cannot be loaded or does not take what it is
    given. rows: as `check_data` returns them, by key of the source.

    With `in_child` a child process imports it, with `path` in front of the import path; classes of
    megarl.config are checked in this process.
    recipe: False for a script of the user's, which makes its workflow itself. makes: has rewards,
    losses, workflows and free sections of the user's be made, once and without a GPU."""
    named = [c for c in _named_code(cfg, rows) if recipe or c.key != "rollout.workflow"]
    here = [c for c in named if not in_child or c.target.startswith("megarl.config.")]
    problems = code_problems(here)
    # a script finds its own
    named = [c for c in named if c not in here and not c.target.startswith("__main__:")]
    if named:
        what = [f"{code.key}={code.target}" for code in named]
        longest = IMPORT_TIMEOUT + len(named) * (IMPORT_TIMEOUT + MAKE_TIMEOUT)
        problems += isolated(_in_child, named, makes, path=path, what=what, timeout=longest)
    raise_if_any(problems)


def _in_child(named: Sequence[Named], makes: bool) -> list[str]:
    """Returns the problems, without a GPU: those are the run's."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return code_problems(named, makes=makes, import_timeout=IMPORT_TIMEOUT)


def _named_code(cfg: BaseConfig, rows: Mapping[str, SourceRows]) -> Iterator[Named]:
    """Yields the code that the configuration names, but for megarl's own by default."""
    if cfg.trainer.type:
        yield _named("trainer", cfg.trainer, "trainer")
    if cfg.stats_logger.tracker.type:
        yield _named("stats_logger.tracker", cfg.stats_logger.tracker, "tracker")
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
    own_workflow = False
    if isinstance(cfg, GRPOConfig):
        ours = GRPOConfig()
        own_workflow = cfg.rollout.workflow.type != ours.rollout.workflow.type
        if cfg.rollout.workflow != ours.rollout.workflow:
            about = {"config": cfg, "data": cfg.train_dataset, "prompts": rows}
            yield _named("rollout.workflow", cfg.rollout.workflow, "workflow", **about)
        if cfg.rollout.backend != ours.rollout.backend:
            yield _named("rollout.backend", cfg.rollout.backend, "backend")
        if (teacher := getattr(cfg, "teacher", None)) and is_function(teacher.context):
            yield _named("teacher.context", SeamConfig(type=teacher.context), "context")
        for kind in ALGORITHMS:
            if (seam := getattr(cfg.actor, kind)) != getattr(ours.actor, kind):
                yield _named(f"actor.{kind}", seam, kind, config=cfg.actor)
    if rewards_answers(cfg):
        whole = cfg if isinstance(cfg, GRPOConfig) else None
        key = "weight_sync.type" if whole else "generation.weight_sync.type"
        sync = (whole or vars(cfg)["generation"]).weight_sync
        if built_in_transport(sync.type) is None or sync.options:
            seam = SeamConfig(type=sync.type, options=sync.options)
            yield _named(key, seam, "transport", config=whole)
    for key, source in sources(cfg).items():
        if not (rewards_answers(cfg) and (isinstance(cfg, GRPOConfig) or "valid" in key)):
            continue
        name, decides = source.reward.type or source.type, own_workflow
        if isinstance(source, PartConfig) and source.workflow.type:
            decides, about = True, {"config": cfg, "data": source, "prompts": rows}
            yield _named(f"{key}.workflow", source.workflow, "workflow", **about)
        if not is_registered(name) or source.reward.options:
            row = None if decides or key not in rows else rows[key].columns
            seam = SeamConfig(type=name, options=source.reward.options)
            yield _named(f"{key}.reward", seam, "reward", row=row)


def rewards_answers(cfg: BaseConfig) -> bool:
    """Returns whether answers of the run are rewarded."""
    return isinstance(cfg, GRPOConfig) or getattr(cfg, "generation", None) is not None


def _named(key: str, seam: SeamConfig, kind: str, **more: Any) -> Named:
    return Named(key=key, target=seam.type, kind=kind, options=seam.options, **more)


def code_problems(
    named: Sequence[Named], *, makes: bool = False, import_timeout: int | None = None
) -> list[str]:
    """Returns a line for each problem. makes: what the user's code defines is made, too, within
    MAKE_TIMEOUT; megarl's own always is. import_timeout: seconds each import may take."""
    return [problem for code in named for problem in _problems(code, makes, import_timeout)]


def _problems(code: Named, makes: bool, import_timeout: int | None) -> Iterator[str]:
    what = f"{code.key}={code.target}: "
    try:
        with within(import_timeout, "imported"):
            fn = _loaded(code)
        problems = list(_CHECKS.get(code.kind, _of_call)(code, fn, what))
        yield from problems
        if not problems and (makes or code.is_ours):
            make = _maker(code, fn)
            with within(MAKE_TIMEOUT if makes else None, "made"):
                make()
    except ConfigError as e:
        yield from e.problems
    except ValueError as e:
        yield str(e) if str(e).startswith(code.key) else f"{code.key}: {e}"
    except Exception as e:  # the user's code may raise anything
        if "CUDA" not in str(e):  # there is none here, and the run may have one
            yield f"{what}failed: {in_one_line(e)}"


def _loaded(code: Named) -> Any:
    """Returns the function or class. Raises ValueError where it cannot be loaded."""
    if code.kind == "reward":
        return load_reward(code.target)
    if code.kind == "transport":
        return transport_class(code.target)
    if code.kind in ALGORITHMS:
        from megarl.algos import specs  # here: it imports torch

        return specs.maker(code.kind, code.target)
    return load_object(code.target, what=code.key if code.kind == "options" else code.kind)


def _maker(code: Named, fn: Any) -> Callable[[], object]:
    """Returns what makes what the code defines, and raises ValueError for settings that do not go
    together, and what else the code raises. What megarl loads for it is loaded here."""
    if code.kind == "reward":
        return partial(get_reward_fn, code.target, code.options)
    if code.kind == "options":
        return partial(fn, **code.options)
    if code.kind in ALGORITHMS:
        from megarl.algos import specs

        return partial(getattr(specs, f"{code.kind}_of"), code.config)
    if code.kind != "workflow" or code.data is None:
        return lambda: None
    from megarl.data.tokenizer import run_tokenizer

    gconfig, data = code.config.gconfig, sources_of(code.data)
    tokenizer = run_tokenizer(code.config, model_path(code.config, "actor"))
    pool = shared_pool(code.config.rollout)

    def make() -> object:
        reward = reward_of(next(iter(data.values())))
        return fn(reward, gconfig, tokenizer, reward_pool=pool, **code.options)

    return make


def _of_reward(code: Named, fn: Any, what: str) -> Iterator[str]:
    if not callable(fn):
        yield f"{what}a {type(fn).__name__}, not a function; expected {REWARD}"
        return
    if inspect.isclass(fn) and not (is_asynchronous(fn) or issubclass(fn, WeightedReward)):
        yield f"{what}a class without async __call__, not a function; expected {REWARD}"
        return
    if code.row is None:
        return
    wrong = reward_problems(fn, code.options, key=f"{code.key}.options", row=code.row)
    yield from wrong
    if wrong:
        return
    if not (is_asynchronous(fn) or _travels(fn)):
        yield (
            f"{what}cannot be sent to a worker process; write a function at the top level of a "
            "module"
        )
        return
    called, options = fn, code.options
    if inspect.isclass(fn):  # its objects are called, and get no options
        called, options = partial(fn.__call__, None), {}
    given = (*reward_arguments(called, OWN_ARGUMENTS, dict.fromkeys(code.row)), *options)
    if problem := call_problem(called, (), given):
        shown = ", ".join(f"{name}=" for name in given)
        yield f"{what}{problem}; it is called as ({shown}); expected {REWARD}"


def _travels(fn: Any) -> bool:
    try:
        pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def _of_options(code: Named, fn: Any, what: str) -> Iterator[str]:
    return option_problems(fn, code.options, key=code.key)


def _of_transport(code: Named, fn: Any, what: str) -> Iterator[str]:
    """Asks the class what is wrong with an RL job, too; `code.config` is all of it."""
    from megarl.weight_sync.transports import Transport

    if not issubclass(fn, Transport):
        yield f"{what}no subclass of megarl.weight_sync.transports.Transport; make it one"
        return
    takes, placed = (SyncOptions, 0) if built_in_transport(code.target) else (fn, 1)
    key = f"{code.key.removesuffix('type')}options"
    yield from option_problems(takes, code.options, key=key, positional=placed)
    if missing := sorted(getattr(fn, "__abstractmethods__", ())):
        yield f"{what}has no method {', '.join(missing)}; write a subclass of Transport"
        return
    if code.config is not None:
        yield from transport_problems(code.config, fn.requirements)
        yield from (f"{what}{problem}" for problem in fn.validate(code.config))


def _of_call(code: Named, fn: Any, what: str) -> Iterator[str]:
    call, key = CALLS[code.kind], f"{code.key}.options"
    if not callable(fn):
        yield f"{what}a {type(fn).__name__}, neither a class nor a function; expected {call.shown}"
        return
    problems = list(
        option_problems(
            fn,
            code.options,
            key=key,
            positional=len(call.positional),
            by_name=call.by_name,
        )
    )
    # the arguments of a function for another place are no options
    others = code.kind in ALGORITHMS and any(p.endswith("needs it; set it") for p in problems)
    called = f"{code.target} is called as {call.shown}"
    yield from (f"{called}; {p}" if others else f"{p}; {called}" for p in problems)
    if not problems and (
        problem := call_problem(fn, call.positional, (*call.by_name, *code.options))
    ):
        yield f"{what}{problem}; expected {call.shown}"
        return
    if code.kind == "workflow" and inspect.isclass(fn):  # of another, only calling it would tell
        yield from (f"{what}{problem}" for problem in _of_episode(fn))
        if not problems:
            seam = SeamConfig(type=code.target, options=code.options)
            refused = workflow_problems(fn, seam, code.config, code.prompts)
            yield from (f"{key}: {problem}" for problem in refused)
    if code.kind == "backend" and inspect.isclass(fn):
        from megarl.rollout.client import RemoteSGLangEngine

        if not issubclass(fn, RemoteSGLangEngine):
            yield f"{what}no subclass of megarl.RemoteSGLangEngine; make it one"
    if code.kind == "tracker" and inspect.isclass(fn):  # of another, only calling it would tell
        for name, given in SINK.items():
            method, shown = getattr(fn, name, None), f"def {name}(self, {', '.join(given)})"
            if method is None:
                yield f"{what}has no method {name}; expected {shown}"
            elif problem := call_problem(method, ("self", *given), ()):
                yield f"{what}{problem}; expected {shown}"
    if code.kind == "trainer" and not hasattr(fn, "fit"):
        yield f"{what}has no method fit; write a subclass of RLTrainer, PPOTrainer or SFTTrainer"


def _of_episode(workflow: type) -> Iterator[str]:
    episode = getattr(workflow, "arun_episode", None)
    if episode is None or getattr(episode, "__isabstractmethod__", False):
        yield f"has no method arun_episode; expected {EPISODE}"
    elif not inspect.iscoroutinefunction(episode):
        yield f"its method arun_episode is not async; expected {EPISODE}"
    elif problem := call_problem(episode, ("self", "engine", "data"), []):
        yield f"{problem}; expected {EPISODE}"


_CHECKS: dict[str, Callable[[Named, Any, str], Iterator[str]]] = {
    "reward": _of_reward,
    "transport": _of_transport,
    "options": _of_options,
}
