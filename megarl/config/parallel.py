"""Configures the layout of one engine. dp is derived: world_size / (tp * pp * cp)."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.base import arg


@dataclass(kw_only=True)
class ParallelConfig:
    """Gives the degrees of parallelism of one engine, which together are its layout."""

    tp: int = arg(1, help="tensor-parallel degree")
    pp: int = arg(1, help="pipeline-parallel degree")
    vpp: int = arg(1, help="virtual (interleaved) pipeline chunks per stage; 1 is plain 1F1B")
    pipeline_split: list[int] | None = arg(
        None, help="layers of every pipeline chunk in order, pp*vpp numbers; null splits evenly"
    )
    cp: int = arg(1, help="context-parallel degree: each rank holds 1/cp of every sequence")
    cp_comm_type: str = arg(
        "auto",
        help="how keys and values reach the other context-parallel ranks; auto is p2p with "
        "Transformer Engine, all_gather with torch SDPA",
        choices=("auto", "p2p", "all_gather", "a2a"),
    )
    ep: int = arg(1, help="expert-parallel degree (MoE)")
    etp: int = arg(1, help="tensor-parallel degree inside an expert (MoE)")
    sequence_parallel: bool = arg(
        False, help="shard activations of norms and residuals over tp (needs tp > 1)"
    )
