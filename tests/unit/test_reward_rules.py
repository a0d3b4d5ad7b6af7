"""Rewards by rules, by parts, and by tests that a program has to pass."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
from typing import Any, ClassVar

import pytest
import torch

from megarl.api.records import ModelResponse
from megarl.config.rollout import RolloutConfig
from megarl.rollout.rewards import RewardError, RewardPool, check_rows, get_reward_fn
from megarl.rollout.rewards import code as code_module
from megarl.rollout.rewards.code import extract_program
from megarl.rollout.rewards.results import RewardUnavailable, Scored
from megarl.rollout.tools import sandbox
from megarl.rollout.trajectory import Trajectory, to_batch
from megarl.trainer.rollout_metrics import rollout_metrics


def score(name: str, completion: str, *, tokens: int = 0, options: Any = None, **row: Any) -> float:
    return get_reward_fn(name, options)("", completion, [], [1] * tokens, **row)


def test_rules() -> None:
    assert score("exact", " the\nend ", answer="the end") == 1
    assert score("exact", "The end", answer="the end") == 0
    assert score("exact", "The end", answer="the end", options={"ignore_case": True}) == 1
    pattern = {"pattern": r"answer: (\w+)"}
    assert score("regex", "answer: 3, no, answer: 4", answer=4, options=pattern) == 1
    assert score("regex", "answer: 4, no, answer: 3", answer=4, options=pattern) == 0
    assert score("regex", "4", answer=4, options=pattern) == 0
    assert score("regex", "answer: x", options=pattern) == 1
    assert score("format", "<think>a\nb</think>\n<answer>4</answer>") == 1
    assert score("format", "<answer>4</answer>") == 0
    with pytest.raises(ValueError, match=r"pattern '\(': "):
        score("format", "", options={"pattern": "("})
    between = {"at_least": 2, "at_most": 4}
    assert [score("length", "", tokens=n, options=between) for n in (1, 2, 4, 5)] == [0, 1, 1, 0]
    overlong = {"max_length": 100, "buffer": 20}
    found = [score("overlong", "", tokens=n, options=overlong) for n in (0, 80, 85, 100, 120)]
    assert found == [0, 0, -0.25, -1, -1]
    with pytest.raises(ValueError, match="buffer=0"):
        score("overlong", "", options={"max_length": 100, "buffer": 0})


PARTS = {
    "answer": {"type": "regex", "options": {"pattern": "[0-9]+"}, "weight": 2},
    "form": "format",
    "short": {"type": "overlong", "options": {"max_length": 10, "buffer": 10}, "weight": 0.5},
}


def test_parts_are_weighted_and_reach_the_figures() -> None:
    with RewardPool(1, timeout=30.0) as pool:
        fn = get_reward_fn("weighted", {"parts": PARTS})
        args = ("", "<think></think><answer>4</answer>", [], [1] * 4)
        reward = asyncio.run(pool.score(fn, args, {"answer": "4"}))
    assert reward == 2 + 1 - 0.2
    assert isinstance(reward, Scored)
    assert reward.parts == {"answer": 1.0, "form": 1.0, "short": -0.4}
    rollouts = []
    for i, scored in enumerate((reward, Scored(0, {"answer": 0, "form": 1, "short": 0}))):
        rollout = Trajectory(index=i)
        rollout.read([1])
        rollout.wrote(
            ModelResponse(
                input_tokens=[1], output_tokens=[2], output_logprobs=[-1.0], output_versions=[0]
            )
        )
        rollout.score(pickle.loads(pickle.dumps(scored)))
        rollouts.append(rollout)
    broken = Trajectory(index=2)
    broken.read([1])
    broken.fail("tool")
    batch = to_batch([*rollouts, broken])
    assert batch["reward_part/answer"][:2].tolist() == [1.0, 0.0]
    kept = {k: v[:2] for k, v in batch.items() if k not in ("valid", "failure")}
    metrics = rollout_metrics(kept | {"group_ids": torch.tensor([0, 0])}, version=0)
    assert metrics["reward/answer"] == 0.5 and metrics["reward/form"] == 1.0
    assert metrics["reward/short"] == pytest.approx(-0.2)
    assert metrics["reward/answer/std"] == 0.5 and metrics["reward/form/std"] == 0.0


def test_late_answers_are_counted_among_all() -> None:
    rollouts = []
    for i, completion in enumerate((r"\boxed{18!!}", r"\boxed{18}", r"\boxed{17}", "none")):
        rollout = Trajectory(index=i)
        rollout.read([1])
        rollout.wrote(
            ModelResponse(
                input_tokens=[1], output_tokens=[2], output_logprobs=[-1.0], output_versions=[0]
            )
        )
        parts = {"parts": {"answer": "gsm8k"}}
        rollout.score(get_reward_fn("weighted", parts)("", completion, [], [], answer="18"))
        rollouts.append(rollout)
    batch = to_batch(rollouts)
    kept = {k: v for k, v in batch.items() if k not in ("valid", "failure")}
    metrics = rollout_metrics(kept | {"group_ids": torch.zeros(4, dtype=torch.int64)}, version=0)
    assert metrics["reward/late"] == metrics["reward/answer"] == 0.25


def infinite_part(prompt: str, completion: str, *ids: list[int]) -> Scored:
    return Scored(0.0, {"form": math.nan, "right": float(completion)})


def test_an_infinite_part_of_a_reward_is_an_error_that_names_it() -> None:
    fn = get_reward_fn(f"{__name__}:infinite_part")
    with RewardPool(1, timeout=30.0) as pool:
        assert asyncio.run(pool.score(fn, ("", "2", [], []), {})).parts["right"] == 2
        for value in ("inf", "-inf"):
            with pytest.raises(RewardError, match=rf"right.* {value}"):
                asyncio.run(pool.score(fn, ("", value, [], []), {}, row_id=4))


class Waits:
    ended: ClassVar[list[str]] = []

    async def __call__(self, *own: Any, **row: Any) -> float:
        try:
            await asyncio.sleep(600)
        finally:
            self.ended.append("waits")
        return 1.0


async def fails(*own: Any, **row: Any) -> float:
    await asyncio.sleep(0.1)
    raise ValueError("no judge")


def test_a_part_that_raises_ends_the_others() -> None:
    parts = {"a": f"{__name__}:Waits", "b": f"{__name__}:fails"}
    with RewardPool(1, timeout=30.0) as pool, pytest.raises(RewardError, match="fails on row 3"):
        fn = get_reward_fn("weighted", {"parts": parts})

        async def score() -> float:
            try:
                return await pool.score(fn, ("", "", [], []), {}, row_id=3)
            finally:
                assert Waits.ended == ["waits"]

        asyncio.run(score())


@pytest.mark.parametrize(
    "parts, problem",
    [
        ({}, "name one reward at least"),
        ({"a": 3}, "parts.a=3: use type, options and weight"),
        ({"a": {"type": "format", "wait": 1}}, "use type, options and weight"),
        ({"a": {"type": "format", "weight": "x"}}, "parts.a.weight='x': use a number"),
        ({"a": "nothing"}, "unknown reward 'nothing'"),
    ],
)
def test_wrong_parts_are_refused_at_the_start(parts: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        get_reward_fn("weighted", {"parts": parts})


SQUARE = (
    "Here it is:\n```python\ndef square(x):\n    return x * x\nprint(square(int(input())))\n```"
)
STDIN = [{"input": "3\n", "output": "9"}, {"input": "-4", "output": "16\n\n"}]
CALLS = [{"args": [3], "output": 9.0}, {"args": [0.5], "output": 0.25}]


def test_programs_are_judged_by_tests() -> None:
    assert extract_program(SQUARE).startswith("def square")
    assert extract_program("x = 1") == "x = 1"
    assert extract_program("```\na\n```\nor\n```py\nb\n```") == "b\n"
    assert score("code", SQUARE, tests=STDIN) == 1
    assert score("code", SQUARE, tests=json.dumps(STDIN)) == 1
    assert score("code", SQUARE.replace("*", "+"), tests=STDIN) == 0
    called = "def square(x):\n    print('called')\n    return x * x"
    assert score("code", called, tests=CALLS, entry="square") == 1
    half = "def square(x):\n    return 9 if x == 3 else 1 / 0"
    assert score("code", half, tests=CALLS, entry="square") == 0
    assert score("code", half, tests=CALLS, entry="square", options={"partial": True}) == 0.5
    pairs = "def f(n):\n    return {'a': (n, [True, None])}"
    assert score("code", pairs, tests={"args": [1], "output": {"a": [1, [True, None]]}}, entry="f")
    assert not score("code", pairs, tests={"args": [1], "output": {"a": [1, [1, None]]}}, entry="f")
    asserts = "assert square(3) == 9\nassert square(-1) == 1"
    assert score("code", called, tests=asserts) == 1
    assert score("code", called, tests=[asserts, "assert square(2) == 5"]) == 0


LARGE = "def f(n):\n    return 2**n"
UNREADABLE = {
    "too large for a float": (LARGE, 2000, 4),
    "too large for a float, where one is right": (LARGE, 2000, 4.5),
    "too many digits": (LARGE, 20000, 4),
    "off by one, beyond rounding": (LARGE, 100, 2**100 + 1),
    "too deep": ("import os\nprint('\\x1eresult:' + '[' * 60000, flush=True)\nos._exit(0)", 1, [1]),
    "no number": ("def f(n):\n    return float('nan')", 1, 1),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_an_output_that_nobody_can_read_is_a_wrong_answer(case: str) -> None:
    program, n, output = UNREADABLE[case]
    assert score("code", program, tests=[{"args": [n], "output": output}], entry="f") == 0


def test_integers_are_compared_exactly() -> None:
    assert score("code", LARGE, tests=[{"args": [2000], "output": 2**2000}], entry="f") == 1
    assert score("code", LARGE, tests=[{"args": [3], "output": 8.0}], entry="f") == 1


CHEATS = {
    "leaving before the tests": "import os; os._exit(0)",
    "leaving politely": "raise SystemExit(0)",
    "printing an answer": "print('\\x1eresult:10')",
    "an endless loop": "while True: pass",
    "no program": "I do not know.",
    "too much memory": "x = ' ' * (1 << 40)",
    "too much output": "while True: print('x' * 1000)",
    "another process": "import os\nif os.fork(): os._exit(0)",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_program_that_cheats_gets_nothing(cheat: str) -> None:
    short = {"seconds": 1}
    assert score("code", CHEATS[cheat], tests=CALLS, entry="square", options=short) == 0
    assert score("code", CHEATS[cheat], tests="assert square(3) == 9", options=short) == 0


def test_a_sandbox_that_fails_is_a_failure_and_not_zero() -> None:
    fn = get_reward_fn("code", {"memory": 1 << 60})  # no kernel knows such a number
    with (
        RewardPool(1, timeout=60.0) as pool,
        pytest.raises(RewardError, match="row 7 raised SandboxError: this machine cannot confine"),
    ):
        asyncio.run(pool.score(fn, ("", SQUARE, [], []), {"tests": STDIN}, row_id=7))
    assert code_module.run_program is sandbox.run_program


@pytest.mark.parametrize(
    "row, problem",
    [
        ({}, "tests=None: a list of one test"),
        ({"tests": []}, "a list of one test"),
        ({"tests": "[1, "}, "tests are no JSON"),
        ({"tests": [{"input": "1"}]}, "use {input: text, output: text}"),
        ({"tests": CALLS}, "entry='': use"),
        ({"tests": CALLS, "entry": "f()"}, "use {input"),
        ({"tests": [{"input": "", "output": "1\n" * 40000}]}, "79999 bytes.*print 65536"),
        ({"tests": [{"args": [1], "output": "x" * 70000}], "entry": "f"}, "70002 bytes"),
    ],
)
def test_rows_without_sound_tests_are_refused_at_the_start(row: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=f"row 3: .*{problem}"):
        check_rows(get_reward_fn("code"), [{"row_id": 3} | row])
    check_rows(get_reward_fn("code"), [{"row_id": 1, "tests": STDIN}])


def test_tests_that_outlast_the_pools_clock_are_refused_at_the_start() -> None:
    rows = [{"row_id": 5, "tests": [*STDIN, *STDIN]}]
    fn = get_reward_fn("code", {"seconds": 5})
    check_rows(fn, rows, timeout=23.5)
    for timeout in (20.5, 20, 15):
        with pytest.raises(ValueError, match=r"row 5: .*seconds.*rollout\.reward_timeout"):
            check_rows(fn, rows, timeout=timeout)
    check_rows(get_reward_fn("code", {"seconds": 1}), rows, timeout=15)
    parts: Any = {"code": {"type": "code", "options": {"seconds": 4}}, "form": "format"}
    for more in ({}, {"judge": f"{__name__}:fails"}):
        fn = get_reward_fn("weighted", {"parts": parts | more})
        check_rows(fn, rows, timeout=19.5)
        with pytest.raises(ValueError, match="row 5: "):
            check_rows(fn, rows, timeout=16.5)
        with pytest.raises(ValueError, match="row 6: "):
            check_rows(fn, [{"row_id": 6, "tests": []}], timeout=16)
    check_rows(get_reward_fn("code"), rows, timeout=RolloutConfig().reward_timeout)


@pytest.mark.parametrize("tests", [STDIN, ["assert square(3) == 9"] * 2])
def test_a_program_that_sleeps_is_judged_within_the_time_of_its_row(tests: Any) -> None:
    fn = get_reward_fn("code", {"seconds": 1, "partial": True})
    row = {"tests": tests}
    timeout = code_module.most_seconds(**row, seconds=1) + 0.1
    check_rows(fn, [row], timeout=timeout)
    with RewardPool(1, timeout=timeout) as pool:
        own = ("", "import time\ntime.sleep(100)", [], [])
        assert asyncio.run(pool.score(fn, own, row)) == 0


def test_a_machine_that_is_slow_to_start_programs_gives_no_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def starts_late(*args: Any, stdin: str, **kw: Any) -> sandbox.Ran:
        await asyncio.sleep(2)
        return sandbox.Ran(ended="ok", code=0, stdout="9" if stdin == "3\n" else "16", stderr="")

    monkeypatch.setattr(code_module, "run_program", starts_late)
    for options in ({"seconds": 1}, {"seconds": 1, "partial": True}):
        with pytest.raises(RewardUnavailable, match="1 of 2 tests done"):
            score("code", SQUARE, tests=STDIN, options=options)
    assert score("code", SQUARE, tests=STDIN, options={"seconds": 5}) == 1  # time enough
