"""Has servers record what their loaders do with the HF tensors, and takes their tables."""

from __future__ import annotations

import json
import zlib

from megarl.models.gather import export_dtype
from megarl.utils.liveness import Deadline
from megarl.weight_sync.slices.link import Link
from megarl.weight_sync.transports import WeightSource

PackedTables = list[tuple[str, list[bytes]]]  # by server, and its ranks


def record(link: Link, source: WeightSource, deadline: Deadline) -> PackedTables:
    """Returns the tables of all ranks, packed; a server that still has them answers at once. On the
    rank that speaks, in an update session, which undoes what is packed in place. Raises as
    `Link.call` does."""
    dtypes = {t.name: export_dtype(t, source.dtype) for t in source.table.tensors}
    spec = [
        (t.name, t.shape, str(dtypes[t.name]).removeprefix("torch.")) for t in source.table.tensors
    ]
    link.box.put("spec/spec", zlib.compress(json.dumps(spec).encode()))
    replies = link.call("record", deadline, spec="spec")
    kept: dict[bytes, bytes] = {}  # equal tables become one object, which is pickled once

    def take(at: str) -> bytes:
        raw = link.box.take(f"table/{at}")
        return kept.setdefault(raw, raw)

    return [(server, [take(reply["at"]) for reply in ranks]) for server, ranks in replies.items()]
