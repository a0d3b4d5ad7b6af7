"""`make house` counts what stands in a file, and puts the file into its row."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

import pytest

HOUSE = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "house.py"))

FILE = '''"""A module.

Of three lines."""

# a comment
import os  # noqa: F401


class Shown:
    """Says it."""

    def said(self) -> None:
        """Says it, too."""

    def unsaid(self, x: object) -> object:
        assert x is not None and os
        return x  # type: ignore[no-any-return]

    def _own(self) -> str:
        return """no docstring"""


class _Hidden:
    def method(self) -> None: ...
'''


def counts(files: dict[str, str]) -> dict[str, Counter[str]]:
    return {path: HOUSE["count"](path, text) for path, text in files.items()}


def test_every_line_is_of_one_kind() -> None:
    found = HOUSE["count"]("a.py", FILE)
    assert (found["lines"], found["docs"], found["code"]) == (24, 5, 24 - 5 - 1 - 8)
    assert (found["public"], found["documented"]) == (3, 2)  # Shown, said; unsaid has none


PACKED = """\
def made(name: str) -> list[str]:
    if not name:
        raise ValueError("no name")
    return [
        name, name, name
    ]  # fmt: skip


class Section:
    key: int = 1
    'a key'
    other: int = 2
"""


def test_lines_are_those_that_the_formatter_prints() -> None:
    found = HOUSE["count"]("a.py", PACKED)
    assert (found["lines"], found["code"], found["keys"]) == (10, 7, 1)
    assert found == HOUSE["count"](
        "a.py",
        PACKED.replace("  # fmt: skip", "").replace(
            "[\n        name, name, name\n    ]", "[name, name, name]"
        ),
    )


def test_a_number_above_its_limit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    files = counts(
        {"megarl/parallel/a.py": FILE, "megarl/config/b.py": PACKED, "megarl/cli/c.js": "x\n\ny\n"}
    )
    found = HOUSE["measured"](files)
    assert (found["core"], found["outer"], found["whole"]) == (10, 7 + 2, 19)
    assert (found["longest_file"], found["long_files"], found["keys"]) == (24, 0, 1)
    assert HOUSE["above"](found, found) == []
    assert "core 10 of 10" in capsys.readouterr().out
    (problem,) = HOUSE["above"](found, found | {"core": 9})
    assert problem.startswith("core: 10 of 9")


def test_files_are_long_from_451_lines() -> None:
    files = {f"megarl/cli/{n}.js": "x\n" * n for n in (449, 450, 451, 500)}
    found = HOUSE["measured"](counts(files | {"megarl/config/a.py": "x = 1\n"}))
    assert (found["longest_file"], found["long_files"]) == (500, 2)


PRODUCT = """\
_LIMIT = 3


class Pool:
    _kind: str

    def __init__(self):
        self._workers = []

    def _start(self):
        pass
"""
TEST = """\
import torch.distributed as dist
from megarl import pools
from megarl.pools import Pool, _LIMIT, make
from unittest import mock


class Fake(Pool):
    def __init__(self):
        self._kind = "fake"
        self._workers.clear()

    def add(self, other):
        super()._start()
        return other._kind


def test_it(monkeypatch, made: Pool):
    monkeypatch.setattr(made, "_workers", [])
    with mock.patch("megarl.pools._LIMIT", 4), mock.patch.object(Pool, name):
        assert made._workers[0]._start and pools._kind
    "x_workers".removesuffix("_workers")
    made._other, made.__dict__, dist.group.WORLD._workers
"""


def test_private_names_of_the_product_are_found_in_tests() -> None:
    uses = HOUSE["private_uses"](
        {"megarl/pools.py": PRODUCT}, {"tests/t.py": TEST, "tests/t.json": "{"}
    )
    assert sorted(uses) == [
        "tests/t.py:13: super()._start",
        "tests/t.py:18: monkeypatch.setattr(made, '_workers', [])",
        "tests/t.py:19: mock.patch('megarl.pools._LIMIT', 4)",
        "tests/t.py:20: made._workers",
        "tests/t.py:20: made._workers[0]._start",
        "tests/t.py:20: pools._kind",
        "tests/t.py:3: from megarl.pools import Pool, _LIMIT, make",
    ]


def test_core_and_satellites_stand_apart_and_add_up() -> None:
    paths = ("parallel/groups.py", "parallel/cpu_kernels.py", "rollout/server/app.py", "run.py")
    files = {f"megarl/{path}": FILE for path in paths} | {"tools/plan.py": FILE}
    table = HOUSE["rows"](counts(files))
    assert [(name, c["files"], c["lines"]) for name, c in table.items()] == [
        ("parallel", 1, 24), ("= core", 1, 24),
        ("CPU backend", 1, 24), ("server", 1, 24), ("= satellites", 2, 48),
        ("top level", 1, 24), ("scripts", 1, 24), ("= rest", 2, 48),
        ("= whole", 5, 120),
    ]  # fmt: skip


def test_the_table_has_a_row_for_each_package(capsys: pytest.CaptureFixture[str]) -> None:
    HOUSE["show"](HOUSE["rows"](counts({"megarl/parallel/groups.py": FILE})))
    printed = [line.split() for line in capsys.readouterr().out.replace("│", " ").splitlines()]
    assert ["parallel", "1", "10", "56", "5", "3", "2"] in printed


def test_a_revision_git_does_not_know_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        HOUSE["main"](["--rev", "no-such-revision"])
    assert ended.value.code == 2
    assert "--rev no-such-revision: " in capsys.readouterr().err


def test_packages_short_of_docstrings_are_named() -> None:
    table = HOUSE["rows"](counts({"megarl/parallel/groups.py": FILE}))
    assert HOUSE["undocumented"](table, 66) == []
    problems = HOUSE["undocumented"](table, 67)
    assert len(problems) == 3
    assert problems[0].startswith("parallel: 2 of 3 public definitions have docstrings")
