"""Every fault of tests/mutants still has its line, and its tests are there."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.mutants import PACKAGE, ROOT, Mutant
from tests.mutants.table import MUTANTS


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file}: {m.old}")
def test_the_line_is_there_once_and_so_are_its_tests(mutant: Mutant) -> None:
    path = ROOT / PACKAGE / mutant.file
    assert path.exists(), "the room is gone: move the fault to the one that does its work"
    changed = mutant.applied(path.read_text())
    assert changed is not None, "the line is not there once: move the fault on"
    ast.parse(changed)
    assert mutant.tests, "no test catches it"
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in names_in(file), test


def test_a_fault_keeps_what_stands_around_it() -> None:
    mutant = Mutant("a.py", "x = 1", "x = 2", ())
    assert mutant.applied("if y:\n    x = 1\n    x = 10\n") == "if y:\n    x = 2\n    x = 10\n"
    assert mutant.applied("x = 10\n") is None
    assert mutant.applied("x = 1\nx = 1\n") is None
