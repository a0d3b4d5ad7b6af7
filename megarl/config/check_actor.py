"""Checks a policy's and a value function's settings. The recipe calls these checks before anything
starts, and the roles call them for the settings that a script gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.config.algo import PPOActorConfig, PPOCriticConfig
from megarl.config.errors import raise_if_any
from megarl.config.rules import ACTOR, rule_problems
from megarl.config.schema import choice_problems, number_problems
from megarl.utils.importing import is_import_path


def actor_problems(cfg: PPOActorConfig, key: str = "actor.") -> Iterator[str]:
    """Yields a line for each contradiction in `cfg`; `key` is its section, with a dot."""
    yield from rule_problems(ACTOR, cfg, key)
    if cfg.adv_std != "sample" and not cfg.reads_adv_std:
        yield (
            f"{key}adv_std={cfg.adv_std}: nothing is divided by such a std with {key}advantages="
            f"{cfg.advantages.type}, {key}adv_norm={cfg.adv_norm}; leave it out"
        )
    surrogate = cfg.surrogate.type
    if cfg.c_clip is not None and surrogate != "clip" and not is_import_path(surrogate):
        yield (
            f"{key}c_clip={cfg.c_clip:g}: is the dual clip of {key}surrogate=clip, and this is "
            f"{surrogate}; leave it null"
        )
    if cfg.moe.router_replay == "trainer" and not cfg.recomputes:
        yield (
            f"{key}moe.router_replay=trainer: needs a pass to replay from; set "
            f"{key}recompute_logprob=true, or replay the rollout's routes ({key}moe.router_replay="
            "rollout)"
        )


def temperature_problems(temperature: float, key: str = "temperature") -> Iterator[str]:
    """Yields a line where training samples would have temperature 0."""
    if temperature <= 0:
        yield f"{key}={temperature}: training needs sampled tokens; set it above 0"


def check_actor(cfg: PPOActorConfig, temperature: float) -> None:
    """Raises ConfigError, a ValueError, with everything that is wrong with an actor's settings."""
    raise_if_any([*_own(cfg, "actor."), *actor_problems(cfg), *temperature_problems(temperature)])


def check_critic(cfg: PPOCriticConfig) -> None:
    """Raises ConfigError, a ValueError, with everything that is wrong with a critic's settings."""
    raise_if_any(_own(cfg, "critic."))


def _own(cfg: Any, key: str) -> list[str]:
    return [*(key + problem for problem in choice_problems(cfg)), *number_problems(cfg, key)]
