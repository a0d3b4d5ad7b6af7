"""`import megarl`: the public names, lazily, as editors and docs/api.md know them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import megarl

ROOT = Path(__file__).resolve().parents[2]


def test_every_name_is_there_and_an_editor_finds_it() -> None:
    stub = ast.parse((ROOT / "megarl" / "__init__.pyi").read_text())
    modules: dict[str, str] = {}
    version, *imports = stub.body
    assert ast.unparse(version) == "__version__: str"
    for statement in imports:
        assert isinstance(statement, ast.ImportFrom)
        for alias in statement.names:
            assert alias.asname == alias.name  # a stub's other imports are its own
            modules[alias.name] = str(statement.module)
    assert sorted(modules) == megarl.__all__
    assert set(megarl.__all__) <= set(dir(megarl))
    for name, module in modules.items():
        scope: dict[str, object] = {}
        exec(f"from {module} import {name}", scope)
        assert getattr(megarl, name) is scope[name], name


def test_the_import_is_light_and_a_wrong_name_is_an_attribute_error() -> None:
    code = (
        "import sys, megarl; assert not {'torch', 'megatron', 'omegaconf'} & set(sys.modules)\n"
        "megarl.load_config; assert 'torch' not in sys.modules\n"
        "megarl.no_such_name"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("AttributeError: megarl") and "'no_such_name'" in last, done.stderr
    assert "docs/api.md" in last


def test_the_page_lists_every_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    lines = [line.split()[2:-1] for line in page.splitlines() if line.startswith("<!-- ::: ")]
    assert sorted(name for names in lines for name in names) == sorted(megarl.__all__)
    for name in megarl.__all__:
        assert re.search(rf"^\| `{name}` \| \w.+ \|$", page, re.MULTILINE), name
