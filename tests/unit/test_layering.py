"""Rules of the package that import-linter cannot state."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "megarl"
DOOR = "megarl.parallel.mcore"


def imports_in_order(tree: ast.Module) -> list[str]:
    """Modules imported anywhere in a file, by line."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.lineno, node.module))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return [name for _, name in sorted(found)]


def test_megatron_is_entered_through_its_door() -> None:
    """The CPU backend must be installed before any module of megatron is imported."""
    users = 0
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "parallel" / "mcore.py":
            continue
        names = imports_in_order(ast.parse(path.read_text()))
        first = next((i for i, n in enumerate(names) if n.split(".")[0] == "megatron"), None)
        if first is None or path == PACKAGE / "parallel" / "cpu_patches.py":
            continue
        users += 1
        assert DOOR in names[:first], f"{path} imports megatron before {DOOR}"
    assert users, "nothing imports megatron: this test looks in the wrong place"
