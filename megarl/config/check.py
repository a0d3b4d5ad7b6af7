"""Checks a recipe across its fields, as far as neither torch nor a process group is needed.

`check_config` collects every problem and raises them together. Checks against the model itself
(heads, layers, vocabulary) come after, from megarl.models.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from operator import attrgetter

from megarl.config import check_parts, rules
from megarl.config.algo import ValueModelConfig
from megarl.config.engine import TrainEngineConfig
from megarl.config.errors import ConfigError, raise_if_any
from megarl.config.presets import AllocationMode
from megarl.config.recipe_engines import FROZEN, engines, model_path, ref_is_below_adapters
from megarl.config.recipes import (
    BaseConfig,
    DistillConfig,
    DPOConfig,
    GRPOConfig,
    OfflineConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    datasets,
    held_out_key,
    held_out_sets,
    main_role,
    sources,
    train_rewards,
)
from megarl.config.rollout import built_in_transport
from megarl.config.rules import rule_problems
from megarl.config.schema import value_problems
from megarl.config.secrets import leaves
from megarl.utils.importing import is_import_path, meant

log = logging.getLogger("megarl.config")
_OURS = "megarl.rollout.workflows."
_WITH_BASELINE = f"{_OURS}rlvr:RLVRWorkflow"


def check_config(
    cfg: BaseConfig, world_size: int | None = None, *, own_script: bool = False
) -> None:
    """Raises ConfigError with all problems of `cfg`; `world_size` None leaves out those that depend
    on it. own_script: a script of the user's runs it, which may have metrics and phases of its own.
    """
    problems = [*value_problems(cfg), *_run_problems(cfg)]
    if not own_script and not runs_own_code(cfg):
        phases = cfg.profiler.get("phases") or ()
        problems += metric_problems(cfg)
        for unknown in [phase for phase in phases if phase not in PHASES][:1]:
            problems += [f"profiler.phases={phases}: {unknown} is none; {meant(unknown, PHASES)}"]
    problems += _allocation_problems(cfg, world_size)
    for name, engine in engines(cfg).items():
        problems += _engine_problems(cfg, name, engine, world_size)
    if isinstance(cfg, OfflineConfig):
        problems += rule_problems(rules.OFFLINE, cfg)
    if isinstance(cfg, SFTConfig):
        problems += _sft_problems(cfg, world_size)
    if isinstance(cfg, DPOConfig):
        problems += rule_problems(rules.DPO, cfg)
    if isinstance(cfg, DPOConfig | RMConfig):
        for key, source in sources(cfg).items():
            problems += rule_problems(rules.PAIRS, source, f"{key}.")
    if isinstance(cfg, GRPOConfig):
        problems += _rl_problems(cfg)
        problems += check_parts.rollout_problems(cfg)
    if ref_is_below_adapters(cfg):
        problems += _shared_ref_problems(cfg)
    raise_if_any(problems)
    if os.environ.get("RANK", "0") == "0":
        for line in unread_keys(cfg):
            log.warning("%s", line)


def unread_keys(cfg: BaseConfig) -> Iterator[str]:
    """Yields a line for each key that is set and that a run does not read, since another is not
    set."""
    broken = [*rule_problems(rules.UNREAD, cfg)]
    for name, engine in engines(cfg).items():
        broken += rule_problems(rules.UNREAD_OF_ENGINE, engine, f"{name}.")
    for line in broken:
        yield f"{line}; without it the key has no effect"


# the run and its engines


def _run_problems(cfg: BaseConfig) -> Iterator[str]:
    for name in ("experiment_name", "trial_name"):
        value = getattr(cfg, name)
        if not value or "/" in value or value in (".", "..") or len(value.encode()) > 255:
            yield f"{name}={value!r}: one path component, not empty, without /, at most 255 bytes"
    yield from rule_problems(rules.RUN, cfg)
    yield from check_parts.data_problems(cfg)
    for name in engines(cfg):
        yield from check_parts.model_path_problems(f"{name}.path", model_path(cfg, name))


def _engine_problems(
    cfg: BaseConfig, name: str, engine: TrainEngineConfig, world_size: int | None
) -> Iterator[str]:
    key = f"{name}."
    yield from check_parts.parallel_problems(engine.parallel, world_size, f"{key}parallel")
    yield from rule_problems(rules.ENGINE, engine, key)
    yield from rule_problems(rules.FROZEN if name in FROZEN else rules.TRAINED, engine, key)
    if not isinstance(engine, ValueModelConfig):
        yield from rule_problems(rules.LANGUAGE_MODEL, engine, key)
    if name != "actor":
        yield from rule_problems(rules.NOT_ACTOR, engine, key)
    if name not in FROZEN and engine.optimizer is not None:
        yield from check_parts.optimizer_problems(f"{key}optimizer", engine.optimizer)
    if engine.lora is not None:
        yield from check_parts.lora_problems(f"{key}lora", engine.lora)
    parts = getattr(engine, "ppo_n_minibatches", 1)
    if isinstance(cfg, GRPOConfig):
        size, n = cfg.train_dataset.batch_size, cfg.gconfig.n_samples
        if 0 < size * n < parts:
            most = f"train_dataset.batch_size * gconfig.n_samples = {size}*{n} = {size * n}"
            yield f"{key}ppo_n_minibatches={parts}: exceeds {most} sequences of a step"


def _shared_ref_problems(cfg: BaseConfig) -> Iterator[str]:
    """Yields the settings of `ref` that would have no effect, as its engine is not built: all that
    differ from the default and from the trained policy's."""
    default, frozen = TrainEngineConfig(), ("optimizer", "lora")  # those are refused anyway
    main, by_name = main_role(type(cfg)), engines(cfg)
    for name in (f.name for f in fields(default) if f.name not in frozen):
        same = (getattr(default, name), getattr(by_name[main], name))
        if getattr(by_name["ref"], name) not in same:
            why = f"with {main}.lora on the same model the reference is the {main}'s engine"
            yield f"ref.{name}: {why}; leave ref.{name} out, or name another ref.path"


def _allocation_problems(cfg: BaseConfig, world_size: int | None) -> Iterator[str]:
    """Yields where the configuration says otherwise than its allocation_mode, or `world_size` is
    another one (None: not known)."""
    if not cfg.allocation_mode:
        return
    try:
        allocation = AllocationMode.from_str(cfg.allocation_mode)
    except ConfigError as e:
        yield from e.problems
        return
    mode, wanted = f"allocation_mode={cfg.allocation_mode}", allocation.trainers.gpus
    if allocation.servers is not None and not isinstance(cfg, GRPOConfig):
        yield f"{mode}: recipe={cfg.recipe} has no servers; leave the trainers' part alone"
        return
    for key, value in allocation.keys(main_role(type(cfg))).items():
        if (other := attrgetter(key)(cfg)) != value:
            yield f"{mode} means {key}={value}, and {key}={other} is set: correct one of them"
    if world_size is not None and world_size != wanted:
        why = f"{world_size} would be started; correct it, or start as many"
        yield f"{mode}: its trainers are {wanted} processes, and {why}"
    if isinstance(cfg, GRPOConfig) and allocation.servers is not None:
        transport = built_in_transport(cfg.weight_sync.type)
        shares = transport is not None and transport.requirements.shares_devices
        if shares and not allocation.colocated:
            why = f"needs servers on the trainers' GPUs; write | instead of + in {mode}"
            yield f"weight_sync.type={cfg.weight_sync.type}: {why}"


# recipes without rollouts


def _sft_problems(cfg: SFTConfig, world_size: int | None) -> Iterator[str]:
    yield from rule_problems(rules.SFT, cfg)
    if not held_out_sets(cfg) and (cfg.stop_at_exact_match is not None or cfg.generation):
        key = "generation" if cfg.generation else f"stop_at_exact_match={cfg.stop_at_exact_match}"
        yield f"{key}: needs held-out data; set valid_dataset.type"
    if cfg.generation is not None:
        yield from check_parts.generation_problems("generation.gconfig", cfg.generation.gconfig)
        yield from check_parts.sync_problems(cfg.generation.weight_sync, "generation.weight_sync")
        for name, data in held_out_sets(cfg).items():
            yield from check_parts.reward_problems(held_out_key(name), data)


# recipes with rollouts


def _rl_problems(cfg: GRPOConfig) -> Iterator[str]:
    yield from rule_problems(rules.RL, cfg)
    yield from check_parts.actor_problems(cfg.actor)
    yield from _comparison_problems(cfg)
    yield from _input_problems(cfg)
    if isinstance(cfg, PPOConfig):
        yield from rule_problems(rules.CRITIC, cfg)
    if isinstance(cfg, DistillConfig):
        yield from _distill_problems(cfg)
    elif not cfg.trainer.type:
        yield from rule_problems(rules.NO_TEACHER, cfg)
    for key, data in datasets(cfg).items():
        yield from check_parts.reward_problems(key, data)


def _comparison_problems(cfg: GRPOConfig) -> Iterator[str]:
    """Yields a line where the samples of a prompt are too few to be compared."""
    a, n = cfg.actor, cfg.gconfig.n_samples
    if a.advantages.type == "pass_at_k":
        k, least = a.advantages.options.get("k"), cfg.rollout.min_rollouts
        if isinstance(k, int) and 1 <= n <= k:
            why = f"all draws of actor.advantages.options.k={k} samples of a prompt are alike"
            yield f"gconfig.n_samples={n}: {why}; take {k + 1} or more, or lower k"
        if isinstance(k, int) and least < k <= n:
            why = f"actor.advantages=pass_at_k draws k={k} samples, and failures may leave fewer"
            yield f"rollout.min_rollouts={least}: {why}; set rollout.min_rollouts={k}"
    elif n == 1 and (by := a.compares_by):
        other = ", or actor.adv_norm=none" if by.startswith("actor.adv_norm") else ""
        yield f"gconfig.n_samples={n}: {by} compares the samples of a prompt; take 2 or more{other}"


def _input_problems(cfg: GRPOConfig) -> Iterator[str]:
    """Yields a line for what advantages read and nothing brings: the parts of a reward that gdpo
    compares, and the baseline that ReMax subtracts. What a user's own reward or workflow brings is
    not known. A workflow of a part of the data is its own, else all's."""
    parts = cfg.train_dataset.parts
    compared = cfg.actor.advantages.options.get("parts")
    looked_at = cfg.actor.dynamic_sampling
    rewards = train_rewards(cfg)
    if all(reward.type == "weighted" for reward in rewards):
        known = {name for reward in rewards for name in reward.options.get("parts", {})}
        named = dict.fromkeys(compared or (), "advantages.options.parts")
        named |= dict.fromkeys(looked_at if isinstance(looked_at, list) else (), "dynamic_sampling")
        for name in sorted(named.keys() - known):
            fix = meant(name, sorted(known))
            yield f"actor.{named[name]}.{name}: no reward of type weighted has this part; {fix}"
    if cfg.actor.advantages.type != "remax":
        return
    own = {name: part.workflow for name, part in parts.items() if part.workflow.type}
    workflows = {f"train_dataset.parts.{name}.workflow": seam for name, seam in own.items()}
    if not parts or len(own) < len(parts):
        workflows["rollout.workflow"] = cfg.rollout.workflow
    for key, workflow in workflows.items():
        writes = workflow.type == _WITH_BASELINE and workflow.options.get("greedy_baseline")
        if workflow.type.startswith(_OURS) and not writes:
            fix = f"set {key}.options.greedy_baseline=true with {_WITH_BASELINE}"
            fix += ", or take a workflow of your own that returns 'baseline'"
            yield f"actor.advantages=remax: {key}={workflow.type} has no greedy answer; {fix}"


def _distill_problems(cfg: DistillConfig) -> Iterator[str]:
    loss, advantages = cfg.actor.loss.type, cfg.actor.advantages.type
    if loss == "policy" and advantages != "teacher" and not is_import_path(advantages):
        why = "neither asks the teacher; take actor.loss=distill, or actor.advantages=teacher"
        yield f"actor.loss=policy with actor.advantages={advantages}: {why}"
    yield from rule_problems(rules.TEACHER_SERVERS, cfg)


_words = re.compile(r"\w+").findall
PHASES = _words(
    """rollout episodes record logp ref renew_ref values teacher reward_model train train_critic
    train_step update_weights step eval save recover"""
)
# the first part of the names of metrics, besides eval; a test holds them against docs/metrics.md
FAMILIES = _words(
    """train_rollout_logprob_abs_diff mismatch staleness moe weight_sync reward dataset difficulty
    curriculum response_len forks critic timing tokens perf memory rollout loss pg_loss ppl
    grad_norm lr ratio entropy kl_ref approx_kl accuracy margin first_ratio_abs_dev logp
    reward_chosen reward_rejected logp_chosen logp_rejected advantage clip_frac teacher_kl_forward
    teacher_kl_reverse advantage_max advantage_min advantage_std behav_dropped_frac
    behav_ess behav_imp_weight clip_frac_dual clip_frac_high clip_frac_low elapsed_s kl_coef kl_ctl
    kl_observed n_updates prefix_ratio ratio_abs_dev ratio_rms_dev skipped_sequences
    skipped_tokens skipped_updates student_tail_mass teacher_tail_mass tools update_successful"""
)
_OF_ANSWERS = ("accuracy", "reward", "some_credit", "response_len", "samples", "failed")
_OF_LOSS = ("loss", "ppl", "token_accuracy", "exact_match")
_OF_PAIRS = (
    *("loss", "accuracy", "margin", "reward_chosen", "reward_rejected", "logp_chosen"),
    "logp_rejected",
)
# keys that may name code by its import path
_CODE = ("type", "backend", "workflow", "reward", "recipe")
_SEVERAL = re.compile(r"(pass|maj)_at_\d+")


def metric_problems(cfg: BaseConfig) -> Iterator[str]:
    """Yields a line where saver.keep_best goes by a metric that the run does not have."""
    metric = cfg.saver.metric.removeprefix("-")
    if not cfg.saver.keep_best:
        return
    first, _, rest = metric.partition("/")
    if first != "eval":
        if first not in FAMILIES:
            beginnings = ("eval", *FAMILIES)
            yield f"saver.metric={metric}: no metric begins so; {meant(first, beginnings)}"
        return
    sets = held_out_sets(cfg)
    if not sets:
        yield f"saver.metric={metric}: nothing is evaluated; set valid_dataset.type"
        return
    name, _, figure = rest.rpartition("/")
    figure = figure.removesuffix("_lo").removesuffix("_hi")
    figures = _figures(cfg)
    if name and name not in sets:
        named = [f"eval/{each}/..." for each in sets if each] or ["eval/..."]
        yield f"saver.metric={metric}: no data set is called {name}; there are {', '.join(named)}"
    elif figure not in figures and not _SEVERAL.fullmatch(figure):
        yield f"saver.metric={metric}: no figure of an evaluation; {meant(figure, figures)}"


def _figures(cfg: BaseConfig) -> Sequence[str]:
    if isinstance(cfg, GRPOConfig):
        return _OF_ANSWERS
    if isinstance(cfg, SFTConfig):
        return (*_OF_LOSS, *(_OF_ANSWERS if cfg.generation is not None else ()))
    return _OF_PAIRS


def runs_own_code(cfg: BaseConfig) -> bool:
    """Returns whether code of the user's runs in a step, which may have metrics and phases of its
    own: a trainer, a workflow, a reward, a backend, ..."""
    return bool(cfg.trainer.type) or any(
        is_import_path(value) and not value.startswith("megarl.")
        for path, value in leaves(asdict(cfg))
        if isinstance(value, str) and next(p for p in path[::-1] if isinstance(p, str)) in _CODE
    )
