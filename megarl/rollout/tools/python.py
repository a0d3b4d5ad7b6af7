"""PythonEnv has one tool, `python`: it runs a program of the model's in the sandbox."""

from __future__ import annotations

import asyncio
import os
from typing import Any
from weakref import WeakKeyDictionary

from megarl.rollout.tools.env import ToolFailure, ToolingEnv
from megarl.rollout.tools.local import LocalToolingEnv
from megarl.rollout.tools.sandbox import Limits, Ran, SandboxError, run_program

_SAID = {
    "time": "the program was stopped: it took too long",
    "output": "the program was stopped: it printed too much",
    "files": "the program was stopped: it wrote too much",
    "threads": "the program was stopped: it started too many threads",
    "signal": "the program crashed",
}
_MIB = 1 << 20
# programs at once in an event loop: more would only take each other's time
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class PythonEnv(ToolingEnv):
    """Runs programs, each in a process of its own that keeps nothing. `seconds` bounds wall and CPU
    time, `memory` and `output` are MiB and bytes."""

    def __init__(self, *, seconds: int = 10, memory: int = 1024, output: int = 8192) -> None:
        self._limits = Limits(wall=seconds, cpu=seconds, memory=memory * _MIB, output=output)
        self._local = LocalToolingEnv([self.python], timeout=3600)  # the sandbox has its own

    def list_tools(self) -> list[dict[str, Any]]:
        """Returns the one tool."""
        return self._local.list_tools()

    async def aexecute(self, tool_name: str, tool_args: dict[str, Any]) -> str:
        """Returns what the program printed, and what it ended with. Raises ToolFailure where the
        sandbox fails."""
        return await self._local.aexecute(tool_name, tool_args)

    async def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints. Nothing is kept between two programs.

        Args:
            code: the program; the value of a last line that is an expression is printed too
        """
        try:
            async with _turn():
                ran = await run_program(code, limits=self._limits, show_last=True)
        except SandboxError as e:
            raise ToolFailure(str(e)) from e
        return said(ran)


def _turn() -> asyncio.Semaphore:
    """Returns what bounds the programs that run at the same time."""
    return _turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1))


def said(ran: Ran) -> str:
    """Returns a program's output for the model."""
    parts = [ran.stdout, ran.stderr, _SAID.get(ran.ended, "")]
    return "\n".join(part.rstrip("\n") for part in parts if part.strip()) or "(no output)"
