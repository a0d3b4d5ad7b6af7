"""Configures the layout of one engine. dp is derived: world_size / (tp * pp * cp)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megarl.config.base import Choices


@dataclass(kw_only=True)
class ParallelConfig:
    """Gives the degrees of parallelism of one engine, which together are its layout."""

    tp: int = 1
    """tensor-parallel degree"""
    pp: int = 1
    """pipeline-parallel degree"""
    vpp: int = 1
    """virtual (interleaved) pipeline chunks per stage; 1 is plain 1F1B"""
    pipeline_split: list[int] | None = None
    """layers of every pipeline chunk in order, pp*vpp numbers; null splits evenly"""
    cp: int = 1
    """context-parallel degree: each rank holds 1/cp of every sequence"""
    cp_comm_type: Annotated[str, Choices("auto", "p2p", "all_gather", "a2a")] = "auto"
    """how keys and values reach the other context-parallel ranks; auto is p2p with Transformer
    Engine, all_gather with torch SDPA"""
    ep: int = 1
    """expert-parallel degree (MoE)"""
    etp: int = 1
    """tensor-parallel degree inside an expert (MoE)"""
    sequence_parallel: bool = False
    """shard activations of norms and residuals over tp (needs tp > 1)"""
