"""Configures the layout of one engine. dp is derived: world_size / (tp * pp * cp)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from megarl.config.base import POSITIVE, Choices

Degree = Annotated[int, POSITIVE]


@dataclass(kw_only=True)
class ParallelConfig:
    """Gives the degrees of parallelism of one engine, which together are its layout."""

    tp: Degree = 1
    """tensor-parallel degree"""
    pp: Degree = 1
    """pipeline-parallel degree"""
    vpp: Degree = 1
    """virtual (interleaved) pipeline chunks per stage; 1 is plain 1F1B"""
    pipeline_split: list[Annotated[int, POSITIVE]] | None = None
    """layers of every pipeline chunk in order, pp*vpp numbers; null splits evenly"""
    cp: Degree = 1
    """context-parallel degree: each rank holds 1/cp of every sequence"""
    cp_comm_type: Annotated[str, Choices("auto", "p2p", "all_gather", "a2a")] = "auto"
    """how keys and values reach the other context-parallel ranks; auto is p2p with Transformer
    Engine, all_gather with torch SDPA"""
    ep: Degree = 1
    """expert-parallel degree (MoE)"""
    etp: Degree = 1
    """tensor-parallel degree inside an expert (MoE)"""
    sequence_parallel: bool = False
    """shard activations of norms and residuals over tp (needs tp > 1)"""

    @property
    def dense_ranks(self) -> int:
        """The ranks that hold one copy of the dense weights, times cp: dp divides the rest."""
        return self.tp * self.pp * self.cp

    @property
    def expert_ranks(self) -> int:
        """The ranks that hold one copy of the experts."""
        return self.etp * self.ep * self.pp
