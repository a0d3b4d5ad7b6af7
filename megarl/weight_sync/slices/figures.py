"""Says what a sync by slices has sent, and the memory it took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megarl.weight_sync.slices.messages import Group


def memory(groups: Sequence[Group], *, changes: bool) -> int:
    """Returns the bytes of two groups of messages, the largest that follow each other; with
    `changes` also of the largest message as it was and of what differs, but not of what is kept."""
    sizes = [sum(parts.nbytes for _, _, parts in group) for group in groups]
    two = max((a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True)), default=0)
    largest = max((parts.nbytes for group in groups for _, _, parts in group), default=0)
    return two + (2 * largest if changes else 0)


def metrics(
    ranks: Sequence[tuple[Counter[str], int]], received: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """Returns the metrics of a sync. ranks: what each trainer rank counted, and its memory;
    received: the replies of all server ranks.

    changed: the part of the numbers that differ from the version before, where versions were
    compared; then bytes_whole is what all of them would have been.
    """
    total = sum((counts for counts, _ in ranks), Counter[str]())
    found = {
        "bytes": float(total["bytes"]),
        "senders": float(sum(counts["bytes"] > 0 for counts, _ in ranks)),
        "peak_extra_bytes": float(max(extra for _, extra in ranks)),
        "slice_bytes": float(max(r["received"] for r in received)),
        "server_extra_bytes": float(max(r["peak"] for r in received)),
    }
    if total["compared"]:
        found["changed"] = total["changed"] / total["compared"]
        found["bytes_whole"] = float(total["whole"])
    return found
