"""What the run of test_fragile.py names in its configuration: a workflow whose tools, environments
and rewards are processes, which somebody kills."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megarl.api.batch import Padded
from megarl.api.inference import FAILURES, InferenceEngine, RolloutWorkflow
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.tools.calls import ToolCall
from megarl.rollout.trajectory import Trajectory
from megarl.rollout.workflows.env import EnvWorkflow
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.rollout.workflows.tool import ToolWorkflow

GAME = Path(__file__).with_name("fragile_game.py")
TOOLS = Path(__file__).with_name("fragile_tools.py")
LEAST = 0.25  # what any answer earns: a reward of zero came from nobody


def earned(
    prompt: str, completion: str, prompt_ids: Any, completion_ids: list[int], **row: Any
) -> float:
    """Returns at least LEAST, and takes its time, so that it is there to be hit."""
    time.sleep(0.02)
    return LEAST + sum(t % 2 == 0 for t in completion_ids) / (2 * len(completion_ids))


class Game:
    """Is an environment in a process of its own."""

    def __init__(self, mark: str) -> None:
        command = [sys.executable, "-I", "-S", str(GAME), mark]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return self._ask("begin")["text"], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        told = self._ask(action)
        return told["text"], told["reward"], False, False, {}

    def _ask(self, said: str) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(said) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class CallingWorkflow(ToolWorkflow):
    """Reads every first answer as a call of each tool, and goes on though it was cut short: a model
    that has learnt nothing writes no call, and no end."""

    def may_go_on(self, sample: Trajectory) -> bool:
        return len(sample.answers) < self.max_turns and self.has_room(sample)

    def calls(self, sample: Trajectory, data: dict[str, Any]) -> list[ToolCall]:
        if len(sample.answers) > 1:
            return []
        text = self.text(sample.answers[-1])
        program = f"import time; time.sleep(0.6); len({text!r})"
        return [
            ToolCall(name="count", arguments={"text": text}),
            ToolCall(name="python", arguments={"code": program}),
        ]


class PlayingWorkflow(EnvWorkflow):
    """Goes on though an answer was cut short."""

    def may_go_on(self, sample: Trajectory) -> bool:
        return len(sample.answers) < self.max_turns and self.has_room(sample)


class FragileWorkflow(RolloutWorkflow):
    """Gives a third of the rows tools, a third an environment, and scores the answers of the rest.
    What it returns for them is written to the file `log`."""

    def __init__(
        self,
        reward_fn: Any,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        reward_pool: Any = None,
        log: str,
    ) -> None:
        self.log, made = Path(log), (reward_fn, gconfig, tokenizer)
        bounds: dict[str, Any] = {"reward_pool": reward_pool, "max_length": 120}
        mark = str(self.log.parent)
        server = {"mcp": {"command": [sys.executable, "-I", "-S", str(TOOLS), mark]}}
        tools = [server, "megarl.rollout.tools.python:PythonEnv"]
        self.workflows: list[RolloutWorkflow] = [
            CallingWorkflow(*made, tools=tools, **bounds),
            PlayingWorkflow(
                *made,
                env="tests.system.fragile:Game",
                env_options={"mark": mark},
                max_turns=2,
                **bounds,
            ),
            RLVRWorkflow(*made, reward_pool=reward_pool),
        ]

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Padded | None:
        workflow = self.workflows[data["row_id"] % len(self.workflows)]
        batch = await workflow.arun_episode(engine, data)
        assert batch is not None
        rewards = batch["rewards"]
        valid = batch.get("valid", torch.ones(len(rewards), dtype=torch.bool))
        kinds = batch.get("failure", torch.zeros(len(rewards), dtype=torch.long))
        record = {
            "row": data["row_id"],
            "episode": data["episode_id"],
            "earned": rewards[valid].tolist(),
            "failed": [FAILURES[kind] for kind in kinds[~valid].tolist()],
        }
        with self.log.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return batch
