"""--check, and the same checks of a start: the data and the code that a configuration names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config.command_line import parse_command_line
from megarl.config.loader import config_yaml, load_config
from megarl.config.recipes import GRPOConfig
from megarl.data import tokenizer as tokenizers
from megarl.launcher import local
from megarl.launcher.job import TRAINER
from megarl.launcher.make import make_job
from megarl.launcher.plan import plan_here
from megarl.run import main
from megarl.trainer import user_code
from megarl.trainer.user_code import Named, code_problems, read_config
from megarl.utils.importing import call_isolated
from tests.background import ignoring_sigint
from tests.hf_stub import write_stub

ROOT = Path(__file__).parents[2]
MODULE = """
import asyncio
TABLE = {}
async def slow(prompt, completion, prompt_ids, completion_ids, **row): return 1.0
def good(prompt, completion, prompt_ids, completion_ids, *, answer, **row): return 1.0
def short(completion, answer): return 1.0
def annotated(completions, **row) -> "list[float]":
    scores = [1.0 for _ in completions]
    return scores
def many(completions, **row): return [1.0 for _ in completions]
def single(reward):
    import functools
    @functools.wraps(reward)
    def one(completion, **row): return reward([completion], **row)[0]
    return one
@single
def adapted(completions, **row): return [1.0 for _ in completions]
def odd(completion, solution): return 1.0
class Judge:
    def __init__(self, *, scale: float = 1.0): pass
    async def __call__(self, prompt, completion, prompt_ids, completion_ids, **row): return 1.0
def closed(prompt, completion, prompt_ids, completion_ids, answer): return 1.0
def nameless(text, *, answer, **row): return 1.0
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
class Picky(Flow):
    def __init__(self, reward_fn, gconfig, tokenizer, *, reward_pool):
        assert reward_fn and tokenizer.encode("1") and reward_pool and gconfig.n_samples == 2
        raise ValueError("no games today")
class Told:
    def __init__(self, config, *, run_dir, from_step, team=""): pass
    def write(self, step, stats, total_steps): pass
    def close(self, outcome): pass
class Mute(Told):
    def __init__(self, config, *, run_dir): pass
class Endless(Told):
    close = None
class Short(Told):
    def write(self, step, stats): pass
class Late(Judge):
    def __init__(self): raise OSError("no route")
"""
# a configuration, and what its error names beside the key; None for one that is sound
CASES: dict[str, str | None] = {
    "train_dataset.reward=mine:good": None,
    "train_dataset.reward=mine:short": None,
    "train_dataset.reward=mine:odd": "solution",
    "train_dataset.reward=mine:Judge train_dataset.reward.options.scale=2": None,
    "train_dataset.reward=mine:Judge train_dataset.reward.options.sale=2": "options.sale=2 scale",
    "train_dataset.reward=judge": "judge server",
    "train_dataset.reward=judge train_dataset.reward.options.base_url=http://a/v1": None,
    (
        "train_dataset.reward=judge train_dataset.reward.options.base_url=http://a/v1 "
        "train_dataset.reward.options.scale=[1,1]"
    ): "scale=[1, 1]",
    "train_dataset.reward=mine:closed": None,
    "train_dataset.reward=mine:nameless": "'text' completion= **row",
    "train_dataset.reward=mine:wants": "'entry' answer= **row",
    "train_dataset.reward=mine:slow": None,
    "train_dataset.reward=mine:other": "worker",
    "train_dataset.reward=mine:TABLE": "dict reward(",
    "train_dataset.reward=mine:Flow": "__call__",
    "train_dataset.reward=mine:Still": "__call__ reward(",
    "train_dataset.reward=mine:goood": "goood good?",
    "train_dataset.reward=mine.py:good": None,
    "train_dataset.reward=./mine.py:good": None,
    "train_dataset.reward=yours.py:good": "yours.py /",
    "train_dataset.reward=empty/os.py:good": "os rename",
    "train_dataset.reward=sub/mine:good": "'package.module:name' 'path/file.py:name'",
    "train_dataset.reward=mine:good train_dataset.reward.options.answer=1": "options.answer=1 good",
    "train_dataset.reward=mine:scaled train_dataset.reward.options.scale=2": None,
    "train_dataset.reward=mine:scaled train_dataset.reward.options.scale=x": "scale='x' float",
    "train_dataset.reward=mine:scaled": "'scale'",
    "train_dataset.reward=yours:good": "yours directory /",
    "train_dataset.reward=broken:good": "NameError nonsense broken.py, line 2",
    "train_dataset.reward=syntax:good": "SyntaxError syntax.py, line 1",
    "train_dataset.reward=leaves:good": "SystemExit: 3 leaves.py, line 1",
    "train_dataset.reward=imports:good": "'nothing_there' imports.py, line 1",
    "train_dataset.reward=gsm9k": "'gsm9k' gsm8k",
    "train_dataset.reward=mine:annotated": "annotated list",
    "train_dataset.reward=mine:many": "many list",
    "train_dataset.reward=mine:adapted": None,
    "rollout.workflow=mine:Flow": None,
    "rollout.workflow=mine:NoPool": "'reward_pool' Workflow(reward_fn, gconfig",
    "rollout.workflow=mine:Plain": "async def arun_episode",
    "rollout.workflow=mine:Alone": "arun_episode(",
    "rollout.workflow=mine:Empty": "arun_episode",
    "rollout.workflow=Flow": "'Flow' 'package.module:name'",
    "stats_logger.tracker=mine:Told stats_logger.tracker.options.team=us": None,
    "stats_logger.tracker=mine:Told stats_logger.tracker.options.teem=us": "options.teem='us' team",
    "stats_logger.tracker=mine:Mute": "'from_step' Tracker(config",
    "stats_logger.tracker=mine:Endless": "close def close(self, outcome)",
    "stats_logger.tracker=mine:Short": "def write(self, step, stats, total_steps)",
    "rollout.backend=mine:Client": "Client megarl.RemoteSGLangEngine",
    "actor.loss=mine:fails": None,  # a start makes it, a check only reads its signature
    "train_dataset.type=mine:rows train_dataset.reward=mine:good": "AttributeError mine.py, line",
    "+train_dataset.options.levle=2": "options.levle=2 arithmetic level",
    "+train_dataset.options.level=two": "options.level='two' int",
    "+train_dataset.options.count=4": "4 batch_size=8",
    "train_dataset.type=gsm8k train_dataset.path=bad.jsonl": "bad.jsonl line 2 42",
    (
        "train_dataset.type=gsm8k train_dataset.path=words.jsonl train_dataset.batch_size=2"
    ): "row 1 'six apples'",
    "train_dataset.path=bad.jsonl": "arithmetic train_dataset.type=",
    "train_dataset.type=reasoning_gym +train_dataset.options.task=[a]": "task=",
    "gconfig.stop_token_ids=[-1]": "stop_token_ids=[-1] >= 0",
    "gconfig.stop_token_ids=[130]": "stop_token_ids=[130] vocab_size 130",
    "gconfig.stop=['']": "empty",
    "tokenizer_path=./empty": "tokenizer_path=empty tokenizer.json",
    "fileroot=bad.jsonl": "/bad.jsonl/ fileroot",
    "fileroot=/proc/nowhere": "/proc/nowhere/ fileroot",
    "trial_name=" + 300 * "x": "255",
    "train_dataset.batch_size=2000": "1000 batch_size=2000",
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
    status, names = main([*arguments(*case.split()), "--check"]), CASES[case]
    out, err = capsys.readouterr()
    if names is None:
        assert (status, err) == (0, "") and out
        return
    assert status == 2 and err.count("\n") == 1, err
    keys = [word.lstrip("+").partition(".")[0].partition("=")[0] for word in case.split()]
    assert err.startswith(tuple(f"config error: {key}" for key in (*keys, "actor", "the run")))
    assert all(name in err for name in names.split()), err
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
    assert check(arguments(*more, "train_dataset.reward=mine:nameless")) == 2
    assert "'text'" in capsys.readouterr().err
    assert check(arguments(*more, "+train_dataset.options.count=4")) == 2
    assert "batch_size=8" in capsys.readouterr().err
    assert not (home / "runs").exists()


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("actor.loss=mine:fails", "actor.loss=mine:fails KeyError: 'boom' mine.py, line"),
        ("rollout.workflow=mine:Picky", "rollout.workflow: no games today"),
        ("train_dataset.reward=mine:Late", "train_dataset.reward=mine:Late"),
    ],
)
def test_a_start_of_the_launcher_makes_what_is_named(
    home: Path, words: str, names: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In a process of its own, and not where --check alone is asked for."""
    monkeypatch.setattr(local, "launch", lambda *_: pytest.fail("something was started"))
    args = arguments(words, "rollout.addresses=[127.0.0.1:1]")
    assert local.main([*args, "--check"]) == 0
    assert not capsys.readouterr().err
    assert local.main(args) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in names.split()), error
    assert not (home / "runs").exists()


class Slow:
    """Is a reward that loads something as it is made."""

    def __init__(self) -> None:
        time.sleep(20)

    async def __call__(self, prompt: str, completion: str, *ids: Any, **row: Any) -> float:
        return 1.0


class OfAGpu(Slow):
    """Is one that needs a GPU, which a check has not."""

    def __init__(self) -> None:
        raise RuntimeError("No CUDA GPUs are available")


def test_what_is_slow_to_be_made_is_named_and_what_needs_a_gpu_is_left_to_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_code, "MAKE_TIMEOUT", 1)
    target, key = f"{__name__}:Slow", "train_dataset.reward"
    (problem,) = code_problems([Named(key=key, target=target, kind="reward")], makes=True)
    assert problem.startswith(f"{key}={target}") and "1 s" in problem
    gpu = Named(key=key, target=f"{__name__}:OfAGpu", kind="reward")
    assert code_problems([gpu], makes=True) == []


class Quick:
    """Is a workflow that is made at once."""

    def __init__(self, reward_fn: Any, gconfig: Any, tokenizer: Any, *, reward_pool: Any) -> None:
        assert tokenizer == "loaded"

    async def arun_episode(self, engine: Any, data: Any) -> None:
        return None


def test_what_megarl_loads_slowly_is_not_the_users_time(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "MAKE_TIMEOUT", 1)
    slow = lambda cfg, path: time.sleep(1.5) or "loaded"  # noqa: E731
    monkeypatch.setattr(tokenizers, "run_tokenizer", slow)
    cfg: Any = load_config(None, arguments())
    about = {"config": cfg, "data": cfg.train_dataset, "kind": "workflow"}
    flow = Named(key="rollout.workflow", target=f"{__name__}:Quick", **about)
    assert code_problems([flow], makes=True) == []


def test_what_is_slow_to_be_imported_is_named(home: Path) -> None:
    (home / "lazy.py").write_text(f"import time\ntime.sleep(20)\n{MODULE}")
    (home / "mine.py").rename(home / "quick.py")
    named = [
        Named(key=f"valid_datasets.{name}.reward", target=f"{home}/{name}.py:good", kind="reward")
        for name in ("lazy", "quick")
    ]
    (problem,) = code_problems(named, import_timeout=1)
    assert problem.startswith("valid_datasets.lazy.reward") and "1 s" in problem
    assert "first use" in problem and "lazy.py, line 2" in problem


def test_a_supervised_run_names_the_options_of_its_sync(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before its servers start, which come after the model."""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (home / "rows.jsonl").write_text(8 * f"{json.dumps({'messages': turns})}\n")
    words = [
        "recipe=sft", "model.path=model", "model.optimizer.lr=1e-5", "fileroot=runs",
        "train_dataset.type=chat", "train_dataset.path=rows.jsonl", "train_dataset.batch_size=8",
        "valid_dataset.type=arithmetic", "generation.weight_sync.type=distributed",
        "generation.server.context_length=64", "generation.gconfig.max_new_tokens=8",
    ]  # fmt: skip
    for more, named in (
        ("+generation.weight_sync.options.deltas=true", "generation.weight_sync.options.deltas"),
        ("generation.weight_sync.type=mine:Judge", "generation.weight_sync.type"),
    ):
        assert main([*words, more, "--check"]) == 2
        error = capsys.readouterr().err
        assert f"config error: {named}" in error and error.count("\n") == 1, error
    assert main([*words, "--check"]) == 0


def test_code_that_ends_the_process_does_not_end_the_launcher(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments("train_dataset.reward=dies:good", "--check")
    assert local.main(args) == 2
    error = capsys.readouterr().err
    assert "train_dataset.reward=dies:good" in error and "status 7" in error


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
    error = capsys.readouterr().err
    assert "bonos" in error and "bonus" in error
    (home / "dies").touch()
    assert local.main(arguments(named, "--check")) == 2
    error = capsys.readouterr().err
    assert named in error and "status 7" in error


def test_code_that_never_returns_is_given_up() -> None:
    with pytest.raises(TimeoutError, match=r"0\.2 s"):
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
    look = "import killed, sys, megarl.utils.importing as i\nfor n in (1, 9):\n"
    look += "    print(i.call_isolated(killed.times, n, timeout=60), flush=True)"
    run = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
    )  # fmt: skip
    assert run.stdout == "answer\n"
    assert "SIGKILL" in run.stderr.splitlines()[-1]
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


def test_a_check_that_a_shell_put_in_the_background_takes_sigint(home: Path) -> None:
    pressed = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(300)"
    (home / "pressed.py").write_text(pressed)
    args = arguments("train_dataset.reward=pressed:good", "--check")
    with ignoring_sigint():
        run = subprocess.Popen([sys.executable, "-m", "megarl.launcher.local", *args], cwd=home)
    assert run.wait(120) == 128 + signal.SIGINT


def test_code_that_is_looked_at_ends_with_who_looks_at_it(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\n"
        "def look():\n"
        "    print(os.getpid(), flush=True)\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n"
        "    time.sleep(20)\n"
        "    print('went on', flush=True)\n"
    )
    look = "import slow, megarl.utils.importing as i; i.call_isolated(slow.look, timeout=60)"
    looking = subprocess.run(  # until the last holder of its output has ended
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
    )  # fmt: skip
    assert looking.returncode == -signal.SIGTERM and "went on" not in looking.stdout


def test_the_launchers_check_starts_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments("--check", "actor.parallel.tp=2", "train_dataset.reward=mine:good")
    assert local.main(args) == 0
    assert "2 trainer" in capsys.readouterr().out
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
    assert 0 < problem.index("(config)") < problem.index("actor.loss.options.batch")
