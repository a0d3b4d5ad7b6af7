"""Computes ranks from degrees and back: plain data, no process group needed.

The order is megatron-core's default, "tp-cp-ep-dp-pp" (parallel_state.RankGenerator):

    dense weights:  rank = tp + TP * (cp + CP * (dp + DP * pp))
    expert weights: rank = etp + ETP * (ep + EP * (edp + EDP * pp))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megarl.config.check_parts import check_parallel
from megarl.config.engine import ParallelConfig


@dataclass(frozen=True, order=True)
class Coords:
    """A rank's place: `tp`, `cp`, `dp` for dense weights, `ep`, `etp`, `edp` for experts, `pp`."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int


@dataclass(frozen=True)
class Layout:
    """The degrees of one engine, whose product of tp, cp, dp and pp is its number of ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    split: tuple[int, ...] | None = None  # layers of every chunk in their order; None is evenly

    @classmethod
    def from_config(cls, cfg: ParallelConfig, world_size: int) -> Layout:
        """Returns the layout of a configuration, with dp derived. Raises ValueError naming the
        degrees that do not fit `world_size`."""
        check_parallel(cfg, world_size)
        dense = cfg.tp * cfg.pp * cfg.cp
        return cls(
            tp=cfg.tp,
            pp=cfg.pp,
            dp=world_size // dense,
            cp=cfg.cp,
            vpp=cfg.vpp,
            ep=cfg.ep,
            etp=cfg.etp,
            sequence_parallel=cfg.sequence_parallel,
            split=tuple(cfg.pipeline_split) if cfg.pipeline_split else None,
        )

    @cached_property
    def world_size(self) -> int:
        """Returns the number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Returns how many replicas of the experts there are."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def coords(self, rank: int) -> Coords:
        """Returns where `rank` stands. Raises ValueError for a rank outside the layout."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a layout of {self.world_size} ranks")
        tp, rest = rank % self.tp, rank // self.tp
        cp, rest = rest % self.cp, rest // self.cp
        dp, pp = rest % self.dp, rest // self.dp
        etp, rest = rank % self.etp, rank // self.etp
        ep, rest = rest % self.ep, rest // self.ep
        return Coords(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, edp=rest % self.edp)

    @cached_property
    def all_coords(self) -> tuple[Coords, ...]:
        """Returns the coordinates of every rank, by rank."""
        return tuple(self.coords(r) for r in range(self.world_size))

    def dense_rank(self, *, pp: int, tp: int, dp: int = 0, cp: int = 0) -> int:
        """Returns the rank of the dense weights at (pp, tp), of replica (dp, cp)."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def expert_rank(self, *, pp: int, ep: int, etp: int, edp: int = 0) -> int:
        """Returns the rank of the experts at (pp, ep, etp), of replica edp."""
        return etp + self.etp * (ep + self.ep * (edp + self.edp * pp))

    def chunk_of(self, num_layers: int) -> dict[int, tuple[int, int]]:
        """Returns the chunk (pp, vpp) of each layer, by global number."""
        return {
            i: (pp, vpp)
            for pp in range(self.pp)
            for vpp in range(self.vpp)
            for i in self.layers(num_layers, pp, vpp)
        }

    def layers(self, num_layers: int, pp: int, vpp: int = 0) -> range:
        """Returns the global layer numbers of chunk (pp, vpp). Raises ValueError for a misfit."""
        chunks = self.pp * self.vpp
        split = self.split or (num_layers // chunks,) * chunks
        if sum(split) != num_layers or len(split) != chunks:
            raise ValueError(
                f"{num_layers} layers do not divide into pp*vpp = {self.pp}*{self.vpp} chunks"
                + (f" of {list(split)}" if self.split else "")
            )
        chunk = vpp * self.pp + pp
        start = sum(split[:chunk])
        return range(start, start + split[chunk])
