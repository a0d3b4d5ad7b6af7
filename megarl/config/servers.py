"""Finds the addresses of running generation servers, and decides whether servers and trainers that
are on the same devices use them in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megarl.config.recipes import DistillConfig, GRPOConfig
from megarl.config.rollout import RolloutConfig
from megarl.config.rules import TURNS, rule_problems
from megarl.config.run import TRAIN

ADDRESSES_ENV = "MEGARL_LLM_SERVER_ADDRS"
JUDGES_ENV = "MEGARL_JUDGE_ADDRS"


def needs_servers(cfg: GRPOConfig) -> bool:
    """Returns whether a run generates: a replay of training alone does not."""
    return cfg.replay is None or cfg.replay.what != TRAIN


def server_addresses(config: RolloutConfig) -> list[str]:
    """Returns `rollout.addresses`, or the environment's addresses where the key is empty, and those
    in `rollout.addresses_file`. Raises OSError where the file cannot be read."""
    fixed = list(config.addresses) or listed_addresses()
    listed = addresses_in(config.addresses_file) if config.addresses_file else []
    return list(dict.fromkeys([*fixed, *listed]))


def listed_addresses() -> list[str]:
    """Returns the comma-separated host:port of MEGARL_LLM_SERVER_ADDRS."""
    return _listed(ADDRESSES_ENV)


def judge_addresses() -> list[str]:
    """Returns host:port of the judge's servers that the launcher has started."""
    return _listed(JUDGES_ENV)


def _listed(name: str) -> list[str]:
    return [a.strip() for a in os.environ.get(name, "").split(",") if a.strip()]


def addresses_in(file: str | Path) -> list[str]:
    """Returns the lines of a file of addresses, without empty ones and comments (# to the end)."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return [address for line in lines if (address := line.partition("#")[0].strip())]


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
