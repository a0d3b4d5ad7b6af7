"""Reads from the body of a weight update which tensors follow it, and receives them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl.server.protocol import ControlError
from megarl.server.weights import Spec
from megarl.wire import delta

_DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn")
}


@dataclass(frozen=True)
class TensorList:
    """Lists the tensors that a broadcast brings, in order, with shape and dtype."""

    specs: dict[str, Spec]

    @classmethod
    def parse(cls, body: dict[str, Any]) -> TensorList:
        """Reads `names`, `dtypes` ("float32") and `shapes` of a body. Raises ControlError, naming
        the field that is wrong."""
        lists: dict[str, Any] = {}
        for key in ("names", "dtypes", "shapes"):
            lists[key] = body.get(key)
            if not isinstance(lists[key], list):
                raise ControlError(f"{key} must be a list")
        names, dtypes, shapes = lists["names"], lists["dtypes"], lists["shapes"]
        if not len(names) == len(dtypes) == len(shapes):
            raise ControlError(
                f"names ({len(names)}), dtypes ({len(dtypes)}) and shapes ({len(shapes)}) "
                "differ in length"
            )
        specs: dict[str, Spec] = {}
        for name, dtype, shape in zip(names, dtypes, shapes):
            kind = _DTYPES.get(str(dtype).removeprefix("torch."))
            if not isinstance(name, str):
                raise ControlError(f"names holds {name!r}, which is no name")
            if kind is None:
                raise ControlError(f"{name}: dtype {dtype!r}, use one of {sorted(_DTYPES)}")
            if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
                raise ControlError(f"{name}: shape {shape!r} is not a list of sizes")
            if name in specs:
                raise ControlError(f"{name}: named twice")
            specs[name] = (tuple(shape), kind)
        return cls(specs)

    @property
    def sizes(self) -> list[int]:
        """Returns the bytes of each tensor."""
        return [math.prod(s) * d.itemsize for s, d in self.specs.values()]

    def receive_flat(self, group: dist.ProcessGroup, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Receives the bytes of all tensors as one broadcast into `flat` uint8; returns views of
        it. Raises ControlError where a tensor would not be aligned."""
        dist.broadcast(flat, src=0, group=group)
        out, offset = {}, 0
        for (name, (shape, dtype)), size in zip(self.specs.items(), self.sizes):
            if offset % dtype.itemsize:
                raise ControlError(
                    f"{name}: offset {offset} in the flattened bucket is no multiple of the "
                    f"itemsize of {dtype}; sort the tensors by itemsize, largest first"
                )
            out[name] = flat[offset : offset + size].view(dtype).view(shape)
            offset += size
        return out


@dataclass(frozen=True)
class Changes:
    """Describes a bucket that brings only the numbers that changed since the update `base`;
    megarl/wire/delta.py has the format."""

    base: str
    chunks: tuple[delta.Chunk, ...]

    @classmethod
    def parse(cls, body: Any, tensors: TensorList) -> Changes:
        """Reads the `delta` of a body whose tensors are `tensors`. Raises ControlError where they
        do not fit together."""
        if not isinstance(body, dict) or not isinstance(body.get("base"), str):
            raise ControlError("load_format='delta' needs delta={'base': id, 'chunks': [...]}")
        try:
            return cls(body["base"], delta.parse(body.get("chunks"), sum(tensors.sizes)))
        except ValueError as e:
            raise ControlError(f"delta: {e}") from e
