"""Has servers record what their loaders do with the HF tensors, and takes their tables."""

from __future__ import annotations

import json
import zlib

from megarl.models.gather import export_dtype
from megarl.utils.liveness import Deadline
from megarl.weight_sync.slices.link import Link
from megarl.weight_sync.slices.quantized import BlockFp8
from megarl.weight_sync.transports import WeightSource

PackedTables = list[tuple[str, list[bytes]]]  # by server, and its ranks


def record(
    link: Link, source: WeightSource, deadline: Deadline, fp8: BlockFp8 | None = None
) -> PackedTables:
    """Returns the tables of all ranks, packed; a server that still has them answers at once. On the
    rank that speaks, in an update session, which undoes what is packed in place. fp8: where linear
    maps are sent so. Raises as `Link.call` does."""
    tensors = (fp8.table if fp8 else source.table).tensors
    dtypes = {t.name: fp8.dtype(t.name) if fp8 else export_dtype(t, source.dtype) for t in tensors}
    spec = [(t.name, t.shape, str(dtypes[t.name]).removeprefix("torch.")) for t in tensors]
    link.box.put("spec/spec", zlib.compress(json.dumps(spec).encode()))
    replies = link.call("record", deadline, spec="spec")
    kept: dict[bytes, bytes] = {}  # equal tables become one object, which is pickled once

    def take(at: str) -> bytes:
        raw = link.box.take(f"table/{at}")
        return kept.setdefault(raw, raw)

    return [(server, [take(reply["at"]) for reply in ranks]) for server, ranks in replies.items()]
