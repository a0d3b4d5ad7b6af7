"""Moving weights from the trainer to the generation servers.

WeightSender loads on first use: generation servers need `process_group` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.weight_sync.sender import WeightSender

__all__ = ["WeightSender"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megarl.weight_sync import sender

    return getattr(sender, name)
