"""Hides warnings of libraries that a user of megarl can do nothing about."""

from __future__ import annotations

import warnings

_LIBRARIES = ("megatron", "torchdata", r"torch\.distributed")


def quiet_libraries() -> None:
    """Hides UserWarning, FutureWarning and DeprecationWarning raised in those libraries' code.

    Entry points call it, never an import: in a user's own program warnings are the user's to set.
    """
    for library in _LIBRARIES:
        for kind in (UserWarning, FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=kind, module=library)
