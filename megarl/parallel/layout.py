"""Layout: rank arithmetic as plain data, no process group needed.

The order is megatron-core's default, "tp-cp-ep-dp-pp" (parallel_state.RankGenerator):
dense weights:  rank = tp + TP * (cp + CP * (dp + DP * pp))
expert weights: rank = etp + ETP * (ep + EP * (edp + EDP * pp))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megarl.config.check_parallel import check_parallel
from megarl.config.parallel import ParallelConfig


@dataclass(frozen=True, order=True)
class Coords:
    """Where a rank stands. `dp`, `cp` for dense weights, `ep`, `etp`, `edp` for experts."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int


@dataclass(frozen=True)
class Layout:
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
        """Derives dp. Raises ValueError naming the degrees that do not fit `world_size`."""
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

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        return self.world_size // (self.etp * self.ep * self.pp)

    def coords(self, rank: int) -> Coords:
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
        return tuple(self.coords(r) for r in range(self.world_size))

    def dense_rank(self, *, pp: int, tp: int, dp: int = 0, cp: int = 0) -> int:
        """The rank that holds dense weights at (pp, tp), of data-parallel replica (dp, cp)."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def expert_rank(self, *, pp: int, ep: int, etp: int, edp: int = 0) -> int:
        """The rank that holds experts at (pp, ep, etp), of data-parallel replica edp."""
        return etp + self.etp * (ep + self.ep * (edp + self.edp * pp))

    def layers(self, num_layers: int, pp: int, vpp: int = 0) -> range:
        """Global layer numbers of chunk (pp, vpp). Raises ValueError if they do not fit."""
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
