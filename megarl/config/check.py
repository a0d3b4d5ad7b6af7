"""Checks a recipe across its fields, as far as neither torch nor a process group is needed.

`check_config` collects every problem and raises them together. Checks against the model itself
(heads, layers, vocabulary) come after, from megarl.models.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import fields

from megarl.config.algo import ValueModelConfig
from megarl.config.check_actor import actor_problems
from megarl.config.check_data import (
    batching_problems,
    dataset_problems,
    held_out_problems,
    model_path_problems,
    name_problems,
    reward_problems,
    template_problems,
    tokenizer_problems,
)
from megarl.config.check_engine import (
    lora_problems,
    optimizer_problems,
)
from megarl.config.check_layout import allocation_problems, cluster_problems, parallel_problems
from megarl.config.check_learning import (
    baseline_problems,
    comparison_problems,
    dpo_problems,
    rm_problems,
)
from megarl.config.check_names import metric_problems, phase_problems, runs_own_code
from megarl.config.check_rollout import (
    generation_problems,
    judge_problems,
    rollout_problems,
    sender_problems,
    server_problems,
)
from megarl.config.engine import TrainEngineConfig
from megarl.config.errors import raise_if_any
from megarl.config.recipe_engines import (
    FROZEN,
    engines,
    model_path,
    ref_is_below_adapters,
)
from megarl.config.recipes import (
    BaseConfig,
    DistillConfig,
    DPOConfig,
    GRPOConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    held_out_key,
    held_out_sets,
    main_role,
)
from megarl.config.rollout import GenerationConfig
from megarl.config.rules import (
    ENGINE,
    RL,
    RUN,
    UNREAD,
    UNREAD_OF_ACTOR,
    UNREAD_OF_ENGINE,
    rule_problems,
)
from megarl.config.run import ProfilerConfig
from megarl.config.schema import choice_problems, number_problems
from megarl.utils.http import split_address
from megarl.utils.importing import is_import_path

log = logging.getLogger("megarl.config")


def check_config(
    cfg: BaseConfig, world_size: int | None = None, *, own_script: bool = False
) -> None:
    """Raises ConfigError with all problems of `cfg`; `world_size` None leaves out those that depend
    on it. own_script: a script of the user's runs it, which may have metrics and phases of its own.
    """
    problems = [*choice_problems(cfg), *number_problems(cfg), *_run_problems(cfg)]
    if not own_script and not runs_own_code(cfg):
        problems += [*metric_problems(cfg), *phase_problems(cfg.profiler)]
    problems += [*allocation_problems(cfg, world_size), *cluster_problems(cfg)]
    for name, engine in engines(cfg).items():
        problems += _engine_problems(name, engine, world_size)
    if isinstance(cfg, PPOConfig):
        problems += _critic_problems(cfg)
    if isinstance(cfg, DistillConfig):
        problems += _distill_problems(cfg)
    elif isinstance(cfg, GRPOConfig) and not cfg.trainer.type:
        problems += _no_teacher_problems(cfg)
    if isinstance(cfg, GRPOConfig):
        problems += _grpo_problems(cfg)
        problems += sender_problems(cfg, world_size)
    elif isinstance(cfg, SFTConfig):
        problems += _sft_problems(cfg)
    elif isinstance(cfg, DPOConfig):
        problems += dpo_problems(cfg)
    elif isinstance(cfg, RMConfig):
        problems += rm_problems(cfg)
    if ref_is_below_adapters(cfg):
        problems += _shared_ref_problems(cfg)
    raise_if_any(problems)
    if os.environ.get("RANK", "0") == "0":
        for line in unread_keys(cfg):
            log.warning("%s", line)


def unread_keys(cfg: BaseConfig) -> Iterator[str]:
    """Yields a line for each key that is set and that a run does not read, since another is not
    set."""
    broken = [*rule_problems(UNREAD, cfg)]
    for name, engine in engines(cfg).items():
        broken += rule_problems(UNREAD_OF_ENGINE, engine, f"{name}.")
    if isinstance(cfg, GRPOConfig):
        broken += rule_problems(UNREAD_OF_ACTOR, cfg.actor, "actor.")
    for line in broken:
        yield f"{line}; without it the key has no effect"


def _engine_problems(name: str, cfg: TrainEngineConfig, world_size: int | None) -> Iterator[str]:
    yield from parallel_problems(cfg.parallel, world_size, f"{name}.parallel")
    yield from rule_problems(ENGINE, cfg, f"{name}.")
    if cfg.moe.token_dispatcher == "flex" and cfg.parallel.ep * cfg.parallel.etp == 1:
        yield (
            f"{name}.moe.token_dispatcher=flex: sends tokens between the ranks of experts, and "
            f"{name}.parallel.ep=1 and etp=1 have one; take alltoall"
        )
    if cfg.head == "value" and not isinstance(cfg, ValueModelConfig):
        yield f"{name}.head=value: only a critic or a reward model has one; leave it lm"
    if cfg.moe.replays and name != "actor":
        yield (
            f"{name}.moe.router_replay={cfg.moe.router_replay}: nothing records the routing of "
            f"{name}; only the actor's is. Leave it off"
        )
    if name in FROZEN:
        if cfg.optimizer is not None:
            yield f"{name}.optimizer: {FROZEN[name]} is frozen; leave it null"
    elif cfg.optimizer is None:
        yield f"{name}.optimizer=null: training needs one; set {name}.optimizer.lr"
    else:
        yield from optimizer_problems(f"{name}.optimizer", cfg.optimizer)
    if cfg.lora is not None:
        if name in FROZEN:
            yield f"{name}.lora: {FROZEN[name]} is frozen; leave it null"
        yield from lora_problems(f"{name}.lora", cfg.lora)
    if cfg.offload and name not in FROZEN:
        yield (
            f"{name}.offload=true: only frozen models ({', '.join(FROZEN)}) rest in host memory "
            f"between passes; for a trained one see {name}.optimizer.cpu_offload"
        )


# the run


def _run_problems(cfg: BaseConfig) -> Iterator[str]:
    for name in ("experiment_name", "trial_name"):
        value = getattr(cfg, name)
        if not value or "/" in value or value in (".", "..") or len(value.encode()) > 255:
            yield f"{name}={value!r}: one path component, not empty, without /, at most 255 bytes"
    yield from rule_problems(RUN, cfg)
    yield from _controller_problems(cfg)
    yield from _profiler_problems(cfg.profiler)
    yield from dataset_problems("train_dataset", cfg.train_dataset)
    yield from batching_problems("train_dataset", cfg.train_dataset)
    yield from name_problems("valid_datasets", cfg.valid_datasets)
    for name, data in held_out_sets(cfg).items():
        yield from held_out_problems(held_out_key(name), data)
    for name in engines(cfg):
        yield from model_path_problems(
            f"{name}.path",
            model_path(cfg, name),
            weights=not engines(cfg)[name].init_from_scratch,
        )
    yield from tokenizer_problems(cfg.tokenizer_path)
    yield from template_problems(cfg.tokenizer.chat_template)


def _controller_problems(cfg: BaseConfig) -> Iterator[str]:
    if cfg.trainer.mode != "controller":
        return
    mode = "trainer.mode=controller"
    if not isinstance(cfg, GRPOConfig):
        yield (
            f"{mode} with recipe={cfg.recipe}: a controller is for recipes with rollouts; set "
            "trainer.mode=spmd, where every trainer process runs the loop"
        )
    elif cfg.replay is not None:
        yield f"{mode} with replay: a replay runs with trainer.mode=spmd, and gives the same bits"


def _profiler_problems(cfg: ProfilerConfig) -> Iterator[str]:
    if cfg.start_step is not None and (not cfg.ranks or min(cfg.ranks) < 0):
        yield f"profiler.ranks={cfg.ranks}: name ranks from 0"


# recipes


def _sft_problems(cfg: SFTConfig) -> Iterator[str]:
    bound = cfg.stop_at_exact_match
    if bound is not None and not held_out_sets(cfg):
        yield f"stop_at_exact_match={bound}: needs held-out data; set valid_dataset.type"
    if cfg.train_dataset.curriculum is not None:
        yield "train_dataset.curriculum: goes by rewards, which SFT has none of; leave it out"
    if cfg.generation is not None:
        yield from _sft_generation_problems(cfg, cfg.generation)


def _sft_generation_problems(cfg: SFTConfig, g: GenerationConfig) -> Iterator[str]:
    key, bound = "generation", cfg.stop_at_exact_match
    yield from generation_problems(f"{key}.gconfig", g.gconfig)
    if not held_out_sets(cfg):
        yield f"{key}: needs held-out data to answer; set valid_dataset.type"
    for name, data in held_out_sets(cfg).items():
        yield from reward_problems(held_out_key(name), data)
    if bound is not None and not g.loss:
        yield f"stop_at_exact_match={bound}: goes by the loss; leave {key}.loss true"
    if g.server.context_length <= g.gconfig.max_new_tokens:
        yield (
            f"{key}.server.context_length={g.server.context_length}: leaves no room for a prompt "
            f"beside {key}.gconfig.max_new_tokens={g.gconfig.max_new_tokens}"
        )
    if not g.rollout.addresses and (g.server.count < 1 or cfg.model.override_config):
        why = "model.override_config" if cfg.model.override_config else f"{key}.server.count=0"
        yield f"{key}: rank 0 starts no server with {why}; set {key}.rollout.addresses"


def _grpo_problems(cfg: GRPOConfig) -> Iterator[str]:
    yield from _ppo_problems(cfg)
    yield from generation_problems("gconfig", cfg.gconfig)
    yield from generation_problems("eval_gconfig", cfg.eval_gconfig)
    yield from rollout_problems(cfg)
    yield from server_problems(cfg)
    yield from judge_problems(cfg)


def _shared_ref_problems(cfg: BaseConfig) -> Iterator[str]:
    """Yields the settings of `ref` that would have no effect, as its engine is not built: all that
    differ from the default and from the trained policy's."""
    default, frozen = TrainEngineConfig(), ("optimizer", "lora")  # those are refused anyway
    main, found = main_role(type(cfg)), engines(cfg)
    for name in (f.name for f in fields(default) if f.name not in frozen):
        if getattr(found["ref"], name) not in (getattr(default, name), getattr(found[main], name)):
            yield (
                f"ref.{name}: with {main}.lora on the same model the reference is the {main}'s "
                f"engine without its adapters; leave ref.{name} out, or name another ref.path"
            )


def _critic_problems(cfg: PPOConfig) -> Iterator[str]:
    yield from _minibatch_problems(cfg, "critic", cfg.critic.ppo_n_minibatches)
    if cfg.actor.adv_norm.startswith("group"):
        yield (
            f"actor.adv_norm={cfg.actor.adv_norm}: with a critic, samples are not compared by "
            "prompt; take batch or none"
        )
    if cfg.actor.advantages.type != "group":
        yield (
            f"actor.advantages={cfg.actor.advantages.type}: with a critic, advantages are GAE's; "
            "leave it out, or take recipe=grpo"
        )
    if cfg.actor.surrogate.type in ("gmpo", "topr"):
        yield (
            f"actor.surrogate={cfg.actor.surrogate.type}: takes rows of one advantage, and with a "
            "critic every token has its own; take another surrogate, or recipe=grpo"
        )


def _distill_problems(cfg: DistillConfig) -> Iterator[str]:
    loss, advantages = cfg.actor.loss.type, cfg.actor.advantages.type
    if loss == "policy" and advantages != "teacher" and not is_import_path(advantages):
        yield (
            f"actor.loss=policy with actor.advantages={advantages}: neither asks the teacher; take "
            "actor.loss=distill, or actor.advantages=teacher"
        )
    if not cfg.teacher.addresses:
        return
    for address in cfg.teacher.addresses:
        try:
            split_address(address)
        except ValueError as e:
            yield f"teacher.addresses: {e}"
    if cfg.teacher.path:
        yield (
            f"teacher.path={cfg.teacher.path}: the servers of teacher.addresses hold the teacher; "
            "leave one of them out"
        )
    if cfg.gconfig.temperature != 1:
        yield (
            f"gconfig.temperature={cfg.gconfig.temperature:g}: servers give a prompt's logprobs at "
            "temperature 1, at which a student of theirs has to write; set it to 1, or have an "
            "engine for a teacher (teacher.path)"
        )


def _no_teacher_problems(cfg: GRPOConfig) -> Iterator[str]:
    for key, seam, asks in (
        ("loss", cfg.actor.loss, "distill"),
        ("advantages", cfg.actor.advantages, "teacher"),
    ):
        if seam.type == asks:
            yield f"actor.{key}={asks}: needs a teacher, and only recipe=distill has one; take it"


def _minibatch_problems(cfg: GRPOConfig, name: str, parts: int) -> Iterator[str]:
    size, n = cfg.train_dataset.batch_size, cfg.gconfig.n_samples
    if 0 < size * n < parts:
        yield (
            f"{name}.ppo_n_minibatches={parts}: exceeds the train_dataset.batch_size * "
            f"gconfig.n_samples = {size}*{n} = {size * n} sequences of a step"
        )


def _ppo_problems(cfg: GRPOConfig) -> Iterator[str]:
    a = cfg.actor
    yield from actor_problems(a)
    yield from _minibatch_problems(cfg, "actor", a.ppo_n_minibatches)
    yield from comparison_problems(cfg)
    yield from baseline_problems(cfg)
    yield from rule_problems(RL, cfg)
    if a.kl_controller is not None and not (a.kl_coef or cfg.kl_ctl):
        yield (
            "actor.kl_controller: adapts actor.kl_coef and kl_ctl, which are 0; set the first "
            "value of one of them, or leave it null"
        )
    yield from reward_problems("train_dataset", cfg.train_dataset)
    for name, data in held_out_sets(cfg).items():
        yield from reward_problems(held_out_key(name), data)
