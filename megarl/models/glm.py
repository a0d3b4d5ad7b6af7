"""What is GLM-4's own in a config.json: of each head only a part is rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models.rope_config import rope_settings


def rotary_dim(raw: Mapping[str, Any], head_dim: int, source: str) -> int:
    """How many numbers of a head are rotated. A factor among the rotary settings counts for more
    than one beside them, as in Hugging Face's configs."""
    settings = rope_settings(raw, source)
    factor = settings.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    dim = int(head_dim * factor) if isinstance(factor, int | float) else 0
    if dim % 2 or not 2 <= dim <= head_dim:
        raise ValueError(
            f"{source}: partial_rotary_factor={factor!r} of head_dim={head_dim} is not supported; "
            "supported: an even number of a head's numbers"
        )
    return dim
