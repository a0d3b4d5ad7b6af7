"""Says why weights cannot be sent by slices, so that whole tensors are sent instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.api.records import WeightUpdateMeta
from megarl.weight_sync.servers import ServerInfo
from megarl.weight_sync.slices import LOADER

_SHOWN = 3  # parameters of a server rank


def of_meta(meta: WeightUpdateMeta, backend: str) -> str:
    """Returns why an update is not sent by slices whatever the servers are, "" where it may be."""
    if backend == "nccl" and meta.sharded == "auto":
        return "slices have not been measured over NCCL yet; sharded=true sends them"
    if meta.bucket_bytes < 1:
        return f"bucket_bytes={meta.bucket_bytes}: use at least 1"
    return ""


def of_servers(info: Mapping[str, ServerInfo]) -> str:
    """Returns which servers cannot receive slices, and why, "" where all can."""
    return "; ".join(f"server {s} {why}" for s, i in info.items() if (why := of_server(i)))


def of_server(info: ServerInfo) -> str:
    """Returns why a server cannot receive slices, or say what it holds of them, "" where it can."""
    if info.applies_delta:
        return "is megarl's own, which keeps whole tensors"
    if LOADER not in info.loaders:
        return f"was not started with --custom-weight-loader {LOADER}"
    if info.replicas > 1 or info.stages > 1:
        return f"runs with dp_size={info.replicas}, pp_size={info.stages}"
    if info.moves_experts:
        return "moves experts while it runs (enable_eplb)"
    if info.drafts:
        return f"has a draft model (speculative_algorithm={info.drafts}), which loads by itself"
    if info.shares_weights:
        return "shares its weights with others (weight_cache_mode)"
    return ""


def of_tables(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns what the servers' loaders do that slices cannot repeat, "" where there is nothing.
    tables: by server and rank, as `megarl_receiver` records them."""
    return "; ".join(
        f"server {server}, rank {rank}, {why}"
        for server, ranks in tables.items()
        for rank, table in enumerate(ranks)
        if (why := _of_table(table))
    )


def _of_table(table: Mapping[str, Any]) -> str:
    """Names parameters that are not filled by copies of HF elements, each exactly once."""
    kinds = {
        "computes instead of copying": table["computed"],
        "writes twice": table["twice"],
        "fills from no HF tensor": table["unfilled"],
    }
    return ", ".join(
        f"{kind}: {', '.join(list(found)[:_SHOWN])}"
        + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
        for kind, found in kinds.items()
        if found
    )
