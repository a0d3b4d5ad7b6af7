"""Moves weights from one Megatron layout into another, from rank to rank: no HF names, no disk.

megatron-core has a resharding of its own (megatron.core.resharding, from 0.16 on). It is not used
here: it needs vocabularies padded alike in both layouts (they are padded to a multiple of tp), its
plan takes a collective over both models, and it posts all messages of the model at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.piece_table import PieceTable
from megarl.parallel.ranks import Ranks
from megarl.transfer.gather import export_dtype
from megarl.transfer.geometry import Sources, layout_targets
from megarl.transfer.moves import Mover
from megarl.transfer.plan import Receiver, TransferPlan, nearest, plan_together, plan_transfer

BUCKET_BYTES = 512 << 20
NODE = 8  # ranks that follow each other on one host


def plan_reallocation(
    source: PieceTable,
    target: PieceTable,
    source_ranks: Sequence[int],
    target_ranks: Sequence[int],
    *,
    dtype: torch.dtype,
    bucket_bytes: int = BUCKET_BYTES,
) -> TransferPlan:
    """Plans the way from one layout into another of the same model, padding aside.

    source_ranks, target_ranks: the ranks of a group that the layouts' ranks 0, 1, ... are. A rank
    takes from itself what it has, else from a rank of its node (NODE ranks) where there is one.
    dtype: of the messages; buffers travel in fp32. Raises ValueError where the source does not have
    what the target keeps.
    """
    near, own = nearest([r // NODE for r in source_ranks]), nearest(source_ranks)

    def prefer(to: Receiver, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return own(to.rank, near(to.rank // NODE, ranks))

    return plan_transfer(
        Sources(source),
        {Receiver(0, r): t for r, t in zip(target_ranks, layout_targets(target), strict=True)},
        dtypes={t.name: export_dtype(t, dtype) for t in source.tensors},
        round_bytes=max(1, bucket_bytes // 2),  # a rank may send as much as it receives
        prefer=prefer,
    )


class Reallocator:
    """Plans once, moves as often as asked; every rank of `group` constructs it alike.

    source_ranks, target_ranks: ranks of `group` (None: the default group) that the layouts' ranks
    0, 1, ... are; by default the same. dtype: of the messages (buffers travel in fp32); both sides
    cast. device: where messages live, that of the parameters and of the backend.

    Memory: messages of at most `bucket_bytes` per rank, and a copy of one slice that stays on its
    rank. Raises ValueError where ranks are missing, or the ranks' plans differ; what fails on one
    rank alone is an OtherRankFailed on the others.
    """

    def __init__(
        self,
        source: PieceTable,
        target: PieceTable,
        rank: int,
        *,
        dtype: torch.dtype,
        source_ranks: Sequence[int] | None = None,
        target_ranks: Sequence[int] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._target, self.rank, self.group, self.device = target, rank, group, torch.device(device)

        def plan() -> TransferPlan:
            if bucket_bytes < 1:
                raise ValueError(f"bucket_bytes={bucket_bytes}: use at least 1")
            self._from = _ranks("source_ranks", source_ranks, source)
            self._to = _ranks("target_ranks", target_ranks, target)
            return plan_reallocation(
                source, target, self._from, self._to, dtype=dtype, bucket_bytes=bucket_bytes
            )

        self._plan = plan_together("planning a reallocation", plan, Ranks.of(group))
        self._steps = self._plan.steps(rank, self._from, 2 * self._plan.round_bytes)

    def __call__(
        self,
        source: Mapping[str, Tensor] | None,
        target: Mapping[str, Tensor] | None,
        *,
        keep: float = 0.0,
    ) -> dict[str, float]:
        """Copies `source` (canonical name -> local parameter; None where this rank is not in that
        layout) into `target`, whose padding rows become zero; with `keep` into the mean of both, of
        which `target` has that share. Collective over both layouts' ranks.

        Returns this rank's bytes "sent" and "kept", and the largest step's "peak". The group's
        timeout bounds every wait. Raises ValueError where `source` or `target` is given on the
        wrong ranks.
        """
        for name, given, ranks in (("source", source, self._from), ("target", target, self._to)):
            if (given is not None) != (self.rank in ranks):
                raise ValueError(
                    f"rank {self.rank}: give `{name}` on ranks {list(ranks)} and None elsewhere"
                )
        dtypes = self._plan.dtypes
        move = Mover(dtypes, self._from, self.group, self.device)
        sent, kept, peak = 0, 0, 0
        for step in self._steps:
            outgoing, messages = move(step, source or {}, target or {}, keep=keep)
            sent, peak = sent + outgoing, max(peak, messages)
            kept += sum(s.numel * dtypes[s.tensor].itemsize for s, _ in step.stays)
        if target is not None:
            coords = self._target.layout.coords(self._to.index(self.rank))
            for name, local in self._target.local_params(coords).items():
                target[name].detach()[slice(*local.padding)].zero_()
        return {"sent": float(sent), "kept": float(kept), "peak": float(peak)}


def _ranks(name: str, ranks: Sequence[int] | None, table: PieceTable) -> tuple[int, ...]:
    size = table.layout.world_size
    named = tuple(range(size)) if ranks is None else tuple(ranks)
    if len(named) != size or len(set(named)) != size:
        raise ValueError(f"{name}={list(named)}: name each of the layout's {size} ranks once")
    return named
