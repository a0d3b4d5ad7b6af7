"""Degrees of parallelism of one engine. dp is derived: world_size / (tp * pp * cp)."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.base import arg


@dataclass(kw_only=True)
class ParallelConfig:
    tp: int = arg(1, help="tensor-parallel degree")
    pp: int = arg(1, help="pipeline-parallel degree")
    vpp: int = arg(1, help="virtual (interleaved) pipeline chunks per stage; 1 is plain 1F1B")
    cp: int = arg(1, help="context-parallel degree")
    ep: int = arg(1, help="expert-parallel degree (MoE)")
    etp: int = arg(1, help="tensor-parallel degree inside an expert (MoE)")
    sequence_parallel: bool = arg(
        False, help="shard activations of norms and residuals over tp (needs tp > 1)"
    )
