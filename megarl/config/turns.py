"""Decides whether servers and trainers, where they are on the same devices, use them in turn."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.recipes import DistillConfig, GRPOConfig
from megarl.config.rules import TURNS, rule_problems


def takes_turns(cfg: GRPOConfig) -> bool:
    """Returns whether servers and trainers give their memory up to each other. What
    server.release_memory=auto stands for is settled by the launcher; by itself it is false."""
    return cfg.server.release_memory == "true"


def settle_turns(cfg: GRPOConfig, *, shared: bool) -> None:
    """Says true or false where server.release_memory is auto. shared: servers that the launcher
    starts have the trainers' devices."""
    if cfg.server.release_memory == "auto":
        able = shared and cfg.server.count > 0 and not any(_obstacles(cfg))
        cfg.server.release_memory = "true" if able else "false"


def turn_problems(cfg: GRPOConfig) -> Iterator[str]:
    """Yields what does not go with server.release_memory=true."""
    for why in _obstacles(cfg) if takes_turns(cfg) else ():
        yield f"server.release_memory=true: {why}"


def _obstacles(cfg: GRPOConfig) -> Iterator[str]:
    """Yields why servers cannot release their memory while the trainers work."""
    yield from rule_problems(TURNS, cfg)
    both = isinstance(cfg, DistillConfig) and {*cfg.teacher.addresses} & {*cfg.rollout.addresses}
    if both:
        yield (
            f"the teacher answers at {min(both)}, which rests in the trainers' turn; give the "
            "teacher servers of its own"
        )
