"""Optional packages: the extras of pyproject.toml, and the commands that install them."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from typing import Any

DISTRIBUTION = "megarl-trainer"  # PyPI's megarl is another project


def install_hint(extra: str) -> str:
    """Returns the command that installs `extra`: from the clone that megarl is imported from, or
    for an installed wheel."""
    clone = Path(__file__).resolve().parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def require(module: str, *, extra: str, user: str) -> Any:
    """Returns the imported module.

    user: noun phrase; the feature that needs the module, as an error names it.
    Raises ValueError with the command that installs `extra` if a package is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise ValueError(
            f"{user} needs the package {e.name}, which is not installed: {install_hint(extra)}"
        ) from e
