"""PythonEnv has one tool, `python`: it runs a program of the model's in the sandbox."""

from __future__ import annotations

import asyncio
import os
from weakref import WeakKeyDictionary

from megarl.rollout.tools.sandbox import Limits, Ran, SandboxError, run_program
from megarl.rollout.tools.tooling import LocalToolingEnv, ToolFailure

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


class PythonEnv(LocalToolingEnv):
    """Runs programs, each in a process of its own that keeps nothing. `seconds` bounds wall and CPU
    time, `memory` and `output` are MiB and bytes. Raises ToolFailure where the sandbox fails."""

    def __init__(self, *, seconds: int = 10, memory: int = 1024, output: int = 8192) -> None:
        super().__init__([self.python], timeout=3600)  # the sandbox has its own
        self._limits = Limits(wall=seconds, cpu=seconds, memory=memory * _MIB, output=output)

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
        return shown(ran)


def _turn() -> asyncio.Semaphore:
    """Returns what bounds the programs that run at the same time."""
    return _turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(os.cpu_count() or 1))


def shown(ran: Ran) -> str:
    """Returns a program's output for the model."""
    parts = [ran.stdout, ran.stderr, _SAID.get(ran.ended, "")]
    return "\n".join(part.rstrip("\n") for part in parts if part.strip()) or "(no output)"
