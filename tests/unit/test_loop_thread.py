"""The thread of the rollouts: what blocks it is shown, and ending it never waits forever."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from megarl.rollout import loop_thread
from megarl.rollout.loop_thread import LoopThread


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopThread]:
    monkeypatch.setattr(loop_thread, "BEAT", 0.02)
    monkeypatch.setattr(loop_thread, "BLOCKED_AFTER", 0.2)
    monkeypatch.setattr(loop_thread, "CLOSE_TIMEOUT", 0.3)
    loop = LoopThread("watched")
    yield loop
    loop.close()


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def blocks(end: threading.Event) -> None:
    end.wait(60)  # as time.sleep would


def test_a_blocked_loop_is_shown_with_its_line(loop: LoopThread, capfd) -> None:
    end = threading.Event()
    blocked = loop.submit(blocks(end))
    until(loop.blocked)
    assert "end.wait(60)" in loop.blocked() and "in blocks" in loop.blocked()
    with pytest.raises(TimeoutError, match=r"(?s)sleep took longer than 0 s; .*end\.wait"):
        loop.run(asyncio.sleep(0), timeout=0.1)
    time.sleep(0.3)
    end.set()
    blocked.result(timeout=60)
    until(lambda: not loop.blocked())
    loop.run(asyncio.sleep(0), timeout=60)
    assert capfd.readouterr().err.count("asynchronous code blocks it") == 1


def test_a_blocked_loop_is_left_behind(loop: LoopThread) -> None:
    end = threading.Event()
    loop.submit(blocks(end))
    until(loop.blocked)
    loop.close()  # returns
    assert "watched-watch" not in {t.name for t in threading.enumerate()}
    end.set()
    until(lambda: not loop.blocked())


def test_tasks_that_ignore_cancellation_do_not_hold_up_the_end(loop: LoopThread, capfd) -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    last = threading.Event()

    async def close() -> None:
        last.set()

    loop.submit(stubborn())
    loop.run(asyncio.sleep(0.05), timeout=60)
    loop.close(last=close)
    assert not loop.alive and last.is_set()
    assert "ignored their cancellation" in capfd.readouterr().err
    loop.close()


def test_a_name_is_looked_up_while_users_threads_are_all_busy(loop: LoopThread) -> None:
    end = threading.Event()

    async def lookup() -> object:
        threads = min(32, (os.cpu_count() or 1) + 4)
        busy = [asyncio.ensure_future(asyncio.to_thread(end.wait, 60)) for _ in range(threads)]
        await asyncio.sleep(0)
        try:
            look = asyncio.get_running_loop().getaddrinfo("localhost", 80)
            return await asyncio.wait_for(look, 10)
        finally:
            end.set()
            await asyncio.gather(*busy)

    assert loop.run(lookup(), timeout=30)
