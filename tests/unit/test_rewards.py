"""Rewards, and the pool that runs them in processes."""

import asyncio
import ctypes
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path

import math_verify
import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from sympy import Rational

from megarl.rollout.rewards import (
    RewardError,
    RewardPool,
    RewardTimeout,
    check_rows,
    get_reward_fn,
    gsm8k,
    results,
    reward_arguments,
)
from megarl.rollout.rewards.numbers import read_number, without_groups, written_plainly
from megarl.rollout.rewards.results import RewardUnavailable
from megarl.utils.user_errors import in_one_line, user_lines


def score(name, completion, **row):
    return get_reward_fn(name)("prompt", completion, [1], [2], **row)


@pytest.mark.parametrize(
    "completion, reward",
    [("579", 1.0), (" 579\n", 1.0), ("580", 0.0), ("579.", 0.0), ("", 0.0), ("5 79", 0.0)],
)
def test_arithmetic_is_an_exact_match(completion, reward):
    assert score("arithmetic", completion, answer="579", task="arithmetic") == reward


BOXED = [
    (r"so we get \boxed{42}", "42", 1),
    (r"\boxed{41} no, \boxed{42}.", "42", 1),
    (r"\boxed{41} no, \boxed{42}.", "41", 0),
    (r"\boxed{42} out of 100", "42", 1),
    (r"\boxed{\frac{1}{2}}", "0.5", 1),
    (r"\boxed{\dfrac{10}{\sqrt{4}}}", "5", 1),
    (r"\boxed{42.0}", "42", 1),
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{50\%}", "0.5", 1),
    (r"\boxed{x = 5}", "5", 1),
    (r"\boxed{42", "42", 0),
    (r"7 \boxed{}", "7", 0),
]
EXPRESSIONS = [  # their value counts, and none of their parts
    (r"The answer is $\frac{5}{6}$.", "5/6", 1),
    (r"The answer is $\frac{5}{6}$.", "6", 0),
    (r"$\sqrt{16}$", "4", 1),
    (r"$\sqrt{16}$", "16", 0),
    ("$10^3$", "1000", 1),
    ("$10^3$", "3", 0),
    ("The answer is 10^3", "1000", 1),
    ("The answer is 10^3", "3", 0),
    ("2**3", "8", 1),
    ("3+2", "5", 1),
    ("3+2", "2", 0),
    ("3 × 4", "12", 1),
    ("3 × 4", "4", 0),
    ("18 / 3", "6", 1),
    ("18 / 3", "3", 0),
    ("5/6", "5/6", 1),
    ("The answer is 5/6.", "5/6", 1),
    ("The answer is 5/6.", "6", 0),
    ("**5/6**", "5/6", 1),
    ("1/2 cup", "1/2", 1),
    ("1/2 cup", "2", 0),
    ("2 1/2", "1", 0),
    ("x + 5", "5", 0),
    ("5x", "5", 0),
    ("x^2", "2", 0),
    ("10³", "10", 0),
    ("f(3)", "3", 0),
    ("3 apples + 2 apples", "2", 0),
    ("5 -3", "-3", 0),
    ("1e3", "1", 0),
    ("1e3", "3", 0),
]
RANGES = [  # and other things that only hold numbers
    ("3-5", "-5", 0),
    ("3-5", "5", 0),
    ("3-5", "3", 0),
    ("3–5 apples", "5", 0),
    ("3–5 apples", "3", 0),
    ("10-20%", "10", 0),
    ("10-20%", "20", 0),
    ("10%-20%", "10", 0),
    ("10% to 20%", "20", 0),
    ("$5-$10", "5", 0),
    ("$5-$10", "10", 0),
    ("3 to 5 apples", "5", 0),
    ("3 to 5 apples", "3", 0),
    ("$3$ to $5$", "5", 0),
    ("between 3 and 5", "5", 0),
    ("2024-01-05", "2024", 0),
    ("2024-01-05", "5", 0),
    ("5:30", "5", 0),
    ("5:30", "30", 0),
    ("(1,2)", "2", 0),
    ("COVID-19", "19", 0),
    ("v2.0.1", "1", 0),
    ("log2", "2", 0),
]
NUMBERS = [
    ("7 + 7 = 14", "14", 1),
    ("7 + 7 = 14", "7", 0),
    ("48/2 = 24, 24 + 18 = 42", "42", 1),
    ("He pays 3 * 4 = 12.", "12", 1),
    ("She earns $9 * 2 = $18 every day", "18", 1),
    ("#### 1,234", "1234", 1),
    ("#### 1,234", "234", 0),
    ("The answer: 9 * 2 = $<<9*2=18>>18 a day, so 7 * 18 =\n#### 126\n", "126", 1),
    ("#### Step 2\nThe answer is 5.", "5", 1),
    ("The answer is 1,234 dollars.", "1234", 1),
    ("$1,000,000", "1000000", 1),
    ("-1,234.50", "-1234.5", 1),
    ("$18", "18", 1),
    ("$18.", "18", 1),
    (r"\$18", "18", 1),
    ("18 dollars", "18", 1),
    ("so $18/day", "18", 1),
    ("12 eggs/day", "12", 1),
    ("20km", "20", 1),
    ("50%", "50", 1),
    (r"$50\%$", "50", 1),
    ("it is -3", "-3", 1),
    ("it is −3", "-3", 1),
    ("it is 3", "-3", 0),
    ("18.00", "18", 1),
    (".5", "0.5", 1),
    (".5", "5", 0),
    ("3.14", "3.14", 1),
    ("3.14", "14", 0),
    ("0.5", "1/2", 1),
    ("**42**", "42", 1),
    ("The answer is **42**.", "42", 1),
    (r"\(18\)", "18", 1),
    (r"$$18$$", "18", 1),
    ("$x = 5$", "5", 1),
    ("(3)", "3", 1),
    ("item #5", "5", 1),
    ("Step 2: 18", "18", 1),
    ("* 18", "18", 1),
    ("It is 5!", "5", 1),
    ("He has 5. 300 apples remain.", "300", 1),
    ("He has 5. 300 apples remain.", "5300", 0),
    ("It is $18, not $20.", "20", 1),
    ("42 is what I had, but 43", "42", 0),
    ("no idea", "42", 0),
    ("", "42", 0),
]
ENDLESS = [  # they would take hours to compute, or to read
    ("9^9^9", "9", 0),
    ("9**9**9**9", "9", 0),
    ("$9^{9^9}$", "9", 0),
    (r"\boxed{9^{9^{9^9}}}", "9", 0),
    ("2^100000000", "2", 0),
    ("$(10^9)!$", "9", 0),
    (r"$\binom{100000000}{5000000}$", "9", 0),
    ("1" * 5000, "1", 0),
    ("2^(1/2)", r"\sqrt{2}", 1),
    ("$5!$", "120", 1),
]


@pytest.mark.parametrize("table", [BOXED, EXPRESSIONS, RANGES, NUMBERS, ENDLESS], ids=len)
def test_gsm8k_takes_the_box_or_the_value_of_the_answer(table):
    wrong = [case for case in table if score("gsm8k", case[0], answer=case[1]) != case[2]]
    assert wrong == []


@pytest.mark.parametrize(
    "answer", ["5", "1,234", "-3.5", "5/6", r"\frac{\pi}{2}", "x+1", "xy^2", r"2\sin(x)", "(1,2)"]
)
def test_gold_answers_that_can_be_compared_with(answer):
    check_rows(get_reward_fn("gsm8k"), [{"row_id": 0, "answer": answer, "task": "gsm8k"}])


@pytest.mark.parametrize(
    "answer", ["", "?", "Monday", "no idea", "18 dollars", r"\text{yes}", "0x10", "5 79"]
)
def test_a_gold_answer_that_is_no_number_is_an_error_that_names_the_row(answer):
    data = [{"row_id": 6, "answer": "7"}, {"row_id": 7, "answer": answer}]
    with pytest.raises(ValueError, match=r"row 7: the answer .* is neither a number nor an expr"):
        check_rows(get_reward_fn("gsm8k"), data)
    with pytest.raises(ValueError, match=r"row 8: .*answer"):
        check_rows(get_reward_fn("gsm8k"), [{"row_id": 8, "task": "gsm8k"}])
    check_rows(get_reward_fn("arithmetic"), data)  # that reward compares any text
    for exact in (get_reward_fn("exact"), get_reward_fn("exact", {"ignore_case": True})):
        with pytest.raises(ValueError, match="row 9: answer is null"):
            check_rows(exact, [{"row_id": 9, "answer": None}])


def test_hydra_fits_beside_the_grader():
    """hydra-core 1.3 wants antlr4 4.9 and omegaconf 2.3."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    required = {r.name: r for r in map(Requirement, project["dependencies"])}
    assert "antlr4-python3-runtime" not in required
    assert required["omegaconf"].specifier.contains("2.3.0")
    assert required["math-verify"].specifier.contains(version("math-verify"))


SPELLINGS = [  # of a gold answer and of a completion; both are the same number, which no other is
    ("1e3", "1000"), ("1E3", "1000"), ("2e5", "200000"), ("3e8", "300000000"),
    ("6.02e23", "602000000000000000000000"), ("1e-5", "0.00001"), ("1 000", "1000"),
    (r"1\,000", "1000"), ("1~000", "1000"), ("1{,}000", "1000"), ("1_000", "1000"),
    ("3 1/2", "3.5"), (r"3\frac{1}{2}", "7/2"), (r"-3\tfrac12", "-3.5"), ("12.", "12"),
    (".5", r"\frac{1}{2}"), ("10000", r"10\,000"), ("1 234 567", "1,234,567"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SPELLINGS)
def test_a_number_is_the_same_in_every_spelling(one, other):
    for gold, completion in ((one, other), (other, one)):
        check_rows(get_reward_fn("gsm8k"), [{"row_id": 0, "answer": gold}])
        assert score("gsm8k", f"so \\boxed{{{completion}}}", answer=gold) == 1
        assert score("gsm8k", f"so\n#### {completion}", answer=gold) == 1
        for wrong in ("0", "1", "2", "10"):
            assert score("gsm8k", f"\\boxed{{{wrong}}}", answer=gold) == 0
            assert score("gsm8k", f"\\boxed{{{completion}}}", answer=wrong) == 0


@st.composite
def spelled_numbers(draw):
    """(number, text): one of the spellings that are read."""
    sign, whole = draw(st.sampled_from(["", "-", "+", "−"])), draw(st.integers(0, 10**9))
    bottom = draw(st.integers(1, 99))
    top, exponent = draw(st.integers(0, bottom)), draw(st.integers(-9, 9))
    gap = draw(st.sampled_from([",", " ", "_", "~", r"\,", "{,}", "\u202f"]))
    digits = draw(st.text("0123456789", min_size=1, max_size=6))
    grouped = f"{whole:,}".replace(",", gap)
    number, text = draw(
        st.sampled_from(
            [
                (whole, str(whole)),
                (whole, grouped),
                (whole, f"{whole}."),
                (Fraction(f"{whole}.{digits}"), f"{grouped}.{digits}"),
                (Fraction(f"0.{digits}"), f".{digits}"),
                (Fraction(f"{whole}.{digits}e{exponent}"), f"{whole}.{digits}e{exponent}"),
                (Fraction(whole, bottom), f"{whole}/{bottom}"),
                (Fraction(whole, bottom), rf"\frac{{{whole}}}{{{bottom}}}"),
                (whole + Fraction(top, bottom), f"{whole} {top}/{bottom}"),
                (whole + Fraction(top, bottom), rf"{whole}\dfrac{{{top}}}{{{bottom}}}"),
            ]
        )
    )
    return (-number if sign in ("-", "−") else number), sign + text


@settings(deadline=None)
@given(spelled_numbers())
def test_a_number_is_read_back_from_each_of_its_spellings(drawn):
    number, text = drawn
    assert read_number(text) == number
    assert Fraction(written_plainly(text)) == number


@pytest.mark.parametrize(
    "text",
    ["1,5", "1.2.3", "1 00", "5 79", "0x10", "1e", "1/0", "1,00", "--1", "", "1e999", "9" * 301]
    + ["0,001"],
)
def test_what_is_no_number_is_not_read_as_one(text):
    assert read_number(text) is None


def test_a_long_text_of_groups_is_read_in_a_time_that_grows_with_its_length():
    text = "1" + "~000" * 20_000
    began = time.process_time()
    assert without_groups(text, spaces=False) == text.replace("~", "")
    assert without_groups(text + "~0", spaces=False) == text + "~0"
    assert time.process_time() - began < 5  # half a minute if it grows with the square


PERCENTAGES = [
    (r"\boxed{50\%}", "50"),
    (r"\boxed{50\%}", "0.5"),
    (r"\boxed{50%}", r"50\%"),
    (r"\boxed{-50 \%}", "-50"),
    (r"\boxed{1,000\%}", "1000"),
    (r"\boxed{15\% \text{ off}}", "15"),
    (r"so $50\%$.", "50"),
]


@pytest.mark.parametrize("completion, answer", PERCENTAGES)
def test_percentages_are_read(completion, answer):
    assert score("gsm8k", completion, answer=answer) == 1
    assert score("gsm8k", completion.replace("5", "4").replace("1", "2"), answer=answer) == 0


@pytest.mark.parametrize("completion", ["\\boxed{50\\%}", "$50\\%$"])
def test_percentages_are_read_without_the_parsers_help(monkeypatch, completion):
    """That of antlr4 4.9 reads none in a box, or reads it as a number."""
    seen = []

    def parse(text, **kw):
        seen.append(text)
        return math_verify.parse(text, **kw)

    monkeypatch.setattr(gsm8k, "math_verify_parse", parse)
    assert gsm8k.final_answer(completion).doit() == Rational(1, 2)
    assert all("%}" not in text and "%$" not in text for text in seen)


def test_a_grader_that_cannot_read_latex_is_an_error_at_the_import(monkeypatch):
    monkeypatch.setattr(math_verify, "parse", lambda *_, **__: [])
    monkeypatch.delitem(sys.modules, "megarl.rollout.rewards.gsm8k")
    with pytest.raises(
        ValueError, match=r"reward .* cannot be loaded: .*math-verify reads .*antlr4"
    ):
        get_reward_fn("gsm8k")


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
    assert user_lines(e.value)[0].line == 'raise ZeroDivisionError("no ratio")'
    assert __file__ in in_one_line(e.value) and "Traceback" not in str(e.value)
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


def leaves(path):
    """Ends, and leaves a process of its own behind."""
    child = subprocess.Popen(["sleep", "600"])
    Path(path).write_text(f"{os.getpid()} {child.pid} ")
    os._exit(3)


def test_a_reward_that_ends_its_process_leaves_nothing_of_its_group(pool, tmp_path):
    with pytest.raises(RewardError, match="reward leaves on row 2 ended its worker process"):
        run(pool, leaves, str(tmp_path / "pids"), row_id=2)
    until_gone(tmp_path / "pids")


def trainer_of(tmp_path, reward, end=""):
    """Starts a script whose pool computes one reward, and which then does `end`."""
    script = tmp_path / "trainer.py"
    script.write_text(
        "import asyncio, sys\n"
        "from megarl.rollout.rewards import RewardPool\n"
        f"from tests.unit.test_rewards import {reward}\n"
        "if __name__ == '__main__':\n"
        "    pool = RewardPool(1, timeout=600)\n"
        f"    asyncio.run(pool.score({reward}, ({str(tmp_path / 'pids')!r},), {{}}))\n"
        f"    {end}\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)}
    return subprocess.Popen([sys.executable, str(script)], env=env)


def starts_another(path):
    """Returns, and leaves a process of its own running."""
    child = subprocess.Popen(["sleep", "60"])
    Path(path).write_text(f"{os.getpid()} {child.pid} ")
    return 1.0


@pytest.mark.parametrize(
    "end, status", [("", 0), ("raise ValueError", 1), ("sys.exit(3)", 3), ("del pool", 0)]
)
def test_workers_end_with_a_script_that_closes_no_pool(tmp_path, end, status):
    with trainer_of(tmp_path, "starts_another", end) as trainer:
        assert trainer.wait(60) == status
    until_gone(tmp_path / "pids")


def test_workers_end_with_a_trainer_that_is_killed(tmp_path):
    pids = tmp_path / "pids"
    with trainer_of(tmp_path, "stuck") as trainer:
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


def test_a_worker_that_is_killed_while_it_waits_costs_nothing():
    with RewardPool(1, timeout=60) as pool:
        first = int(run(pool, pid))
        os.kill(first, signal.SIGKILL)
        assert run(pool, pid) not in (first, os.getpid())


def killed(path, times):
    """Is killed, as for want of memory, at its first `times` calls."""
    with open(path, "a") as file:
        file.write("x")
    if os.path.getsize(path) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def test_a_worker_that_is_killed_amid_a_reward_costs_nothing(pool, tmp_path):
    assert run(pool, killed, str(tmp_path / "twice"), 2) == 1.0
    with pytest.raises(RewardError, match="reward killed on row 6 ended its worker process"):
        run(pool, killed, str(tmp_path / "always"), 9, row_id=6)
    assert os.path.getsize(tmp_path / "always") == 3


def test_reward_must_be_a_finite_number(pool):
    with pytest.raises(RewardError, match="nan, not a finite number"):
        run(pool, nan)


def test_reward_must_be_a_number(pool):
    with pytest.raises(RewardError, match="raised TypeError"):
        run(pool, threading.Lock)


def a_list(completions, answer):
    return [1.0] * len(completions)


def nothing(completion):
    pass


async def a_later_list(completion):
    scores = [1.0]  # only a call shows that it is a list
    return scores


@pytest.mark.parametrize("fn, kind", [(a_list, "list"), (nothing, "None"), (a_later_list, "list")])
def test_a_reward_that_returns_no_number_is_named_with_what_it_returned(pool, fn, kind):
    own = ("1+1=", "2", [1], [2])
    kw = reward_arguments(fn, own, {"answer": "2"})
    with pytest.raises(RewardError) as e:
        run(pool, fn, row_id=4, **kw)
    assert fn.__name__ in str(e.value) and "row 4" in str(e.value) and kind in str(e.value)
    weighted = get_reward_fn("weighted", {"parts": {"mine": f"{__name__}:{fn.__name__}"}})
    with pytest.raises(RewardError, match=rf"parts\.mine: .*{fn.__name__} on row 4 .*{kind}"):
        run(pool, weighted, row_id=4, **reward_arguments(weighted, own, {"answer": "2"}))
    if fn is not a_later_list:  # without a pool parts are not awaited
        with pytest.raises(TypeError, match=rf"parts\.mine.*{kind}"):
            weighted(*own, answer="2")


# completions that math-verify would compute for minutes, or for ever
LATE = [
    r"18!!",
    r"72!!!",
    r"\sum_{n=1}^{100000} \sin(n)",
    r"\int_0^1 e^{x^2} \sin(x^3) dx",
    r"(a+b+c+d+e+f)^{100}",
    r"2^{20!}",
    r"1E999999999",
    r"9^{9^9}",
    r"\prod_{n=1}^{1000000} n",
    r"\lim_{x\to 0} \sin(x)/x",
]


@pytest.mark.parametrize("completion", LATE)
def test_an_answer_that_takes_too_much_work_is_wrong_and_counted(completion):
    reward = get_reward_fn("gsm8k")("", f"\\boxed{{{completion}}}", [], [], answer="18")
    assert (reward, reward.parts) == (0.0, {"late": 1.0})


def spins(seconds):
    results.CPU_SECONDS = seconds
    return results.bounded(spin)()


def spin():
    while True:
        try:
            while True:
                pass
        except Exception:  # as libraries do
            continue


def counts_in_c(seconds):
    results.CPU_SECONDS = seconds
    return results.bounded(sum)(itertools.count())


@pytest.mark.parametrize("fn", [spins, counts_in_c])
def test_the_bound_is_of_cpu_time_in_python_and_in_c(fn):
    with RewardPool(1, timeout=300.0) as pool:
        reward = run(pool, fn, 0.5)
        assert (reward, reward.parts) == (0.0, {"late": 1.0})
        assert run(pool, add, 2) == 2


def test_what_waits_is_not_late():
    with RewardPool(1, timeout=300.0) as pool:
        assert run(pool, bounded_sleep, 5.0) == 1.0
        with pytest.raises(RewardError, match="ZeroDivisionError"):
            run(pool, bounded_raises)


@results.bounded
def bounded_sleep(seconds):
    time.sleep(seconds)
    return 1.0


@results.bounded
def bounded_raises():
    raise ZeroDivisionError


def test_an_answer_that_cannot_be_read_is_wrong_and_no_error():
    deep, long = "(" * 400 + "18" + ")" * 400, "9" * 6000
    for text in (deep, long, "\ud800", "\x00", "{" * 2000, "\\frac" * 500, "-" * 5000 + "1"):
        for completion in (text, f"\\boxed{{{text}}}", f"<answer>{text}</answer>"):
            assert get_reward_fn("gsm8k")("", completion, [], [], answer="17") == 0
            entry = reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=0)[0]
            assert get_reward_fn("reasoning_gym")("", completion, [], [], entry=entry) < 1
            backtracks = get_reward_fn("exact")("", completion, [], [], answer="17")
            assert backtracks == 0


def test_a_pattern_that_backtracks_is_late():
    reward = get_reward_fn("regex", {"pattern": "(a+)+b"})("", "a" * 60, [], [], answer="b")
    assert (reward, reward.parts) == (0.0, {"late": 1.0})


def test_reward_must_be_importable(pool):
    with pytest.raises(RewardError, match="top level of a module"):
        run(pool, lambda: 1.0)


def slow_and_told(file):
    """Takes long; `file` becomes a link to the process's number."""
    os.symlink(str(os.getpid()), file)
    return slow(600.0)


def test_close_kills_busy_workers(tmp_path):
    file = tmp_path / "pid"
    pool = RewardPool(1, timeout=600.0)

    async def busy():
        task = asyncio.ensure_future(pool.score(slow_and_told, (str(file),), {}, row_id=1))
        async with asyncio.timeout(60):
            while not file.is_symlink():
                await asyncio.sleep(0.02)
        pool.close()
        with pytest.raises(RewardError, match="row 1"):
            await task

    asyncio.run(busy())
    pid = int(file.readlink().name)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    pool.close()


@pytest.mark.parametrize("bad", [{"workers": 0, "timeout": 1.0}, {"workers": 1, "timeout": 0.0}])
def test_bad_pool_settings(bad):
    with pytest.raises(ValueError, match=r"rollout.reward_"):
        RewardPool(bad["workers"], timeout=bad["timeout"])


def by_name(completions, answer):
    return float(completions.strip() == answer)


def all_names(**given):
    return float(len(given))


def test_a_reward_gets_what_its_parameters_name():
    own, row = ("1+1=", " 2", [1, 2], [3]), {"answer": "2", "task": "sum"}
    assert reward_arguments(by_name, own, row) == {"completions": " 2", "answer": "2"}
    everything = dict(zip(("prompt", "completion", "prompt_ids", "completion_ids"), own)) | row
    for fn in (
        all_names,
        get_reward_fn("arithmetic"),
        get_reward_fn("weighted", {"parts": {"a": "exact"}}),
    ):
        assert reward_arguments(fn, own, row) == everything


def test_a_pool_that_is_sent_elsewhere_is_made_alike_there() -> None:
    pool = RewardPool(2, timeout=3.0, on_error="reject")
    with pool, pickle.loads(pickle.dumps(pool)) as other:
        assert (other.workers, other.on_error, other.timeout) == (2, "reject", 3.0)
        assert run(other, os.getpid) != run(pool, os.getpid)


def test_a_sandbox_that_somebody_kills_is_no_verdict(monkeypatch, tmp_path):
    """Memory may run out on the machine, which says nothing about the program."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def kill() -> None:
        found = ""
        while not found:
            time.sleep(0.1)
            command = ["pgrep", "-f", str(tmp_path)]
            found = subprocess.run(command, capture_output=True, text=True).stdout
        os.kill(int(found.split()[0]), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RewardUnavailable, match="somebody killed"):
        test = {"input": "", "output": "1"}
        score("code", "import time\ntime.sleep(60)", tests=[test], seconds=50)
    thread.join()


def scaled(completion, scale, **_):
    return scale * float(completion)


scaled.check_row = lambda **row: None


def test_a_reward_with_options_goes_to_a_worker_whatever_stands_beside_it(pool) -> None:
    fn = get_reward_fn(f"{__name__}:scaled", {"scale": 2.0})
    own = {"prompt": "", "completion": "3", "prompt_ids": [1], "completion_ids": [2]}
    assert run(pool, fn, **own) == 6.0
    check_rows(fn, [{"row_id": 0}])


def test_a_row_of_a_weighted_reward_may_have_columns_of_any_name(pool) -> None:
    fn = get_reward_fn("weighted", {"parts": {"a": "exact"}})
    own = {"prompt": "1+1=", "completion": " 2", "prompt_ids": [1], "completion_ids": [2]}
    assert run(pool, fn, **own, answer="2", score=5.0, self="me") == 1.0


def test_rows_of_a_sum_within_a_sum_are_checked() -> None:
    inner = {"type": "weighted", "options": {"parts": {"maths": "gsm8k"}}}
    fn = get_reward_fn("weighted", {"parts": {"inner": inner}})
    with pytest.raises(ValueError, match="row 0"):
        check_rows(fn, [{"row_id": 0, "answer": "no number at all ="}])


@pytest.mark.parametrize("module", [math_verify.parser, math_verify.grader])
def test_math_verify_does_not_warn_of_its_own_timeout(module, monkeypatch, caplog):
    monkeypatch.setattr(module, "TIMEOUT_WARNING_SHOWN", False)
    completion = "\\boxed{\\frac{1}{2}}"
    assert gsm8k.gsm8k_reward("", completion, [], [], answer="0.5") == 1.0
    assert not caplog.records
    module.logger.warning("another")
    assert [record.message for record in caplog.records] == ["another"]
