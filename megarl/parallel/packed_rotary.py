"""Rotary embedding of packed tokens where it is not fused: by one index a micro-batch.

megarl knows the position of every packed token before a pass. megatron-core finds them again in
every layer, for queries and for keys, from lengths that it asks the device for: four waits a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_POSITIONS = "megarl_positions"  # attribute of a micro-batch's cu_seqlens


def place_tokens(cu_seqlens: Tensor, positions: Tensor | None) -> None:
    """Says at which positions, int64 [T] on the device, a rank's packed tokens stand; None where
    the angles that layers get are those of the tokens already, one by one. All layers of a
    micro-batch bring the same cu_seqlens."""
    setattr(cu_seqlens, _POSITIONS, positions)


def rotating(
    original: Callable[..., Tensor], plain: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Returns megatron-core's `_apply_rotary_pos_emb_thd` (the original) for tokens whose positions
    are known, which asks the device for nothing. plain: `_apply_rotary_pos_emb_bshd`."""

    def rotate(
        t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *args: Any, cp_group: Any = None, **kw: Any
    ) -> Tensor:
        """Rotates t [T,n,d] by the angles freqs [longest,1,1,d], or [T,1,1,d]."""
        if not hasattr(cu_seqlens, _POSITIONS):
            return original(t, cu_seqlens, freqs, *args, cp_group=cp_group, **kw)
        positions = getattr(cu_seqlens, _POSITIONS)
        angles = freqs if positions is None else torch.index_select(freqs, 0, positions)
        return plain(t.unsqueeze(1), angles, *args, **kw).squeeze(1)

    return rotate
