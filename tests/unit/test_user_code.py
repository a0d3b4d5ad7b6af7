"""--check, and the same checks of a start: the data and the code that a configuration names."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config.command_line import parse_command_line
from megarl.config.loader import config_yaml
from megarl.config.recipes import GRPOConfig
from megarl.launcher import local
from megarl.launcher.job import TRAINER
from megarl.launcher.make import make_job
from megarl.launcher.plan import plan_here
from megarl.run import main
from megarl.trainer.named import read_config
from megarl.trainer.user_code import Named, code_problems
from megarl.utils.isolated import call_isolated
from tests.hf_stub import write_stub

ROOT = Path(__file__).parents[2]
MODULE = """
import asyncio
TABLE = {}
async def slow(prompt, completion, prompt_ids, completion_ids, **row): return 1.0
def good(prompt, completion, prompt_ids, completion_ids, *, answer, **row): return 1.0
def short(completion, answer): return 1.0
def odd(completion, solution): return 1.0
class Judge:
    def __init__(self, *, scale: float = 1.0): pass
    async def __call__(self, prompt, completion, prompt_ids, completion_ids, **row): return 1.0
def closed(prompt, completion, prompt_ids, completion_ids, answer): return 1.0
def scaled(prompt, completion, prompt_ids, completion_ids, *, scale: float, **row): return scale
def wants(prompt, completion, prompt_ids, completion_ids, *, entry, **row): return 1.0
other = lambda prompt, completion, prompt_ids, completion_ids, **row: 1.0
def fails(config): raise KeyError("boom")
def rows(cfg, *, seed): return [{"messages": "1+1"}, cfg.nothing]
class Still:
    def __call__(self, prompt, completion, prompt_ids, completion_ids, **row): return 1.0
class Client:
    def __init__(self, rollout, *, weight_sync, seed): pass
class Flow:
    def __init__(self, reward_fn, gconfig, tokenizer, *, reward_pool): pass
    async def arun_episode(self, engine, data): return None
class NoPool(Flow):
    def __init__(self, reward_fn, gconfig, tokenizer): pass
class Plain(Flow):
    def arun_episode(self, engine, data): return None
class Alone(Flow):
    async def arun_episode(self, data): return None
class Empty:
    def __init__(self, reward_fn, gconfig, tokenizer, *, reward_pool): pass
"""
CALLED = (
    r"called as \(prompt, completion, prompt_ids, completion_ids, row_id=, .*answer=.*\*\*row\)"
)
CASES = {
    "train_dataset.reward=mine:good": None,
    "train_dataset.reward=mine:short": None,
    "train_dataset.reward=mine:odd": r"odd\(completion, solution\): missing a required.*'solution'",
    "train_dataset.reward=mine:Judge train_dataset.reward.options.scale=2": None,
    "train_dataset.reward=mine:Judge train_dataset.reward.options.sale=2": (
        r"reward\.options\.sale=2: Judge has no such option; it takes scale"
    ),
    "train_dataset.reward=judge": r"train_dataset\.reward=judge: nothing says which server judges",
    "train_dataset.reward=judge train_dataset.reward.options.base_url=http://a/v1": None,
    (
        "train_dataset.reward=judge train_dataset.reward.options.base_url=http://a/v1 "
        "train_dataset.reward.options.scale=[1,1]"
    ): r"train_dataset\.reward: scale=\[1, 1\]: use two numbers",
    "train_dataset.reward=mine:closed": rf"unexpected keyword argument 'row_id'.*{CALLED}",
    "train_dataset.reward=mine:wants": rf"missing a required.*'entry'; it is {CALLED}",
    "train_dataset.reward=mine:slow": None,
    "train_dataset.reward=mine:other": r"cannot be sent to a worker process",
    "train_dataset.reward=mine:TABLE": r"a dict, not a function; expected reward\(",
    "train_dataset.reward=mine:Flow": r"a class without async __call__, not a function",
    "train_dataset.reward=mine:Still": r"without async __call__, not a function; expected reward",
    "train_dataset.reward=mine:goood": r"mine has no goood; did you mean good\?",
    "train_dataset.reward=mine.py:good": None,
    "train_dataset.reward=./mine.py:good": None,
    "train_dataset.reward=yours.py:good": r"there is no file yours\.py in /",
    "train_dataset.reward=empty/os.py:good": r"the name os already means .*; rename the file$",
    "train_dataset.reward=sub/mine:good": r"use 'package\.module:name' or 'path/file\.py:name'",
    "train_dataset.reward=mine:good train_dataset.reward.options.answer=1": (
        r"reward\.options\.answer=1: megarl gives good this argument; leave it out"
    ),
    "train_dataset.reward=mine:scaled train_dataset.reward.options.scale=2": None,
    "train_dataset.reward=mine:scaled train_dataset.reward.options.scale=x": (
        r"train_dataset\.reward\.options\.scale='x': not of type float$"
    ),
    "train_dataset.reward=mine:scaled": r"missing a required.*'scale'",
    "train_dataset.reward=yours:good": r"no module yours; it must be in the working directory \(/",
    "train_dataset.reward=broken:good": r"NameError: .*nonsense.*broken\.py, line 2\)$",
    "train_dataset.reward=syntax:good": r"SyntaxError: .*syntax\.py, line 1\)$",
    "train_dataset.reward=leaves:good": r"SystemExit: 3 \(.*leaves\.py, line 1\)$",
    "train_dataset.reward=imports:good": r"No module named 'nothing_there'.*imports\.py, line 1\)$",
    "train_dataset.reward=gsm9k": r"unknown reward 'gsm9k': use one of",
    "rollout.workflow=mine:Flow": None,
    "rollout.workflow=mine:NoPool": r"'reward_pool'.*expected Workflow\(reward_fn, gconfig",
    "rollout.workflow=mine:Plain": r"arun_episode is not async; expected async def arun_episode",
    "rollout.workflow=mine:Alone": r"too many positional arguments; expected async def arun_epis",
    "rollout.workflow=mine:Empty": r"has no method arun_episode",
    "rollout.workflow=Flow": r"rollout\.workflow: workflow 'Flow': use 'package\.module:name'",
    "rollout.backend=mine:Client": r"Client: no subclass of megarl\.RemoteSGLangEngine; make it",
    "actor.loss=mine:fails": r"actor\.loss=mine:fails: failed: KeyError: 'boom' \(.*mine\.py, line",
    "train_dataset.type=mine:rows train_dataset.reward=mine:good": (
        r"train_dataset: dataset type mine:rows: failed: AttributeError: .*\(.*mine\.py, line"
    ),
    "+train_dataset.options.levle=2": r"options\.levle=2: arithmetic has no such",
    "+train_dataset.options.level=two": r"options\.level='two': not of type int",
    "+train_dataset.options.count=4": r"4 rows do not fill one batch of batch_size=8",
    "train_dataset.type=gsm8k train_dataset.path=bad.jsonl": r"bad\.jsonl line 2: the answer is 42",
    "train_dataset.type=gsm8k train_dataset.path=words.jsonl train_dataset.batch_size=2": (
        r"train_dataset: row 1: the answer 'six apples' is neither a number nor an expression"
    ),
    "train_dataset.path=bad.jsonl": r"type=arithmetic: makes its own .*set train_dataset\.type=",
    "train_dataset.type=reasoning_gym +train_dataset.options.task=[a]": r"use one of \['",
    "gconfig.stop_token_ids=[-1]": r"stop_token_ids=\[-1\]: each must be >= 0",
    "gconfig.stop_token_ids=[130]": r"stop_token_ids=\[130\]: the model's vocab_size is 130",
    "gconfig.stop=['']": r"an empty text would end every answer",
    "tokenizer_path=./empty": r"tokenizer_path=empty: has no tokenizer \(tokenizer\.json",
    "fileroot=bad.jsonl": r"run directory /.*/bad\.jsonl/.* cannot be made: .*set another fileroot",
    "trial_name=" + 300 * "x": r"one path component, .*at most 255 bytes",
    "train_dataset.batch_size=2000": r"1000 rows do not fill one batch of batch_size=2000",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules and data, which is nowhere on the import path."""
    write_stub(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "empty" / "os.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import os\nnonsense\n")
    (tmp_path / "syntax.py").write_text("def good(\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "imports.py").write_text("import nothing_there\n")
    (tmp_path / "dies.py").write_text("import os\nos._exit(7)\n")
    good, bad = '{"question": "?", "answer": "#### 1"}', '{"question": "?", "answer": 42}'
    (tmp_path / "bad.jsonl").write_text(f"{good}\n{bad}\n")
    words = good.replace("#### 1", "#### six apples")
    (tmp_path / "words.jsonl").write_text(f"{good}\n{words}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    for name in ("mine", "broken", "syntax", "leaves", "imports"):
        sys.modules.pop(name, None)


def arguments(*more: str) -> list[str]:
    base = ["actor.path=model", "actor.optimizer.lr=1e-5", "gconfig.n_samples=2"]
    return [*base, "fileroot=runs", *more]


@pytest.mark.parametrize("case", CASES)
def test_mistakes_in_data_and_code_are_one_line(
    home: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, message = main([*arguments(*case.split()), "--check"]), CASES[case]
    out, err = capsys.readouterr()
    if message is None:
        assert (status, err) == (0, "") and out.startswith("the configuration is sound")
        return
    assert status == 2 and err.count("\n") == 1, err
    keys = [word.lstrip("+").partition(".")[0].partition("=")[0] for word in case.split()]
    assert err.startswith(tuple(f"config error: {key}" for key in (*keys, "actor", "the run")))
    assert re.search(message, err.strip()), err
    assert not (home / "runs").exists()


@pytest.mark.parametrize("check", [local.main, main])
def test_a_start_makes_the_same_checks(
    home: Path, check: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Before servers, process groups and the run directory."""
    for name in ("launch", "run"):
        module = local if name == "launch" else sys.modules["megarl.run"]
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("something was started"))
    more = ["rollout.addresses=[127.0.0.1:1]"]
    assert check(arguments(*more, "train_dataset.reward=mine:closed")) == 2
    assert "unexpected keyword argument 'row_id'" in capsys.readouterr().err
    assert check(arguments(*more, "+train_dataset.options.count=4")) == 2
    assert "do not fill one batch" in capsys.readouterr().err
    assert not (home / "runs").exists()


def test_code_that_ends_the_process_does_not_end_the_launcher(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments("train_dataset.reward=dies:good", "--check")
    assert local.main(args) == 2
    assert capsys.readouterr().err == (
        "config error: train_dataset.reward=dies:good: cannot be imported: the process ended with "
        "status 7\n"
    )


CONFIG = """
import os
from dataclasses import dataclass
from megarl import GRPOConfig
if os.path.exists("dies"): os._exit(7)
@dataclass(kw_only=True)
class Own(GRPOConfig):
    bonus: int = 0
class Trainer:
    config_class = Own
    def __init__(self, cfg, ctx): assert type(cfg) is Own
    def fit(self): pass
"""


@pytest.mark.parametrize("named", ["recipe=confs:Own", "trainer=confs:Trainer"])
def test_the_launcher_does_not_import_the_class_of_the_configuration(
    home: Path, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "confs.py").write_text(CONFIG)
    overrides = arguments(named, "bonus=2", "seed=${oc.env:SEED,5}")
    cfg = read_config(None, overrides, foreign=False, path=[str(home)])
    assert type(cfg) is GRPOConfig and cfg.seed == 5 and not hasattr(cfg, "bonus")
    assert "seed: ${oc.env:SEED,5}" in config_yaml(cfg) and "confs" not in sys.modules
    assert local.main([*arguments(named, "--check"), "bonos=2"]) == 2
    assert "bonos: unknown key; did you mean bonus?" in capsys.readouterr().err
    (home / "dies").touch()
    assert local.main(arguments(named, "--check")) == 2
    said = f"config error: {named}: cannot be imported: the process ended with status 7\n"
    assert capsys.readouterr().err == said


def test_code_that_never_returns_is_given_up() -> None:
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        call_isolated(time.sleep, 300, timeout=0.2)


def test_a_check_that_is_killed_from_outside_is_made_once_more(tmp_path: Path) -> None:
    """Only a second kill is an error, and one that says what it was."""
    (tmp_path / "killed.py").write_text(
        "import os, pathlib, signal\n"
        "def times(n):\n"
        "    seen = pathlib.Path(__file__).with_suffix('.seen')\n"
        "    with seen.open('a') as f:\n"
        "        f.write('x')\n"
        "    if len(seen.read_text()) <= n:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return 'answer'\n"
    )
    look = "import killed, sys, megarl.utils.isolated as i\nfor n in (1, 9):\n"
    look += "    print(i.call_isolated(killed.times, n, timeout=60), flush=True)"
    run = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
    )  # fmt: skip
    assert run.stdout == "answer\n"
    assert run.stderr.count("as for want of memory: asking once more\n") == 2
    assert "the process was killed (SIGKILL)" in run.stderr.splitlines()[-1]
    assert (tmp_path / "killed.seen").read_text() == "x" * 4


def test_ctrl_c_during_the_check_is_no_traceback(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pressed = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(30)"
    (home / "pressed.py").write_text(pressed)
    args = arguments("train_dataset.reward=pressed:good", "--check")
    assert local.main(args) == 128 + signal.SIGINT
    said = capfd.readouterr()
    assert said.out == said.err == ""


def test_code_that_is_looked_at_ends_with_who_looks_at_it(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\n"
        "def look():\n"
        "    print(os.getpid(), flush=True)\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n"
        "    time.sleep(20)\n"
        "    print('went on', flush=True)\n"
    )
    look = "import slow, megarl.utils.isolated as i; i.call_isolated(slow.look, timeout=60)"
    looking = subprocess.run(  # until the last holder of its output has ended
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
    )  # fmt: skip
    assert looking.returncode == -signal.SIGTERM and "went on" not in looking.stdout


def test_the_launchers_check_starts_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments("--check", "actor.parallel.tp=2", "train_dataset.reward=mine:good")
    assert local.main(args) == 0
    assert capsys.readouterr().out == "the configuration is sound, for 2 trainer process(es)\n"
    assert local.main([*args, "--nproc", "3"]) == 2
    assert "world size 3" in capsys.readouterr().err
    assert {p.name for p in home.iterdir() if p.is_dir()} - {"__pycache__"} == {"empty", "model"}


@pytest.mark.parametrize(
    "command", [["-m", "megarl.launcher.local"], [str(ROOT / "megarl" / "run.py")]]
)
def test_the_working_directory_is_on_the_path(home: Path, command: list[str]) -> None:
    """As a module and as a file, which torchrun and the launcher start."""
    answer = subprocess.run(
        [sys.executable, *command, "--check", *arguments("train_dataset.reward=mine:good")],
        capture_output=True, text=True, timeout=120, cwd=home,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr


def test_trainers_have_the_working_directory_on_their_path(home: Path) -> None:
    command = parse_command_line(arguments(), options=("config", "nproc"))
    (trainer,) = make_job(plan_here(command), os.environ).of(TRAINER)
    assert trainer.env["PYTHONPATH"].split(os.pathsep)[-1] == str(home)


def plain(outputs: Any, batch: Any) -> Any:
    """Is a loss as one might write it at first."""


def test_a_loss_with_other_arguments_is_told_how_it_is_called() -> None:
    named = Named(key="actor.loss", target=f"{__name__}:plain", kind="loss", config=None)
    (problem,) = code_problems([named])
    assert problem.startswith("actor.loss.options.batch") and "(config)" in problem
