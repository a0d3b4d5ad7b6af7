"""Orders HF tensors for sending, and says which go together. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

# SGLang's loader of latent attention (deepseek_weight_loader.py) makes one parameter of the two. It
# keeps the first until the second comes, and forgets it at the end of the request.
_FUSED = re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\.")


def load_unit(name: str) -> str:
    """Returns a name that HF tensors share which a server has to get in one request."""
    return _FUSED.sub(".", name)


def in_order(
    tensors: Iterable[T], name: Callable[[T], str], itemsize: Callable[[T], int]
) -> list[list[T]]:
    """Returns the tensors by load unit in the order they are sent: those of larger items first,
    else by the units' first members."""
    units: dict[str, list[T]] = {}
    for tensor in tensors:
        units.setdefault(load_unit(name(tensor)), []).append(tensor)
    return sorted(units.values(), key=lambda unit: -max(map(itemsize, unit)))
