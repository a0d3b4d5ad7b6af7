"""`make house` counts what stands in a file, and puts the file into its row."""

from __future__ import annotations

import runpy
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


def test_every_line_is_of_one_kind() -> None:
    found = HOUSE["count"](FILE)
    assert (found.lines, found.docstrings, found.comments, found.blank) == (24, 5, 1, 8)
    assert found.code == 24 - 5 - 1 - 8
    assert found.functions == [2, 3, 2, 1]
    assert (found.public, found.documented) == (3, 2)  # Shown, said; unsaid has none
    assert found.skips == 0


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
    found = HOUSE["count"](PACKED)
    assert (found.lines, found.code, found.skips) == (10, 7, 1)
    assert found.tokens == HOUSE["count"](PACKED.replace("  # fmt: skip", "")).tokens
    assert (found.errors, found.keys) == (1, 1)


RULES = """\
TABLE = \"\"\"
a & b   |
    | c | so that it is one rule
d>1     | e
\"\"\"
SENTENCES = \"\"\"
No rule.
\"\"\"
"""


def test_a_rule_of_a_table_is_an_error_that_a_user_may_meet() -> None:
    assert HOUSE["count"](RULES).errors == 2


def test_a_number_above_its_limit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    table = HOUSE["rows"]({"parallel/a.py": FILE, "config/b.py": PACKED, "cli/c.js": "x\n\ny\n"})
    found = HOUSE["measured"](table, 3)
    assert (found["core"], found["outer"], found["whole"]) == (10, 7 + 2, 19)
    assert (found["longest_file"], found["long_files"], found["keys"]) == (24, 0, 1)
    assert HOUSE["check_limits"](table, 3, found) == 0
    assert capsys.readouterr().err == ""
    assert HOUSE["check_limits"](table, 3, found | {"core": 9}) == 1
    said = capsys.readouterr()
    assert "core 10 of 9 TOO MANY" in said.out and said.err.startswith("core: take something out")
    assert HOUSE["check_limits"](table, 4, found) == 1
    assert "private 4 of 3 TOO MANY" in capsys.readouterr().out


def test_files_are_long_from_451_lines() -> None:
    files = {f"cli/{n}.js": "x\n" * n for n in (449, 450, 451, 500)}
    found = HOUSE["measured"](HOUSE["rows"](files | {"config/a.py": "x = 1\n"}), 0)
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
    uses = HOUSE["private_uses"]([PRODUCT], {"tests/t.py": TEST, "tests/t.json": "{"})
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
    table = HOUSE["rows"](dict.fromkeys(paths, FILE))
    assert [(name, c.lines) for name, c in table] == [
        ("parallel", 24), ("= core", 24),
        ("CPU backend", 24), ("server", 24), ("= satellites", 48),
        ("top level", 24), ("= rest", 24),
        ("= whole", 96),
    ]  # fmt: skip
    assert table[-1][1].cells()[7] == "24/24/24"
    lines = HOUSE["markdown"](table).splitlines()
    assert len(lines) == len(table) + 2 and len({line.count("|") for line in lines}) == 1


def test_a_revision_git_does_not_know_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert HOUSE["main"](["--rev", "no-such-revision"]) == 2
    assert "--rev no-such-revision: " in capsys.readouterr().err


def test_packages_short_of_docstrings_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    table = HOUSE["rows"]({"parallel/groups.py": FILE})
    assert HOUSE["check_docs"](table, 66) == 0 and not capsys.readouterr().err
    assert HOUSE["check_docs"](table, 67) == 1
    assert "parallel: 2 of 3 public definitions have docstrings" in capsys.readouterr().err
