"""Finds the addresses of running generation servers."""

from __future__ import annotations

import os

from megarl.config.rollout import RolloutConfig

ADDRESSES_ENV = "MEGARL_LLM_SERVER_ADDRS"


def server_addresses(config: RolloutConfig) -> list[str]:
    """Returns `rollout.addresses`, or the environment's addresses where the key is empty."""
    return list(config.addresses) or listed_addresses()


def listed_addresses() -> list[str]:
    """Returns the comma-separated host:port of MEGARL_LLM_SERVER_ADDRS."""
    listed = os.environ.get(ADDRESSES_ENV, "")
    return [a.strip() for a in listed.split(",") if a.strip()]
