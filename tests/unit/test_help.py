"""run.py before torch: --help, --print-config, --check, and mistakes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.help import render_help, render_section
from megarl.config.loader import load_config
from megarl.config.recipes import RECIPES
from megarl.config.schema import all_keys

ROOT = Path(__file__).parents[2]


def run(*args: str, module: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    what = ["-m", "megarl.run"] if module else [str(ROOT / "megarl" / "run.py")]
    return subprocess.run(
        [sys.executable, *what, *args], capture_output=True, text=True, timeout=60, cwd=ROOT,
        env=os.environ | env,
    )  # fmt: skip


def test_every_key_is_listed_with_default_choices_and_meaning() -> None:
    text = " ".join(render_help(width=100).split())
    for cls in RECIPES.values():
        for key in all_keys(cls):
            assert f" {key.name} " in text or f" {key.name}: " in text, key.name
            assert key.help, f"{key.name} has no help text"
    assert "actor.optimizer.lr peak learning rate [float, default 1e-05]" in text
    assert "[str, default k3] {k1, k2, k3, k1+, k3+, k3-weighted}" in text
    assert "eval_gconfig.greedy take the argmax (temperature 0) [bool, default true]" in text
    assert (
        "ref: reference for the KL term" in text and "(null unless one of its keys is set)" in text
    )


def test_help_of_one_recipe() -> None:
    answer = run("--help", "--recipe", "sft")
    assert answer.returncode == 0
    assert "model.path" in answer.stdout and "actor.path" not in answer.stdout
    assert run("--help", "--recipe", "xyz").stderr == (
        f"config error: recipe=xyz: not one of {', '.join(RECIPES)} (or pkg.module:name)\n"
    )


@pytest.mark.parametrize("command", [["megarl.run"], ["megarl.cli", "launch"]])
def test_help_of_one_section(command: list[str]) -> None:
    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *command, *words], capture_output=True, text=True, timeout=60
        )

    answer = ask("--help", "rollout")
    assert answer.returncode == 0
    keys = re.findall(r"^  ([\w.]+)", answer.stdout, re.MULTILINE)
    assert "rollout.max_head_offpolicyness" in keys
    assert all(key.partition(".")[0] == "rollout" for key in keys)
    assert "actor.optimizer.lr" in ask("--help", "actor.optimizer").stdout
    wrong = ask("--help", "rollot")
    assert wrong.returncode == 2 and "rollout" in wrong.stderr


def test_a_section_that_recipes_share_is_shown_once() -> None:
    text = render_section("gconfig")
    assert text.count("gconfig.n_samples") == 1 and "recipe=" not in text


@pytest.mark.parametrize("args", [["--help"], ["--print-config", "seed=3"]])
def test_nothing_heavy_is_imported_before_the_run(args: list[str]) -> None:
    code = (
        "import sys; from megarl.run import main; status = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'megatron', 'datasets', 'numpy'};"
        "slow = {'omegaconf', 'pydantic'};"  # for what a plain configuration has none of
        "seen = (heavy | slow) & set(sys.modules); assert not seen, seen; sys.exit(status)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert answer.returncode == 0, answer.stderr


def test_checks_against_the_model_import_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from megarl.run import main; status = main(sys.argv[1:]);"
        "assert not {'torch', 'transformers', 'megatron'} & set(sys.modules); sys.exit(status)"
    )
    (tmp_path / "config.json").write_text('{"architectures": ["Nothing"]}')
    args = ["recipe=sft", f"model.path={tmp_path}", "model.init_from_scratch=true"]
    answer = subprocess.run(
        [sys.executable, "-c", code, "--check", *args, "model.optimizer.lr=1"],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert answer.returncode == 2
    assert answer.stderr.startswith("config error: model: ") and "Nothing" in answer.stderr


def test_print_config_is_yaml_that_loads_back(tmp_path: Path) -> None:
    answer = run("--print-config", "actor.optimizer.lr=1e-4", "ref.path=${actor.path}")
    path = tmp_path / "x.yaml"
    path.write_text(answer.stdout)
    assert load_config(path) == load_config(
        None, ["actor.optimizer.lr=1e-4", "ref.path=${actor.path}"]
    )


def test_mistakes_print_one_report_and_exit_2() -> None:
    answer = run("actor.parallel.tp=two", "lr=3", module=False)
    assert answer.returncode == 2
    assert answer.stderr.splitlines() == [
        "config error: 2 problems",
        "  - actor.parallel.tp=two: not of type int",
        "  - lr: unknown key; did you mean actor.optimizer.lr?",
    ]
    assert run("--confg", "x").stderr == (
        "config error: --confg: unknown option; did you mean --config?\n"
    )
    assert run("--config").stderr == "config error: --config: needs a value\n"


def test_only_rank_zero_speaks() -> None:
    answer = run("lr=3", RANK="1", WORLD_SIZE="2")
    assert (answer.returncode, answer.stderr, answer.stdout) == (2, "", "")
    assert run("--print-config", RANK="1", WORLD_SIZE="2").stdout == ""


def test_run_as_a_file_does_not_shadow_other_packages(tmp_path: Path) -> None:
    """Its folder has config/, data/, ...: they must not stand on sys.path."""
    script = ROOT / "megarl" / "run.py"
    code = f"""
import runpy, sys
sys.argv, sys.path[0] = ["run.py", "--help"], {str(script.parent)!r}  # as python run.py does
try:
    runpy.run_path({str(script)!r}, run_name="__main__")
except SystemExit as e:
    assert e.code == 0
assert sys.path[0] == {str(ROOT)!r}, sys.path[0]
"""
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert answer.returncode == 0, answer.stderr
