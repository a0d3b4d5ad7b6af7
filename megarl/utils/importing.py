"""Objects that a configuration names by "package.module:name"."""

from __future__ import annotations

import importlib
from typing import Any


def load_object(target: str, *, what: str) -> Any:
    """The object; ValueError, with `what` it was to be, for one that cannot be had."""
    module, colon, name = target.partition(":")
    if not colon:
        raise ValueError(f"{what} {target!r}: use 'package.module:name'")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"{what} {target!r} cannot be loaded: {e}") from e
