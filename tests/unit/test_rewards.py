"""Rewards, and the pool that runs them in processes."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import reasoning_gym

from megarl.rollout.rewards import RewardError, RewardPool, RewardTimeout, get_reward_fn


def score(name, completion, **row):
    return get_reward_fn(name)("prompt", completion, [1], [2], **row)


@pytest.mark.parametrize(
    "completion, reward",
    [("579", 1.0), (" 579\n", 1.0), ("580", 0.0), ("579.", 0.0), ("", 0.0), ("5 79", 0.0)],
)
def test_arithmetic_is_an_exact_match(completion, reward):
    assert score("arithmetic", completion, answer="579", task="arithmetic") == reward


@pytest.mark.parametrize(
    "completion, answer, reward",
    [
        ("so we get \\boxed{42}", "42", 1.0),
        ("\\boxed{41} no, \\boxed{42}.", "42", 1.0),
        ("\\boxed{42} out of 100", "42", 1.0),
        ("48/2 = 24, 24 + 18 = 42", "42", 1.0),
        ("The answer is 1,234 dollars.", "1234", 1.0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{42.0}", "42", 1.0),
        ("it is -3", "-3", 1.0),
        ("it is 3", "-3", 0.0),
        ("42 is what I had, but 43", "42", 0.0),
        ("\\boxed{42", "42", 0.0),
        ("no idea", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_gsm8k_takes_the_boxed_or_last_number(completion, answer, reward):
    assert score("gsm8k", completion, answer=answer) == reward


def test_reasoning_gym_uses_the_librarys_scorer():
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    right = entry["answer"]
    assert score("reasoning_gym", f" {right} ", entry=entry) == 1.0
    assert score("reasoning_gym", f"I think <answer>{right}</answer> yes", entry=entry) == 1.0
    assert score("reasoning_gym", str(int(right) + 1), entry=entry) < 1.0


def test_registry():
    assert get_reward_fn("os.path:basename") is os.path.basename
    with pytest.raises(ValueError, match=r"'nope'.*arithmetic.*gsm8k.*reasoning_gym"):
        get_reward_fn("nope")
    with pytest.raises(ValueError, match="cannot be loaded"):
        get_reward_fn("os.path:nope")


# rewards the workers import from this module


def add(a, b=0.0):
    return a + b


def pid():
    return float(os.getpid())


def slow(seconds):
    time.sleep(seconds)
    return 1.0


def raises():
    raise ZeroDivisionError("no ratio")


def dies():
    os._exit(3)


def nan():
    return float("nan")


def stuck(path):
    """Holds the GIL, ignores SIGTERM, and has a process of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"])
    Path(path).write_text(f"{os.getpid()} {child.pid} ")
    ctypes.PyDLL(None).sleep(600)


@pytest.fixture(scope="module")
def pool():
    with RewardPool(2, timeout=1.0) as p:
        yield p


def run(pool, fn, *args, row_id="?", **kw):
    return asyncio.run(pool.score(fn, args, kw, row_id=row_id))


def test_pool_scores_in_other_processes(pool):
    async def several():
        return await asyncio.gather(*(pool.score(add, (i,), {"b": 0.5}) for i in range(20)))

    assert asyncio.run(several()) == [i + 0.5 for i in range(20)]
    assert run(pool, pid) != os.getpid()


def test_workers_do_not_load_torch():
    """A worker imports the pool's and the reward's modules: with torch they would be large."""
    code = (
        "import sys; from megarl.rollout.rewards import get_reward_fn as g\n"
        "for name in ('arithmetic', 'gsm8k', 'reasoning_gym'): g(name)\n"
        "assert not {'torch', 'transformers', 'megatron'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_raising_reward_shows_its_traceback_and_row(pool):
    with pytest.raises(RewardError, match="reward raises on row 17 raised ZeroDivisionError") as e:
        run(pool, raises, row_id=17)
    assert 'raise ZeroDivisionError("no ratio")' in str(e.value)
    assert run(pool, add, 1.0) == 1.0


def test_slow_reward_is_killed_and_the_pool_goes_on(pool):
    with pytest.raises(RewardTimeout, match=r"row 5 took longer than rollout.reward_timeout=1 s"):
        run(pool, slow, 600.0, row_id=5)
    assert [run(pool, add, float(i)) for i in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_a_reward_stuck_in_c_is_killed_with_what_it_started(pool, tmp_path):
    with pytest.raises(RewardTimeout):
        run(pool, stuck, str(tmp_path / "pids"))
    until_gone(tmp_path / "pids")
    assert run(pool, add, 1.0) == 1.0


def test_workers_end_with_a_trainer_that_is_killed(tmp_path):
    pids = tmp_path / "pids"
    script = tmp_path / "trainer.py"
    script.write_text(
        "import asyncio\n"
        "from megarl.rollout.rewards import RewardPool\n"
        "from tests.unit.test_rewards import stuck\n"
        "if __name__ == '__main__':\n"
        f"    asyncio.run(RewardPool(1, timeout=600).score(stuck, ({str(pids)!r},), {{}}))\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
    with subprocess.Popen([sys.executable, str(script)], env=env) as trainer:
        try:
            deadline = time.monotonic() + 60
            while not pids.exists() or pids.read_text().count(" ") < 2:
                assert time.monotonic() < deadline and trainer.poll() is None
                time.sleep(0.02)
        finally:
            trainer.kill()
    until_gone(pids)


def until_gone(pids):
    """A killed process is gone, or a zombie, which has no command line."""
    places = [Path(f"/proc/{pid}/cmdline") for pid in pids.read_text().split()]
    assert len(places) == 2
    deadline = time.monotonic() + 30
    while any(p.exists() and p.read_bytes() for p in places):
        assert time.monotonic() < deadline, places
        time.sleep(0.02)


@pytest.mark.parametrize(
    "act, words",
    [
        ("raise ImportError('no sandbox here')", "raised ImportError: no sandbox here"),
        ("import os; os._exit(1)", "the import of its module may have ended it"),
    ],
)
def test_a_module_that_workers_cannot_import(pool, tmp_path, monkeypatch, act, words):
    name = f"broken_{len(act)}"
    code = f"import multiprocessing as mp\nif mp.parent_process(): {act}\ndef fn(): return 1\n"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    fn = get_reward_fn(f"{name}:fn")
    with RewardPool(1, timeout=1.0) as fresh:  # its worker's sys.path is that of its start
        with pytest.raises(RewardError, match=words):
            run(fresh, fn, row_id=3)
        assert run(fresh, add, 1.0) == 1.0


def test_dying_reward_is_an_error_and_the_pool_goes_on(pool):
    with pytest.raises(RewardError, match="reward dies on row 6 ended its worker process"):
        run(pool, dies, row_id=6)
    assert [run(pool, add, float(i)) for i in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_reward_must_be_a_finite_number(pool):
    with pytest.raises(RewardError, match="nan, not a finite number"):
        run(pool, nan)


def test_reward_must_be_a_number(pool):
    with pytest.raises(RewardError, match="raised TypeError"):
        run(pool, threading.Lock)


def test_reward_must_be_importable(pool):
    with pytest.raises(RewardError, match="top level of a module"):
        run(pool, lambda: 1.0)


def test_close_kills_busy_workers():
    pool = RewardPool(1, timeout=600.0)

    async def busy():
        task = asyncio.ensure_future(pool.score(slow, (600.0,), {}, row_id=1))
        pid = int(await asyncio.wait_for(started(), 60))
        pool.close()
        with pytest.raises(RewardError, match="row 1"):
            await task
        return pid

    async def started():
        while not (pool._workers[0]._process and pool._workers[0]._process.pid):
            await asyncio.sleep(0.02)
        return pool._workers[0]._process.pid

    pid = asyncio.run(busy())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    pool.close()


@pytest.mark.parametrize("bad", [{"workers": 0, "timeout": 1.0}, {"workers": 1, "timeout": 0.0}])
def test_bad_pool_settings(bad):
    with pytest.raises(ValueError, match=r"rollout.reward_"):
        RewardPool(bad["workers"], timeout=bad["timeout"])
