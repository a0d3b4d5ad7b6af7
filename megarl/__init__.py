"""megarl: reinforcement learning of language models, by megatron-core and SGLang.

Everything that a script needs, by its public name:

    from megarl import MegatronActor, RemoteSGLangEngine, load_expr_config, stats_tracker

A name loads its module on first use, so that `import megarl` is instant. docs/api.md lists them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.algos import (
        SFT,
        Actor,
        Critic,
        LoRARef,
        PreferencePolicy,
        Ref,
        RewardLearner,
        RewardModel,
        Role,
        Teacher,
    )
    from megarl.api.batch import Batch, Tokens
    from megarl.api.engine import TrainEngine
    from megarl.api.failures import on_every_rank
    from megarl.api.inference import InferenceEngine, RolloutFailed, RolloutWorkflow
    from megarl.api.records import (
        FinetuneSpec,
        ModelRequest,
        ModelResponse,
        SaveLoadMeta,
        ServersLost,
        WeightUpdateMeta,
    )
    from megarl.config.allocation import AllocationMode
    from megarl.config.base import Bounds, Choices
    from megarl.config.errors import ConfigError
    from megarl.config.loader import load_config, load_expr_config, run_dir
    from megarl.config.recipes import (
        DistillConfig,
        DPOConfig,
        GRPOConfig,
        PPOConfig,
        RMConfig,
        SFTConfig,
    )
    from megarl.config.rollout import GenerationHyperparameters
    from megarl.controller.rollout import RolloutController
    from megarl.controller.schedulers import make_scheduler
    from megarl.controller.schedulers.ray import RayScheduler
    from megarl.controller.schedulers.slurm import SlurmScheduler
    from megarl.controller.train import TrainController
    from megarl.data import build_dataloader, build_dataset
    from megarl.data.tokenizer import load_hf_tokenizer
    from megarl.engine import MegatronEngine
    from megarl.observability import stats_tracker
    from megarl.observability.stats_logger import StatsLogger
    from megarl.observability.utilization import memory_in_use
    from megarl.parallel.rank_zero import on_rank_zero
    from megarl.parallel.worlds import World
    from megarl.rollout.chat import ChatWorkflow
    from megarl.rollout.client import RemoteSGLangEngine
    from megarl.rollout.local import SGLangEngine
    from megarl.rollout.rewards import RewardPool, get_reward_fn
    from megarl.rollout.tools.calls import parse_calls
    from megarl.rollout.tools.env import ToolingEnv
    from megarl.rollout.tools.executor import ToolExecutor
    from megarl.rollout.tools.local import LocalToolingEnv
    from megarl.rollout.tools.mcp import MCPToolingEnv
    from megarl.rollout.trajectory import Trajectory, to_batch
    from megarl.rollout.workflows.agent import AgentWorkflow
    from megarl.rollout.workflows.env import EnvWorkflow
    from megarl.rollout.workflows.multi_turn import MultiTurnWorkflow
    from megarl.rollout.workflows.rlvr import RLVRWorkflow
    from megarl.rollout.workflows.tool import ToolWorkflow
    from megarl.rpc.local import LocalScheduler
    from megarl.trainer.distill import DistillTrainer
    from megarl.trainer.evaluator import Evaluator
    from megarl.trainer.frequency import Frequency
    from megarl.trainer.ppo import PPOTrainer
    from megarl.trainer.publisher import WeightPublisher
    from megarl.trainer.rl import RLTrainer
    from megarl.trainer.roles import (
        MegatronActor,
        MegatronCritic,
        MegatronLoRARef,
        MegatronPreferencePolicy,
        MegatronRef,
        MegatronRewardLearner,
        MegatronRewardModel,
        MegatronSFT,
        MegatronTeacher,
    )
    from megarl.trainer.saver import Saver
    from megarl.trainer.session import RolloutSession
    from megarl.utils.batch import concat_padded_tensors

_HOME = {
    "algos": "Actor Critic LoRARef PreferencePolicy Ref RewardLearner RewardModel Role SFT Teacher",
    "api.batch": "Batch Tokens",
    "api.engine": "TrainEngine",
    "api.failures": "on_every_rank",
    "api.inference": "InferenceEngine RolloutFailed RolloutWorkflow",
    "api.records": "FinetuneSpec ModelRequest ModelResponse SaveLoadMeta ServersLost "
    "WeightUpdateMeta",
    "config.allocation": "AllocationMode",
    "config.base": "Bounds Choices",
    "config.errors": "ConfigError",
    "config.loader": "load_config load_expr_config run_dir",
    "config.recipes": "DPOConfig DistillConfig GRPOConfig PPOConfig RMConfig SFTConfig",
    "config.rollout": "GenerationHyperparameters",
    "controller.rollout": "RolloutController",
    "controller.schedulers": "make_scheduler",
    "controller.schedulers.ray": "RayScheduler",
    "controller.schedulers.slurm": "SlurmScheduler",
    "controller.train": "TrainController",
    "data": "build_dataloader build_dataset",
    "data.tokenizer": "load_hf_tokenizer",
    "engine": "MegatronEngine",
    "observability.stats_tracker": "stats_tracker",
    "observability.stats_logger": "StatsLogger",
    "observability.utilization": "memory_in_use",
    "parallel.rank_zero": "on_rank_zero",
    "parallel.worlds": "World",
    "rollout.chat": "ChatWorkflow",
    "rollout.client": "RemoteSGLangEngine",
    "rollout.local": "SGLangEngine",
    "rollout.rewards": "RewardPool get_reward_fn",
    "rollout.tools.calls": "parse_calls",
    "rollout.tools.env": "ToolingEnv",
    "rollout.tools.executor": "ToolExecutor",
    "rollout.tools.local": "LocalToolingEnv",
    "rollout.tools.mcp": "MCPToolingEnv",
    "rollout.trajectory": "Trajectory to_batch",
    "rollout.workflows.agent": "AgentWorkflow",
    "rollout.workflows.env": "EnvWorkflow",
    "rollout.workflows.multi_turn": "MultiTurnWorkflow",
    "rollout.workflows.rlvr": "RLVRWorkflow",
    "rollout.workflows.tool": "ToolWorkflow",
    "rpc.local": "LocalScheduler",
    "trainer.distill": "DistillTrainer",
    "trainer.evaluator": "Evaluator",
    "trainer.frequency": "Frequency",
    "trainer.ppo": "PPOTrainer",
    "trainer.publisher": "WeightPublisher",
    "trainer.rl": "RLTrainer",
    "trainer.roles": "MegatronActor MegatronCritic MegatronLoRARef MegatronRef "
    "MegatronPreferencePolicy MegatronRewardLearner MegatronRewardModel MegatronSFT "
    "MegatronTeacher",
    "trainer.saver": "Saver",
    "trainer.session": "RolloutSession",
    "utils.batch": "concat_padded_tensors",
}
_MODULE = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = [
    "Actor",
    "AgentWorkflow",
    "AllocationMode",
    "Batch",
    "Bounds",
    "ChatWorkflow",
    "Choices",
    "ConfigError",
    "Critic",
    "DPOConfig",
    "DistillConfig",
    "DistillTrainer",
    "EnvWorkflow",
    "Evaluator",
    "FinetuneSpec",
    "Frequency",
    "GRPOConfig",
    "GenerationHyperparameters",
    "InferenceEngine",
    "LoRARef",
    "LocalScheduler",
    "LocalToolingEnv",
    "MCPToolingEnv",
    "MegatronActor",
    "MegatronCritic",
    "MegatronEngine",
    "MegatronLoRARef",
    "MegatronPreferencePolicy",
    "MegatronRef",
    "MegatronRewardLearner",
    "MegatronRewardModel",
    "MegatronSFT",
    "MegatronTeacher",
    "ModelRequest",
    "ModelResponse",
    "MultiTurnWorkflow",
    "PPOConfig",
    "PPOTrainer",
    "PreferencePolicy",
    "RLTrainer",
    "RLVRWorkflow",
    "RMConfig",
    "RayScheduler",
    "Ref",
    "RemoteSGLangEngine",
    "RewardLearner",
    "RewardModel",
    "RewardPool",
    "Role",
    "RolloutController",
    "RolloutFailed",
    "RolloutSession",
    "RolloutWorkflow",
    "SFT",
    "SFTConfig",
    "SGLangEngine",
    "SaveLoadMeta",
    "Saver",
    "ServersLost",
    "SlurmScheduler",
    "StatsLogger",
    "Teacher",
    "Tokens",
    "ToolExecutor",
    "ToolWorkflow",
    "ToolingEnv",
    "TrainController",
    "TrainEngine",
    "Trajectory",
    "WeightPublisher",
    "WeightUpdateMeta",
    "World",
    "build_dataloader",
    "build_dataset",
    "concat_padded_tensors",
    "get_reward_fn",
    "load_config",
    "load_expr_config",
    "load_hf_tokenizer",
    "make_scheduler",
    "memory_in_use",
    "on_every_rank",
    "on_rank_zero",
    "parse_calls",
    "run_dir",
    "stats_tracker",
    "to_batch",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'megarl' has no attribute {name!r}; docs/api.md lists them")
    module = importlib.import_module(f"megarl.{_MODULE[name]}")
    return module if _MODULE[name].endswith(f".{name}") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
