"""Moves weights from the trainer to the generation servers.

`WeightSender` does it, in one of the ways of `transports`; `Transport` is what a new way derives
from. Both load on first use, for what else is here needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.config.transports import Requirements
    from megarl.weight_sync.sender import WeightSender
    from megarl.weight_sync.transports import Transport, WeightSource

__all__ = ["Requirements", "Transport", "WeightSender", "WeightSource"]
_HOMES = {
    "Requirements": "megarl.config.transports",
    "Transport": "megarl.weight_sync.transports",
    "WeightSender": "megarl.weight_sync.sender",
    "WeightSource": "megarl.weight_sync.transports",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
