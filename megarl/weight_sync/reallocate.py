"""Moves weights from one Megatron layout into another, from rank to rank: no HF names, no disk.

megatron-core has a resharding of its own (megatron.core.resharding, from 0.16 on). It is not used
here: it needs vocabularies padded alike in both layouts (they are padded to a multiple of tp), its
plan takes a collective over both models, and it posts all messages of the model at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.piece_table import PieceTable
from megarl.weight_sync.reallocation_plan import Side, Transfer, plan_rounds, plan_transfers

BUCKET_BYTES = 512 << 20


class Reallocator:
    """Plans once, moves as often as asked; every rank of `group` constructs it alike.

    source_ranks, target_ranks: ranks of `group` (None: the default group) that the layouts' ranks
    0, 1, ... are; by default the same. dtype: of the messages (buffers travel in fp32); both sides
    cast. device: where messages live, that of the parameters and of the backend.

    Memory: messages of at most `bucket_bytes` per rank (or one transfer, where that is larger), and
    a copy of one transfer that stays on its rank. Raises ValueError where ranks are missing, or the
    ranks' arguments differ.
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
        node_size: int = 8,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes}: use at least 1")
        self._from = _ranks("source_ranks", source_ranks, source)
        self._to = _ranks("target_ranks", target_ranks, target)
        self._source, self._target = source, target
        self.rank, self.dtype, self.group, self.device = rank, dtype, group, torch.device(device)
        cuts = [(t.layout, t.padded_vocab_size, len(t.tensors)) for t in (source, target)]
        key = repr((source.model, cuts, self._from, self._to, dtype))
        self._check_alike(zlib.crc32(f"{key}{bucket_bytes} {node_size}".encode()))
        plan = list(plan_transfers(source, target, self._from, self._to, node_size=node_size))
        dtypes = [self._dtype(t) for t in plan]
        rounds = plan_rounds(plan, [d.itemsize for d in dtypes], bucket_bytes)
        mine = ([t for t in plan[r.start : r.stop] if rank in _ends(t)] for r in rounds)
        self._rounds = [r for r in mine if r]

    def _check_alike(self, digest: int) -> None:
        """Raises ValueError where the ranks' plans differ. Collective over `group`, which for NCCL
        has to come before messages of some of it."""
        extremes = torch.tensor([digest, -digest], dtype=torch.int64, device=self.device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.group)
        if extremes[0] != -extremes[1]:
            raise ValueError(
                "the ranks of a reallocation do not agree: give all of them the same model, "
                "layouts, ranks, dtype, bucket_bytes and node_size"
            )

    def _dtype(self, t: Transfer) -> torch.dtype:
        return torch.float32 if t.target.param in self._target.buffers else self.dtype

    @torch.no_grad()
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

        Returns this rank's bytes "sent" and "kept", and the largest round's "peak". The group's
        timeout bounds every wait. Raises ValueError where `source` or `target` is given on the
        wrong ranks.
        """
        for name, given, ranks in (("source", source, self._from), ("target", target, self._to)):
            if (given is not None) != (self.rank in ranks):
                raise ValueError(
                    f"rank {self.rank}: give `{name}` on ranks {list(ranks)} and None elsewhere"
                )
        stats = {"sent": 0.0, "kept": 0.0, "peak": 0.0}
        for transfers in self._rounds:
            self._round(transfers, source or {}, target or {}, keep, stats)
        if target is not None:
            coords = self._target.layout.coords(self._to.index(self.rank))
            for name, local in self._target.local_params(coords).items():
                target[name].detach()[slice(*local.padding)].zero_()
        return stats

    def _round(
        self,
        transfers: Sequence[Transfer],
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        keep: float,
        stats: dict[str, float],
    ) -> None:
        by_peer = sorted(transfers, key=_ends)  # stable: both ends see the same order
        messages: list[tuple[tuple[int, int], list[Transfer], Tensor]] = []
        for ends, members in groupby(by_peer, key=_ends):
            if ends == (self.rank, self.rank):
                for t in members:
                    own = self._pack([t], source)
                    stats["kept"] += own.numel()
                    self._unpack([t], own, target, keep)
                continue
            parts = list(members)
            outgoing = ends[0] == self.rank
            message = self._pack(parts, source) if outgoing else self._empty(parts)
            stats["sent"] += message.numel() * outgoing
            messages.append((ends, parts, message))
        stats["peak"] = max(stats["peak"], sum(m.numel() for _, _, m in messages))
        self._exchange((ends, message) for ends, _, message in messages)
        for ends, parts, message in messages:
            if ends[1] == self.rank:
                self._unpack(parts, message, target, keep)

    def _exchange(self, messages: Iterable[tuple[tuple[int, int], Tensor]]) -> None:
        ops = []
        for (sender, receiver), message in messages:
            outgoing = sender == self.rank
            peer = receiver if outgoing else sender
            call = dist.isend if outgoing else dist.irecv
            ops.append(dist.P2POp(call, message, group=self.group, group_peer=peer))
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()

    def _empty(self, transfers: Sequence[Transfer]) -> Tensor:
        *_, (_, _, end) = self._slots(transfers)
        return torch.empty(end, dtype=torch.uint8, device=self.device)

    def _slots(self, transfers: Sequence[Transfer]) -> list[tuple[Transfer, int, int]]:
        """Returns where each transfer stands in its message, in bytes, aligned to its items."""
        slots, end = [], 0
        for t in transfers:
            itemsize = self._dtype(t).itemsize
            start = -(-end // itemsize) * itemsize
            end = start + t.numel * itemsize
            slots.append((t, start, end))
        return slots

    def _pack(self, transfers: Sequence[Transfer], params: Mapping[str, Tensor]) -> Tensor:
        message = self._empty(transfers)
        for t, start, stop in self._slots(transfers):
            copy_views(params, t.source, message[start:stop].view(self._dtype(t)), out=True)
        return message

    def _unpack(
        self,
        transfers: Sequence[Transfer],
        message: Tensor,
        params: Mapping[str, Tensor],
        keep: float,
    ) -> None:
        for t, start, stop in self._slots(transfers):
            flat = message[start:stop].view(self._dtype(t))
            copy_views(params, t.target, flat, out=False, keep=keep)


def _ends(t: Transfer) -> tuple[int, int]:
    return t.source.rank, t.target.rank


def copy_views(
    params: Mapping[str, Tensor], side: Side, flat: Tensor, *, out: bool, keep: float = 0.0
) -> None:
    """Copies the numbers of a side into `flat` (out), or from it, and casts where the dtypes
    differ; from it, the side keeps the share `keep` of its own. Raises AssertionError unless `flat`
    has exactly as many numbers."""
    param = params[side.param].detach()
    assert param.is_contiguous(), f"{side.param}: parameters are contiguous"
    end = 0
    for v in side.views:
        local = param.as_strided(v.shape, v.strides, param.storage_offset() + v.offset)
        there = flat[end : end + local.numel()].view(v.shape)
        end += local.numel()
        if out:
            there.copy_(local)
        elif keep:
            local.lerp_(there.to(local), 1.0 - keep)
        else:
            local.copy_(there)
    assert end == flat.numel(), f"{side}: {end} of {flat.numel()} numbers"


def _ranks(name: str, ranks: Sequence[int] | None, table: PieceTable) -> tuple[int, ...]:
    size = table.layout.world_size
    found = tuple(range(size)) if ranks is None else tuple(ranks)
    if len(found) != size or len(set(found)) != size:
        raise ValueError(f"{name}={list(found)}: name each of the layout's {size} ranks once")
    return found
