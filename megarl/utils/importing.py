"""Objects that a configuration names by "package.module:name", and where they are looked for."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from typing import Any


def add_working_directory() -> None:
    """Lets modules of the working directory be imported, as `python -m` does, but behind all
    others. A process that is started later by multiprocessing gets the same path.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def load_object(target: str, *, what: str) -> Any:
    """The object. Raises ValueError, with `what` it was to be, for one that cannot be had: the
    message has one line, and of an error in the module itself its file and line.
    """
    module, colon, name = target.partition(":")
    if not colon or not name or not all(module.split(".")) or "/" in module:
        raise ValueError(f"{what} {target!r}: use 'package.module:name'")
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as e:
        raise ValueError(f"{what} {target!r} cannot be loaded: {_why(e, module)}") from e
    try:
        return getattr(found, name)
    except AttributeError as e:
        near = difflib.get_close_matches(name, vars(found), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{what} {target!r} cannot be loaded: {module} has no {name}{hint}") from e


def _why(error: BaseException, module: str) -> str:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, ModuleNotFoundError) and error.name and module.startswith(error.name):
        if module.endswith(".py"):
            return f"name the module without .py: {module.removesuffix('.py')}"
        return (
            f"there is no module {error.name}; it must be in the working directory "
            f"({os.getcwd()}), installed, or on PYTHONPATH"
        )
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    if isinstance(error, SyntaxError):
        return said
    own = [f for f in frames if f.filename != __file__]
    return f"{said} ({own[-1].filename}, line {own[-1].lineno})" if own else said
