"""Finds the addresses of running generation servers."""

from __future__ import annotations

import os
from pathlib import Path

from megarl.config.recipes import GRPOConfig
from megarl.config.record import TRAIN
from megarl.config.rollout import RolloutConfig

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
