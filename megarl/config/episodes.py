"""Configures the record of episodes, which `megarl view` shows."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.base import arg
from megarl.config.bounds import OFF_AT_ZERO


@dataclass(kw_only=True)
class EpisodesConfig:
    """Says which episodes of training are kept in <run>/episodes."""

    keep: int | None = arg(
        16,
        bounds=OFF_AT_ZERO,
        help="record the first n groups of every step, token by token, and as many that were "
        "rejected because something failed; 0 is off, null all",
    )
