"""Gathers rollouts: the SGLang client, the executor that keeps it busy, workflows and rewards.

Names load on first use, so that reward workers and the launcher do not import torch for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.rollout.client import RemoteSGLangEngine
    from megarl.rollout.executor import RolloutExecutor
    from megarl.rollout.local import SGLangEngine
    from megarl.rollout.rewards import (
        RewardError,
        RewardPool,
        check_rows,
        get_reward_fn,
        reward_of,
    )
    from megarl.rollout.server_process import ServerProcess, start_server
    from megarl.rollout.staleness import StalenessManager
    from megarl.rollout.trajectory import ChatWorkflow, Trajectory, pad
    from megarl.rollout.workflows.rlvr import RLVRWorkflow

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
__all__ = [
    "ChatWorkflow",
    "RLVRWorkflow",
    "RemoteSGLangEngine",
    "RewardError",
    "RewardPool",
    "RolloutExecutor",
    "SGLangEngine",
    "ServerProcess",
    "StalenessManager",
    "Trajectory",
    "check_rows",
    "get_reward_fn",
    "pad",
    "reward_of",
    "start_server",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
