"""Finds global names that a module's functions use and the module does not have."""

from __future__ import annotations

import builtins
import inspect
import symtable
from types import ModuleType


def missing(module: ModuleType) -> list[str]:
    table = symtable.symtable(inspect.getsource(module), module.__file__ or "?", "exec")
    used: set[str] = set()
    todo = table.get_children()  # what runs on import has run
    while todo:
        scope = todo.pop()
        todo += scope.get_children()
        symbols = scope.get_symbols()
        used |= {s.get_name() for s in symbols if s.is_global() and s.is_referenced()}
    return sorted(used - set(vars(module)) - set(vars(builtins)))
