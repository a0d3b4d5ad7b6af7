"""Plain tools, environments and agents beside each other; those that hang, exit or misbehave."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from megarl.api.inference import FAILURES
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout import loop_thread
from megarl.rollout.loop_thread import CallTimeout, ThreadsExhausted, call, stuck_threads
from megarl.rollout.rewards import RewardPool
from megarl.rollout.tools.tooling import LocalToolingEnv
from megarl.rollout.workflows.agent import AgentWorkflow
from megarl.rollout.workflows.env import EnvWorkflow
from tests.unit.scripted import ScriptedEngine, run_episode, tool_tokenizer
from tests.unit.test_environments import GatewayEngine

HERE = "tests.unit.test_user_calls"
MANY = 64  # more than asyncio's own threads, 32 at most
ENOUGH = 60.0  # seconds: no test waits as long
ROW = {"messages": [{"role": "user", "content": "go"}], "answer": "1", "row_id": 5}

together = threading.Barrier(MANY)
released = threading.Event()


@pytest.fixture(autouse=True)
def hanging() -> Iterator[None]:
    """Lets what hangs go on at the end of a test."""
    released.clear()
    yield
    released.set()
    while stuck_threads():
        released.wait(0.01)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tool_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(1, timeout=30.0) as pool:
        yield pool


def nothing(prompt: str, completion: str, *ids: Any, **row: Any) -> float:
    return 0.0


def gconfig(n: int) -> GenerationHyperparameters:
    return GenerationHyperparameters(n_samples=n, max_new_tokens=8)


# -- all at once


def meet() -> str:
    """Returns once all are here."""
    together.wait(ENOUGH)
    return "all"


def hang() -> None:
    """Waits."""
    released.wait(ENOUGH)


def test_many_plain_tools_run_at_once() -> None:
    async def run() -> list[str]:
        env = LocalToolingEnv([meet], timeout=ENOUGH)
        return await asyncio.gather(*(env.aexecute("meet", {}) for _ in range(MANY)))

    assert asyncio.run(run()) == ["all"] * MANY


class Meeting:
    """An Env that all samples step in at once."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, Any]:
        return "go", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Any]:
        return meet(), 1.0, True, False, {}


def test_many_plain_environments_run_at_once(tokenizer: Any, pool: RewardPool) -> None:
    flow = EnvWorkflow(
        nothing, gconfig(MANY), tokenizer, env=f"{HERE}:Meeting", step_timeout=ENOUGH,
        reward_pool=pool,
    )  # fmt: skip
    batch = run_episode(flow, ScriptedEngine(tokenizer, lambda *_: "a"), ROW)
    assert batch["rewards"].tolist() == [1.0] * MANY and "valid" not in batch


def ask(base_url: str, api_key: str) -> None:
    body = {"messages": [{"role": "user", "content": "go"}]}
    headers = {"Authorization": f"Bearer {api_key}"}
    httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=ENOUGH)


def agent_batch(tokenizer: Any, agent: Callable[..., Any], row: Any = ROW, n: int = 1) -> Any:
    async def run() -> Any:
        async with GatewayEngine(tokenizer) as engine:
            flow = AgentWorkflow(nothing, gconfig(n), tokenizer, agent=agent)
            return await flow.arun_episode(engine, row)  # type: ignore[arg-type]

    return asyncio.run(run())


def test_many_plain_agents_run_at_once(tokenizer: Any) -> None:
    def agent(data: Any, base_url: str, api_key: str) -> float:
        ask(base_url, api_key)
        meet()
        return 1.0

    assert agent_batch(tokenizer, agent, n=MANY)["rewards"].tolist() == [1.0] * MANY


# -- time-outs


def test_a_call_that_hangs_is_counted_and_holds_up_no_other() -> None:
    async def run() -> None:
        env = LocalToolingEnv([hang], timeout=0.05)
        said = await asyncio.gather(*(env.aexecute("hang", {}) for _ in range(MANY)))
        assert all(text.startswith("Error: hang took longer") for text in said)
        assert stuck_threads() == MANY
        assert await call(lambda: 1, timeout=ENOUGH) == 1
        released.set()
        while stuck_threads():
            await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_call_that_ends_while_the_loop_is_late_is_in_time() -> None:
    ended = threading.Event()

    async def run() -> str:
        env = LocalToolingEnv([quick], timeout=0.2)
        said = asyncio.create_task(env.aexecute("quick", {}))
        await asyncio.sleep(0)
        ended.wait(ENOUGH)
        released.wait(0.5)  # the loop stands still beyond the time-out
        return await said

    def quick() -> str:
        """Ends at once."""
        ended.set()
        return "done"

    assert asyncio.run(run()) == "done"


def test_a_run_ends_where_too_many_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "MOST_STUCK", 3)
    monkeypatch.setattr(loop_thread, "PATIENCE", 0.0)

    async def run() -> None:
        env = LocalToolingEnv([hang], timeout=0.01)
        for _ in range(3):
            await env.aexecute("hang", {})
        with pytest.raises(ThreadsExhausted, match="hang"):
            await env.aexecute("hang", {})

    asyncio.run(run())


def test_a_cancelled_call_is_left_to_itself() -> None:
    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await call(hang)
        assert stuck_threads() == 1

    asyncio.run(run())


async def never() -> None:
    await asyncio.sleep(ENOUGH)


def test_both_kinds_of_functions_have_a_time_out() -> None:
    for fn in (hang, never, lambda: never()):
        with pytest.raises(CallTimeout):
            asyncio.run(call(fn, timeout=0.05))


# -- what ends a thread


def exits() -> None:
    """Leaves."""
    sys.exit(3)


def interrupts() -> None:
    raise KeyboardInterrupt


def cancels() -> None:
    raise asyncio.CancelledError


async def exits_async() -> None:
    exits()


async def cancels_async() -> None:
    cancels()


class Failed(BaseException):
    """No Exception, as what pytest.fail and gevent.Timeout raise."""


def fails() -> None:
    raise Failed("of a test library")


def closes() -> None:
    raise GeneratorExit


async def fails_async() -> None:
    fails()


ENDINGS = [exits, interrupts, cancels, fails, closes, exits_async, cancels_async, fails_async]


@pytest.mark.parametrize("fn", ENDINGS)
def test_an_exit_is_an_error_that_names_the_function(fn: Callable[..., Any]) -> None:
    async def run() -> None:
        with pytest.raises(RuntimeError, match=fn.__name__):
            await asyncio.create_task(call(fn))
        with pytest.raises(RuntimeError):
            await call(partial(next, iter([])))  # StopIteration

    asyncio.run(run())


@pytest.mark.parametrize("fn", [fn for fn in ENDINGS if fn is not closes])
def test_an_agent_that_exits_is_a_failed_rollout(tokenizer: Any, fn: Callable[..., Any]) -> None:
    async def agent(data: Any, base_url: str, api_key: str) -> Any:
        result = fn()
        return await result if asyncio.iscoroutine(result) else result

    def plain(data: Any, base_url: str, api_key: str) -> Any:
        return fn()

    for kind in (agent, plain):
        batch = agent_batch(tokenizer, kind)
        assert batch["valid"].tolist() == [False]
        assert [FAILURES[i] for i in batch["failure"]] == ["environment"]


def test_a_function_that_gives_an_awaitable_has_one_time_out() -> None:
    def both() -> Any:
        time.sleep(0.6)
        return asyncio.sleep(0.6)

    async def run() -> None:
        with pytest.raises(CallTimeout):
            await call(both, timeout=1.0)
        await call(both, timeout=30.0)

    asyncio.run(run())


def test_a_tool_that_exits_is_told() -> None:
    said = asyncio.run(LocalToolingEnv([exits]).aexecute("exits", {}))
    assert said.startswith("Error: exits raised RuntimeError") and "SystemExit(3)" in said


# -- what an agent returns, and what it does to its row


@pytest.mark.parametrize("returned", ["1.0", True, float("nan"), 10**400, 1e7, [1.0]])
def test_what_is_no_reward_is_a_failed_rollout(tokenizer: Any, returned: Any) -> None:
    def agent(data: Any, base_url: str, api_key: str) -> Any:
        ask(base_url, api_key)
        return returned

    batch = agent_batch(tokenizer, agent)
    assert batch["valid"].tolist() == [False]
    assert [FAILURES[i] for i in batch["failure"]] == ["environment"]


def test_an_agent_has_a_row_of_its_own(tokenizer: Any) -> None:
    row = copy.deepcopy(ROW)

    def agent(data: Any, base_url: str, api_key: str) -> float:
        ask(base_url, api_key)
        data["messages"][0]["content"] = "changed"
        data.clear()
        return 1.0

    assert agent_batch(tokenizer, agent, row, n=2)["rewards"].tolist() == [1.0, 1.0]
    assert row == ROW
