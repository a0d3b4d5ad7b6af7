"""Has servers record what their loaders do with the HF tensors, and takes their tables."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence

import torch

from megarl.models.ops import Shape
from megarl.models.piece_table import PieceTable
from megarl.weight_sync.servers import Deadline
from megarl.weight_sync.slices.link import Link

PackedTables = list[tuple[str, list[bytes]]]  # by server, and its ranks
Spec = Sequence[tuple[str, Shape, str]]  # (name, shape, dtype) of each HF tensor, as it is sent


def spec_of(table: PieceTable, dtype_of: Callable[[str], torch.dtype]) -> Spec:
    """Returns the spec of a table's HF tensors. dtype_of: that a tensor is sent in, by name."""
    return [(t.name, t.shape, str(dtype_of(t.name)).removeprefix("torch.")) for t in table.tensors]


def record(link: Link, spec: Spec, deadline: Deadline) -> PackedTables:
    """Returns the tables of all ranks, packed; a server that still has them answers at once. On the
    rank that speaks, in an update session, which undoes what is packed in place. Raises as
    `Link.call` does."""
    link.box.put("spec/spec", zlib.compress(json.dumps(spec).encode()))
    replies = link.call("record", deadline, spec="spec")
    kept: dict[bytes, bytes] = {}  # equal tables become one object, which is pickled once

    def take(at: str) -> bytes:
        raw = link.box.take(f"table/{at}")
        return kept.setdefault(raw, raw)

    return [(server, [take(reply["at"]) for reply in ranks]) for server, ranks in replies.items()]
