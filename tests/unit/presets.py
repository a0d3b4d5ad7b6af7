"""The actor's sections of the published algorithms, for tests over all of them."""

from __future__ import annotations

from functools import cache

from megarl.config.algo import PPOActorConfig
from megarl.config.loader import load_config
from megarl.config.presets import PRESETS

NAMES = tuple(PRESETS)


@cache
def preset(name: str) -> PPOActorConfig:
    """The section, without KL, which needs a reference, and drawing one answer at a time, which
    works in groups of any size."""
    words = [f"algorithm={name}", "actor.path=nowhere", "actor.kl_coef=0"]
    if name == "pass_at_k":
        words.append("actor.advantages.options.k=1")
    if name == "gdpo":  # parts of the tests' batches
        words.append("actor.advantages.options.parts={right: 1.0, short: 0.25}")
    return load_config(None, words).actor
