"""Tools of a real MCP server, in a process of its own and at a URL."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.tools.mcp import MCPToolingEnv, MCPToolingEnvConfig
from megarl.rollout.tools.tooling import ToolFailure, ToolList
from megarl.utils.env import free_port
from tests.unit.scripted import opened

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tests.mcp_server", "stdio"]
ENV = {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "tests.mcp_server", "http", str(port)]
    process = subprocess.Popen(command, env=os.environ | ENV, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def config(url: str = "", **kw: Any) -> MCPToolingEnvConfig:
    return MCPToolingEnvConfig(**({"url": url} if url else {"command": COMMAND, "env": ENV}) | kw)


def use(env_config: MCPToolingEnvConfig, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    async def run() -> list[str]:
        async with opened(MCPToolingEnv(env_config)) as env:
            return [await env.aexecute(name, args) for name, args in calls]

    return asyncio.run(run())


def gone(pid: int) -> bool:
    for _ in range(1200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_server_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-job")
    said = use(
        config(timeout=60.0),
        ("times", {"a": 21}),
        ("times", {"a": "x"}),
        ("fails", {}),
        ("nothing", {}),
        ("environment", {}),
    )
    assert said[0] == "42"
    assert all(text.startswith("Error: ") for text in said[1:4])
    assert "Error executing tool fails" in said[2]
    pid, *names = said[4].split()
    assert "WANDB_API_KEY" not in names and "PATH" in names
    assert gone(int(pid))  # it ended with its environment


def test_a_sample_that_is_cancelled_while_it_closes_its_server_is_cancelled() -> None:
    async def run() -> None:
        env = MCPToolingEnv(config())
        await env.ainitialize()
        closes = asyncio.create_task(env.aclose())
        await asyncio.sleep(0)
        closes.cancel()
        await asyncio.wait({closes})
        assert closes.cancelled()
        await env.aclose()

    asyncio.run(run())


def test_a_server_that_dies_is_a_failure() -> None:
    with pytest.raises(ToolFailure, match=r"MCP server .*tests\.mcp_server stdio is gone"):
        use(config(timeout=60.0), ("times", {"a": 1}), ("die", {}))
    missing = MCPToolingEnvConfig(command=[sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(ToolFailure, match="cannot be used"):
        use(missing)
    with pytest.raises(ToolFailure, match="cannot be used"):
        use(MCPToolingEnvConfig(command=["/no/such/program"]))


@pytest.mark.parametrize("end", ["cancelled", "timeout"])
def test_a_server_ends_with_a_sample_that_is_cut_short(end: str) -> None:
    pids: list[int] = []

    async def sample() -> None:
        async with opened(MCPToolingEnv(config())) as env:
            pids.append(int((await env.aexecute("environment", {})).split()[0]))
            await env.aexecute("slow", {})

    async def run() -> None:
        task = asyncio.ensure_future(sample())
        while not pids:
            await asyncio.sleep(0.01)
        if end == "cancelled":
            task.cancel()
            await task
        async with asyncio.timeout(0.1):
            await task

    with pytest.raises(TimeoutError if end == "timeout" else asyncio.CancelledError):
        asyncio.run(run())
    assert gone(pids[0])


def test_samples_share_a_server_that_is_said_to_keep_nothing() -> None:
    """One process serves many samples at once; one that died is started again."""
    entry = {"mcp": {"command": COMMAND, "env": ENV, "shared": True}}

    async def sample(tools: ToolList, name: str = "environment") -> str:
        async with opened(tools.make({})) as env:
            return (await env.aexecute(name, {})).split()[0]

    async def run() -> set[str]:
        tools = ToolList([entry], timeout=60.0)
        (first,) = set(await asyncio.gather(*(sample(tools) for _ in range(12))))
        assert await sample(tools) == first
        with pytest.raises(ToolFailure):
            await sample(tools, "die")
        second = await sample(tools)
        return {first, second}

    pids = asyncio.run(run())
    assert len(pids) == 2 and all(gone(int(pid)) for pid in pids)


def test_descriptions_longer_than_any_prompt_are_refused() -> None:
    command = [*COMMAND[:-1], "long"]
    with pytest.raises(ToolFailure, match="cannot be used"):
        use(config(command=command))


def half(a: int) -> float:
    """Halves.

    Args:
        a: a number
    """
    return a / 2


def test_a_server_at_a_url(url: str) -> None:
    async def run() -> None:
        tools = ToolList([{"mcp": {"url": url}}, "tests.unit.test_mcp:half"], timeout=60.0)
        for _ in range(600):  # until it listens
            try:
                async with opened(tools.make({})) as env:
                    names = [t["function"]["name"] for t in env.list_tools()]
                    assert names[:2] == ["half", "times"]
                    assert env.list_tools()[1]["function"]["parameters"]["required"] == ["a"]
                    assert await env.aexecute("times", {"a": 4}) == "8"
                    assert await env.aexecute("half", {"a": 4}) == "2.0"
                    return
            except ToolFailure:
                await asyncio.sleep(0.1)
        raise AssertionError("the server does not listen")

    asyncio.run(run())
    slow = use(config(url, timeout=0.2), ("slow", {}))
    assert slow == ["Error: slow took longer than 0.2 s"]
    with pytest.raises(ToolFailure, match=r"127\.0\.0\.1:1/mcp cannot be used"):
        use(config("http://127.0.0.1:1/mcp"))
