"""Has servers record what their loaders do with the HF tensors, and takes their tables."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

from megarl.models.gather import export_dtype
from megarl.models.ops import Shape
from megarl.utils.liveness import Deadline
from megarl.weight_sync.slices.link import Link
from megarl.weight_sync.transports import WeightSource

PackedTables = list[tuple[str, list[bytes]]]  # by server, and its ranks
Spec = Sequence[tuple[str, Shape, str]]  # (name, shape, dtype) of each HF tensor, as it is sent


def spec_of(source: WeightSource) -> Spec:
    """Returns the HF tensors as they are sent where nothing is made of them."""
    dtypes = {t.name: export_dtype(t, source.dtype) for t in source.table.tensors}
    return [
        (t.name, t.shape, str(dtypes[t.name]).removeprefix("torch.")) for t in source.table.tensors
    ]


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
