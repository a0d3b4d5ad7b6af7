"""Loads objects that a configuration names by "package.module:name" or "path/to/file.py:name"."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def add_working_directory() -> None:
    """Lets modules of the working directory be imported, as `python -m` does, but behind all
    others. A process that is started later by multiprocessing gets the same path.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def is_import_path(name: str) -> bool:
    """Returns whether `name` has the form module:name, rather than being a registered name."""
    return ":" in name


def load_object(target: str, *, what: str) -> Any:
    """Returns the object. Raises ValueError, with `what` it was to be, where it cannot be loaded:
    the message has one line, and for an error in the module itself its file and line.
    """
    module, colon, name = target.partition(":")
    if not colon or not name:
        raise ValueError(f"{what} {target!r}: use 'package.module:name' or 'path/file.py:name'")
    if module.endswith(".py"):
        module = _module_of_file(Path(module), f"{what} {target!r}")
    elif not all(module.split(".")) or "/" in module:
        raise ValueError(f"{what} {target!r}: use 'package.module:name' or 'path/file.py:name'")
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as e:
        raise ValueError(f"{what} {target!r} cannot be loaded: {_why_not(e, module)}") from e
    try:
        return getattr(found, name)
    except AttributeError as e:
        near = difflib.get_close_matches(name, vars(found), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{what} {target!r} cannot be loaded: {module} has no {name}{hint}") from e


def _module_of_file(file: Path, shown: str) -> str:
    """Makes the file importable by its name, also in processes that are started later: objects of
    its module travel between processes by that name."""
    if not file.is_file():
        raise ValueError(f"{shown}: there is no file {file} in {os.getcwd()}")
    if not file.stem.isidentifier():
        raise ValueError(f"{shown}: {file.stem!r} is no name of a module; rename the file")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(file.stem)
    except ValueError:  # a module that was made without a spec
        spec = None
    origin = spec.origin if spec is not None else None
    if origin is None or Path(origin).resolve() != file.resolve():
        raise ValueError(
            f"{shown}: the name {file.stem} already means {origin or 'another module'}; rename "
            "the file"
        )
    return file.stem


def _why_not(error: BaseException, module: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and module.startswith(error.name):
        return (
            f"there is no module {error.name}; it must be in the working directory "
            f"({os.getcwd()}), installed, or on PYTHONPATH"
        )
    return in_one_line(error)


def in_one_line(error: BaseException) -> str:
    """Returns an error of a user's code as one line: its type, its message, and the file and line
    that raised it, which a SyntaxError's message has."""
    message = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
    if isinstance(error, SyntaxError) or not own:
        return message
    return f"{message} ({own[-1].filename}, line {own[-1].lineno})"
