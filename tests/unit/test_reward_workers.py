"""Rewards at a reward worker over a link: the same results and the same errors as beside rank 0."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.rewards import RewardError, RewardPool, RewardTimeout, get_reward_fn
from megarl.rollout.rewards.results import RewardUnavailable, Scored
from megarl.rollout.server_process import ServerProcess
from megarl.utils.env import JOB_TOKEN, free_port
from megarl.utils.user_errors import in_one_line, user_lines

ROOT = Path(__file__).parents[2]
TOKEN = "the-tests-secret"


def add(a: float, b: float = 0.0) -> float:
    return a + b


def silent() -> float:
    raise RewardUnavailable("nobody knows")


def noted() -> Scored:
    return Scored(1.0, {"a": 2.0}, {"b": "why"})


def parent() -> int:
    return os.getppid()


def raises() -> float:
    raise ZeroDivisionError("no ratio")


def slow() -> float:
    time.sleep(30)
    return 0.0


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A reward worker as the launcher starts it, which computes two rewards at once."""
    port, log = free_port(), tmp_path_factory.mktemp("worker") / "log"
    command = [sys.executable, "-m", "megarl.rollout.rewards.node", "--port", str(port)]
    process = ServerProcess(
        [*command, "--workers", "2", "--timeout", "1"],
        host="127.0.0.1", port=port, log_path=log, linked=True,
        env={JOB_TOKEN: TOKEN, "PYTHONPATH": os.pathsep.join([str(ROOT), str(log.parent)])},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(JOB_TOKEN, TOKEN)
        process.wait_healthy(60)
    yield process
    process.stop()


@pytest.fixture
def pool(worker: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardPool]:
    monkeypatch.setenv(JOB_TOKEN, TOKEN)
    with RewardPool(2, timeout=1.0, addresses=[worker.address]) as pool:
        yield pool


def run(pool: RewardPool, fn: Callable[..., Any], *args: Any, row_id: int = 0, **kw: Any) -> Any:
    return asyncio.run(pool.score(fn, args, kw, row_id=row_id))


def test_scores_are_those_of_a_pool_here(pool: RewardPool, worker: ServerProcess) -> None:
    async def several() -> list[float]:
        return await asyncio.gather(*(pool.score(add, (i,), {"b": 0.5}) for i in range(20)))

    assert asyncio.run(several()) == [i + 0.5 for i in range(20)]
    assert run(pool, parent) == worker.pid
    assert run(pool, partial(add, b=2.0), 1.0) == 3.0
    arithmetic = get_reward_fn("arithmetic")
    assert run(pool, arithmetic, "1+1=", "2", [1], [2], answer="2") == 1.0


def test_a_reward_with_options_of_a_file_whose_folder_is_on_its_path(
    pool: RewardPool, worker: ServerProcess
) -> None:
    file = worker.log_path.with_name("lone_reward.py")
    file.write_text("def seven(*, seven=7.0):\n    return seven\n")
    assert run(pool, get_reward_fn(f"{file}:seven", {"seven": 7.5})) == 7.5


def test_errors_name_row_and_worker(pool: RewardPool, worker: ServerProcess) -> None:
    with pytest.raises(RewardError, match="reward raises on row 17 raised ZeroDivisionError") as e:
        run(pool, raises, row_id=17)
    assert user_lines(e.value)[0].line == 'raise ZeroDivisionError("no ratio")'
    assert __file__ in in_one_line(e.value) and "Traceback" not in str(e.value)
    assert worker.address in str(e.value)
    with pytest.raises(RewardTimeout, match="reward slow on row 3 took longer than"):
        run(pool, slow, row_id=3)
    assert run(pool, add, 1.0) == 1.0


@pytest.mark.parametrize(
    ("fn", "kw", "says"),
    [
        (lambda: 0.0, {}, "at the top level of a module"),
        (add, {"a": threading.Lock()}, "cannot pickle"),
    ],
)
def test_what_cannot_travel_is_refused(pool: RewardPool, fn: Any, kw: Any, says: str) -> None:
    with pytest.raises(RewardError, match=f"on row 5 cannot be sent to a worker process .*{says}"):
        run(pool, fn, row_id=5, **kw)


def test_a_function_of_the_script_itself_is_refused(pool: RewardPool) -> None:
    """Its module has another name at the worker."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RewardError, match="script itself"):
        main = sys.modules["__main__"]
        patch.setattr(add, "__module__", "__main__")
        patch.setattr(main, "add", add, raising=False)
        run(pool, add, 1.0)


def test_the_jobs_token_is_asked_for(
    worker: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in ("", "another"):
        monkeypatch.setenv(JOB_TOKEN, wrong)
        stranger = RewardPool(1, timeout=1.0, addresses=[worker.address])
        with stranger, pytest.raises(RewardError, match=JOB_TOKEN):
            run(stranger, add, 1.0)
    without = {k: v for k, v in os.environ.items() if k != JOB_TOKEN}
    command = [sys.executable, "-m", "megarl.rollout.rewards.node", "--port", str(free_port())]
    done = subprocess.run(command, env=without, timeout=60, capture_output=True, text=True)
    assert done.returncode == 2 and JOB_TOKEN in done.stderr


def test_a_worker_that_is_gone_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_TOKEN, TOKEN)
    monkeypatch.setattr("megarl.rollout.rewards.pool.LOST_PATIENCE", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as s:
        address = f"127.0.0.1:{s.getsockname()[1]}"
    lost = RewardPool(1, timeout=1.0, addresses=[address])
    with lost, pytest.raises(RewardError, match=f"row 1: .*{address}"):
        run(lost, add, 1.0, row_id=1)


def test_a_worker_that_is_gone_costs_nothing_while_another_is_left(
    worker: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens at the first address."""
    monkeypatch.setenv(JOB_TOKEN, TOKEN)
    monkeypatch.setattr("megarl.rollout.rewards.pool.LOST_PAUSE", 0.01)

    async def several(pool: RewardPool) -> list[float]:
        return await asyncio.gather(*(pool.score(add, (i,), {"b": 0.5}) for i in range(20)))

    gone = f"127.0.0.1:{free_port()}"
    with RewardPool(1, timeout=1.0, addresses=[gone, worker.address]) as pool:
        assert asyncio.run(several(pool)) == [i + 0.5 for i in range(20)]


def test_notes_and_parts_travel(pool: RewardPool) -> None:
    scored = run(pool, noted)
    assert (float(scored), scored.parts, scored.notes) == (1.0, {"a": 2.0}, {"b": "why"})


def test_a_reward_that_nobody_can_tell_is_one_here_and_there(pool: RewardPool) -> None:
    with RewardPool(1, timeout=30.0) as here:
        for place in (here, pool):
            with pytest.raises(RewardUnavailable, match=r"on row 0 raised .*nobody knows"):
                run(place, silent)


def test_closing_ends_a_call_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker listens and never answers."""
    monkeypatch.setenv(JOB_TOKEN, TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor() as threads:
        pool = RewardPool(1, timeout=60.0, addresses=[f"127.0.0.1:{silent.getsockname()[1]}"])
        answer = threads.submit(run, pool, add, 1.0)
        connection, _ = silent.accept()
        with connection:
            pool.close()
        assert isinstance(answer.exception(10), RewardError)
