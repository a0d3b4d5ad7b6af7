"""mini-swe-agent, opencode, codex and Claude Code as they are installed, in examples/cli_agent.py,
with a scripted policy behind a real gateway. One that is not in PATH is skipped.

    MEGARL_AGENT_EPISODES=100 pytest -s tests/system/test_coding_agents.py -k MiniSweAgent

runs so many episodes over the twenty repositories, and prints what came of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from examples import cli_agent
from examples.small_repositories import repositories
from megarl.config.dataset import DatasetConfig
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.rewards import no_reward
from megarl.rollout.workflows.agent import AgentWorkflow
from tests.coding_agents import ScriptedPolicy, write
from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer
from tests.unit.test_gateway import TEMPLATE

ROWS = list(repositories(DatasetConfig(), seed=1))
ROOT = Path(__file__).parents[2]
EPISODES = int(os.environ.get("MEGARL_AGENT_EPISODES", "1"))
AT_ONCE = 5
# the tool that runs a command, and how its argument is called
SHELLS = {
    "MiniSweAgent": ("bash", "command"),
    "OpenCode": ("bash", "command"),
    "Codex": ("exec_command", "cmd"),
    "ClaudeCode": ("Bash", "command"),
}
LOOKS, LEAVES = "ls -l; cat *.py", "echo it is too hard"
TESTS = "python -m unittest 2>&1"


class Script:
    """Looks, mends the repository or leaves it, tests, ends. Now and then, where many episodes run,
    an answer has no call, a call has wrong arguments, or its command fails."""

    def __init__(self, agent: str) -> None:
        self.agent, self.rng = agent, random.Random(0)

    def __call__(self, prompt: str) -> str:
        (row,) = [r for r in ROWS if r["messages"][0]["content"] in prompt]
        many = EPISODES > 1
        if many and self.rng.random() < 0.1:
            odd = ["I think about it.", self.call("false"), self.call(""), self.call("exit 3")]
            return self.rng.choice(odd)
        if LOOKS not in prompt:
            return self.call(LOOKS)
        if "<<'END'" not in prompt and LEAVES not in prompt:
            leaves = many and self.rng.random() < 0.25
            return self.call(LEAVES if leaves else write(row["solution"]))
        if TESTS not in prompt:
            return self.call(TESTS)
        if self.agent == "MiniSweAgent":
            return self.call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
        return "It is done."

    def call(self, command: str) -> str:
        tool, argument = SHELLS[self.agent]
        arguments = {argument: command, "description": "a command"}
        if tool != "bash" or self.agent == "MiniSweAgent":
            del arguments["description"]
        call = json.dumps({"name": tool, "arguments": arguments})
        return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize("agent", SHELLS)
def test_an_agent_as_it_is_installed(agent: str, tmp_path: Path) -> None:
    kind = getattr(cli_agent, agent)
    if shutil.which(kind.usual_program) is None:
        pytest.skip(f"{kind.usual_program} is not in PATH")
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.chat_template = TEMPLATE
    gconfig = GenerationHyperparameters(n_samples=min(EPISODES, AT_ONCE), max_new_tokens=4096)
    flow = AgentWorkflow(no_reward, gconfig, tokenizer, agent=kind, agent_options={"seconds": 240})
    began, seen = time.monotonic(), Counter[str]()

    async def group(row: dict[str, Any], policy: ScriptedPolicy) -> None:
        before = len(policy.wrote)
        batch = await flow.arun_episode(policy, dict(row))  # type: ignore[arg-type]
        wrote = policy.wrote[before:]
        failed = 0 if "valid" not in batch else int((~batch["valid"]).sum())
        trained = int(batch["loss_mask"].sum())
        sampled = sum(w.output_len for w in wrote)
        seen.update(episodes=gconfig.n_samples, rows=len(batch["input_ids"]), failed=failed)
        seen.update(answers=len(wrote), trained=trained, sampled=sampled)
        for ids, reward in zip(batch["input_ids"], batch["rewards"].tolist(), strict=True):
            text = tokenizer.decode(ids)
            seen["rows_solved"] += reward == 1.0
            if "<<'END'" in text:
                assert reward == 1.0, text
            elif LEAVES in text and "rollout_ids" not in batch:
                assert reward < 1.0, text

    async def inner() -> None:
        async with ScriptedPolicy(tokenizer, Script(agent), call_format="hermes") as policy:
            for i in range(-(-EPISODES // gconfig.n_samples)):
                await group(ROWS[i % len(ROWS)], policy)

    asyncio.run(inner())
    print(f"{agent}: {dict(seen)}, {time.monotonic() - began:.0f} s")
    assert seen["failed"] == 0
    assert seen["trained"] == seen["sampled"]
    if EPISODES == 1:
        assert seen["rows"] == 1 and seen["rows_solved"] == 1


def test_the_recipe_trains(tmp_path: Path) -> None:
    """configs/swe_grpo.yaml with a tiny model, whose answers are run as commands in namespaces."""
    save_tiny(tmp_path / "model", "qwen3", layers=2, seed=0, max_position_embeddings=4096)
    save_tokenizer(tmp_path / "model")
    command = [sys.executable, "-m", "megarl.launcher.local", "--config", "configs/swe_grpo.yaml"]
    command += [f"actor.path={tmp_path / 'model'}", f"fileroot={tmp_path}", "total_train_steps=1"]
    command += ["train_dataset.batch_size=2", "gconfig.n_samples=2", "gconfig.max_new_tokens=8"]
    command += ["server.type=embedded", "server.context_length=4096", "recover.mode=disabled"]
    command += ["rollout.workflow.options.agent=tests.coding_agents:ScriptedAgent"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout
    run = tmp_path / "swe" / "grpo"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["samples_trained"] == 4
    (step,) = [
        s for s in map(json.loads, (run / "stats.jsonl").read_text().splitlines()) if s["step"]
    ]
    assert step["train_rollout_logprob_abs_diff/max"] < 1e-4  # float32 on one machine
    assert step["rollout/failed_samples"] == 0
