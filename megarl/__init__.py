"""megarl: reinforcement learning of language models, by megatron-core and SGLang.

Everything that a script needs, by its public name:

    from megarl import MegatronActor, RemoteSGLangEngine, load_expr_config, stats_tracker

A name loads its module on first use, so that `import megarl` is instant. `__init__.pyi`, the stub
that editors and type checkers read, lists the names with their modules; docs/api.md explains them.
"""

from __future__ import annotations

import ast
import io
import sys
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    alias.name: str(statement.module)
    for statement in _STUB.body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}
__all__ = sorted(_MODULES)

# A run must not fail because its terminal cannot show a character of an answer or a table.
for _stream in (sys.stdout, sys.stderr):
    if isinstance(_stream, io.TextIOWrapper) and _stream.errors in ("strict", "surrogateescape"):
        _stream.reconfigure(errors="replace")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        from megarl.config.foreign_names import no_attribute  # here: import megarl is instant

        raise no_attribute("megarl", ("megarl",), name)
    module = __import__(_MODULES[name], fromlist=[name])
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
