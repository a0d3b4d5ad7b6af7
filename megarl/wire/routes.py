"""Spells the experts that a server's routers chose, as SGLang's meta_info["routed_experts"] has
them: base64 of int32 [n,L,k], positions `routed_experts_start_len` to the last but one.

L layers of the model, numbered as in its checkpoint and with 0 in dense ones, k experts per token.
The last token has no routes yet: no pass has read it.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

import torch
from torch import Tensor

UNKNOWN = -1


@dataclass(frozen=True, kw_only=True)
class RouteShape:
    """Says which routes a model has: `top_k` of `experts` in each of `layers`."""

    layers: int
    experts: int
    top_k: int

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the smallest integers that hold an expert's number, and UNKNOWN."""
        bounds = {torch.int8: 1 << 7, torch.int16: 1 << 15, torch.int32: 1 << 31}
        return next(dtype for dtype, bound in bounds.items() if self.experts <= bound)

    def unknown(self, n: int) -> Tensor:
        """Returns the routes [n,L,k] of n tokens of which nothing is known."""
        return torch.full((n, self.layers, self.top_k), UNKNOWN, dtype=self.dtype)


def encode(routes: Tensor) -> str:
    """Returns the text of routes [n,L,k]."""
    return base64.b64encode(routes.to(torch.int32).contiguous().numpy().tobytes()).decode()


def decode(text: object, shape: RouteShape) -> Tensor:
    """Returns the routes [n,L,k] of a text, in `shape.dtype`. Raises ValueError for what is none,
    or is of a model with other layers or experts."""
    each = 4 * shape.layers * shape.top_k
    try:
        raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b"?"
    except ValueError:
        raw = b"?"
    if len(raw) % each:
        raise ValueError(
            f"routed_experts are not the base64 of int32 numbers, {shape.top_k} in each of "
            f"{shape.layers} layers; does the server run the model that is trained?"
        )
    flat = torch.frombuffer(bytearray(raw), dtype=torch.int32) if raw else torch.empty(0)
    if len(flat) and not (int(flat.min()) >= 0 and int(flat.max()) < shape.experts):
        raise ValueError(
            f"routed_experts names the experts {int(flat.min())} to {int(flat.max())} of a model "
            f"that has {shape.experts}"
        )
    return flat.view(-1, shape.layers, shape.top_k).to(shape.dtype)
