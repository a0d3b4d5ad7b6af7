"""Rollouts: the SGLang client, the executor that keeps it busy, workflows and rewards.

Names load on first use, so that reward workers and the launcher do not import torch for them.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "RemoteSGLangEngine": "client",
    "SGLangEngine": "local",
    "RolloutExecutor": "executor",
    "StalenessManager": "staleness",
    "ServerProcess": "server_process",
    "start_server": "server_process",
    "RLVRWorkflow": "workflows.rlvr",
    "ChatWorkflow": "trajectory",
    "Trajectory": "trajectory",
    "pad": "trajectory",
    "RewardPool": "rewards",
    "RewardError": "rewards",
    "check_rows": "rewards",
    "get_reward_fn": "rewards",
    "reward_of": "rewards",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
