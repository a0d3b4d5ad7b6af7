"""Commands that install an extra: of an error, a page or an example."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import megarl
from megarl.config.dataset import SourceConfig
from megarl.data.sources import load_rows
from megarl.rollout.rewards import get_reward_fn
from megarl.utils import extras
from megarl.utils.extras import DISTRIBUTION, install_hint

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
FOLDERS = ("megarl", "docs", "examples", "benchmarks", "tools", "configs")
WRITTEN = re.compile(r"""(?:^|[\s"'`(])(\.|megarl[\w-]*)\[([\w,-]+)\]""", re.M)


def texts(*suffixes: str) -> Iterator[tuple[Path, str]]:
    files = [f for folder in FOLDERS for f in (ROOT / folder).rglob("*")]
    for file in [*files, *ROOT.glob("*.md"), ROOT / "Dockerfile", ROOT / "Makefile"]:
        if file.is_file() and file.suffix in suffixes:
            yield file, file.read_text()


def in_calls() -> Iterator[str]:
    """The extras that calls of install_hint and require name."""
    for _, text in texts(".py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                words = {k.arg: k.value for k in node.keywords}
                given = words.get("extra") if node.func.id == "require" else None
                if node.func.id == "install_hint":
                    (given,) = node.args
                if given is not None and not isinstance(given, ast.Name):
                    yield ast.literal_eval(given)


def test_every_hint_names_an_extra_that_exists() -> None:
    named = {"gpu", "ray", "sglang", "mcp", "wandb", "tensorboard", "stacks", "reasoning-gym"}
    assert named == {*in_calls()}
    assert named <= EXTRAS


def test_every_command_in_a_text_names_our_distribution_and_an_extra() -> None:
    found = 0
    for file, text in texts(".py", ".md", ".yaml", ""):
        assert not re.search(r"pip install [^`\n]*\bmegarl(?![-\w])", text), file
        for name, extra in WRITTEN.findall(text):
            found += 1
            assert name in (".", DISTRIBUTION) and set(extra.split(",")) <= EXTRAS, file
    assert found > 5
    assert DISTRIBUTION == PROJECT["name"] != "megarl"


def test_extras_name_each_other_by_our_distribution_and_no_address() -> None:
    for lines in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        for requirement in map(Requirement, lines):
            assert requirement.url is None  # an index refuses an upload that has one
            if requirement.name.startswith("megarl"):
                assert requirement.name == DISTRIBUTION and requirement.extras <= EXTRAS


def test_a_clone_is_installed_from_its_path() -> None:
    *command, target = shlex.split(install_hint("ray"))
    assert command == ["pip", "install", "-e"] and target == f"{ROOT}[ray]"


def test_a_wheel_is_named_by_its_distribution(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "megarl" / "utils"
    package.mkdir(parents=True)
    shutil.copy(extras.__file__, package)
    code = "from extras import install_hint; print(install_hint('ray'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=package, capture_output=True, text=True, check=True
    )
    *command, target = shlex.split(done.stdout)
    requirement = Requirement(target)
    assert command == ["pip", "install"]
    assert requirement.name == DISTRIBUTION and requirement.extras == {"ray"}


def test_a_missing_package_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "megarl.rollout.rewards.reasoning_gym", raising=False)
    hint = re.escape(install_hint("reasoning-gym"))
    data = SourceConfig(type="reasoning_gym", size=4, options={"task": "chain_sum"})
    with pytest.raises(ValueError, match=f"type=reasoning_gym.*{hint}"):
        load_rows(data, seed=1)
    with pytest.raises(ValueError, match=f"reward=reasoning_gym.*{hint}"):
        get_reward_fn("reasoning_gym")


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", megarl.__version__)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "megarl.__version__"
