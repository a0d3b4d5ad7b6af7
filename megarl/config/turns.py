"""Decides whether servers and trainers, where they are on the same devices, use them in turn."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.recipes import DistillConfig, GRPOConfig


def takes_turns(cfg: GRPOConfig) -> bool:
    """Returns whether servers and trainers give their memory up to each other. What
    server.release_memory=auto stands for is settled by the launcher; by itself it is false."""
    return cfg.server.release_memory == "true"


def settle_turns(cfg: GRPOConfig, *, shared: bool) -> None:
    """Says true or false where server.release_memory is auto. shared: servers that the launcher
    starts have the trainers' devices."""
    if cfg.server.release_memory == "auto":
        able = shared and cfg.server.count > 0 and not any(obstacles(cfg))
        cfg.server.release_memory = "true" if able else "false"


def turn_problems(cfg: GRPOConfig) -> Iterator[str]:
    """Yields what does not go with server.release_memory=true."""
    if takes_turns(cfg):
        for why in obstacles(cfg):
            yield f"server.release_memory=true: {why}"


def obstacles(cfg: GRPOConfig) -> Iterator[str]:
    """Yields why servers cannot release their memory while the trainers work."""
    r = cfg.rollout
    if r.max_head_offpolicyness > 0:
        yield (
            f"rollout.max_head_offpolicyness={r.max_head_offpolicyness} has the servers generate "
            "while the trainers work; set it to 0, or leave release_memory false"
        )
    if r.kv_after_sync != "flush":
        yield (
            f"rollout.kv_after_sync={r.kv_after_sync} keeps KV that is released with the rest; set "
            "it to flush"
        )
    if r.addresses_file:
        yield (
            "servers of rollout.addresses_file come and go, and may be others' as well; leave "
            "release_memory false"
        )
    if r.router:
        yield (
            f"rollout.router={r.router} takes servers that rest for broken ones; leave one of the "
            "two out"
        )
    both = isinstance(cfg, DistillConfig) and {*cfg.teacher.addresses} & {*r.addresses}
    if both:
        yield (
            f"the teacher answers at {min(both)}, which rests in the trainers' turn; give the "
            "teacher servers of its own"
        )
