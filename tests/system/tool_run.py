"""What the run of test_tools.py names in its configuration: a tool in a process, which somebody
kills, a model that calls it with whatever it writes, and a trainer that keeps its batches."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import torch

from megarl.api.batch import Batch
from megarl.rollout.tools.calls import ToolCall
from megarl.rollout.tools.tooling import ToolFailure, ToolingEnv
from megarl.rollout.trajectory import Trajectory
from megarl.rollout.workflows.tool import ToolWorkflow
from megarl.trainer.rl import RLTrainer

_SERVER = "import sys\nfor line in sys.stdin: print(len(line) - 1, flush=True)"
TOLD = 7  # characters of a result


class Counter(ToolingEnv):
    """Counts characters in a process of its own. Every `every`-th one is killed before it
    answers."""

    made = 0

    def __init__(self, *, every: int, log: str) -> None:
        self.every, self.log = every, log
        self.process: asyncio.subprocess.Process | None = None

    async def ainitialize(self) -> None:
        Counter.made += 1
        self.doomed = Counter.made % self.every == 0
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", _SERVER, stdin=pipe, stdout=pipe
        )
        self._note("begun")

    def list_tools(self) -> list[dict[str, Any]]:
        parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
        function = {"name": "count", "description": "Counts.", "parameters": parameters}
        return [{"type": "function", "function": function}]

    async def aexecute(self, tool_name: str, tool_args: dict[str, Any]) -> str:
        process = self.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        if self.doomed:
            process.kill()
        try:
            process.stdin.write(tool_args["text"].replace("\n", " ").encode() + b"\n")
            await process.stdin.drain()
        except ConnectionError as e:
            raise ToolFailure("the counter is gone") from e
        async with asyncio.timeout(30):
            line = await process.stdout.readline()
        if not line:
            raise ToolFailure("the counter is gone")
        return line.decode().strip().zfill(TOLD)

    async def aclose(self) -> None:
        if self.process is not None:
            if self.process.returncode is None:
                self.process.kill()
            await self.process.wait()
            self._note("ended")

    def _note(self, word: str) -> None:
        with open(self.log, "a") as file:
            file.write(f"{word} {self.process.pid if self.process else 0} {os.getpid()}\n")


class KeepingTrainer(RLTrainer):
    """Keeps every batch as it was trained, in <run>/batch_<version>.pt."""

    def speed(self, batch: Batch) -> dict[str, float]:
        path = self.ctx.run_dir / f"batch_{self.actor.get_version()}.pt"
        torch.save(batch.padded() | {"lengths": batch.lengths}, path)
        return super().speed(batch)


class EagerToolWorkflow(ToolWorkflow):
    """Reads every first answer as a call, and goes on though it was cut short: a model that has
    learnt nothing writes no call, and no end."""

    def may_go_on(self, sample: Trajectory) -> bool:
        return len(sample.answers) < self.max_turns and self.has_room(sample)

    def calls(self, sample: Trajectory, data: dict[str, Any]) -> list[ToolCall]:
        if len(sample.answers) > 1:
            return []
        return [ToolCall(name="count", arguments={"text": self.text(sample.answers[-1])})]
