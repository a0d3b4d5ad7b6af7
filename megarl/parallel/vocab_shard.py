"""A vocabulary sharded over ranks: where a token's row is, and the k largest logits of all shards.

T tokens, c of them in a chunk, V vocabulary, v this rank's share of it (padding cut off), k of the
top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_CACHED = 1 << 17  # numbers that fit a CPU's cache
_LOW = (1 << 32) - 1


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """This rank's rows [start, start + rows) of a vocabulary whose `vocab_size` first are real."""

    start: int
    rows: int
    vocab_size: int
    group: dist.ProcessGroup | None = None

    @property
    def real_rows(self) -> int:
        """Returns how many of the shard's rows are real vocabulary, without padding."""
        return max(0, min(self.rows, self.vocab_size - self.start))

    def all_reduce(self, x: torch.Tensor, op: Any) -> torch.Tensor:
        """Reduces `x` over the shards in place and returns it; one shard sends nothing."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(x, op=op, group=self.group)
        return x


def rows_in_cache(x: torch.Tensor) -> int:
    """Returns how many rows of x [c,v] fit a CPU's cache, at least 1; on a GPU all of them."""
    return max(1, len(x) if x.is_cuda else _CACHED // max(1, x.shape[1]))


def local_target(labels: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this shard's row of every label (else 0), and whether it is here, both as
    labels, any shape."""
    row = labels - shard.start
    here = (row >= 0) & (row < shard.real_rows)
    return row.masked_fill(~here, 0), here


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Maps a float's int32 bits to an int32 of the same order, and back: negatives are mirrored."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


def top_k(logits: torch.Tensor, shard: VocabShard, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k largest of all shards' [c,v] logits, in fp32, and their ids, both [c,k]:
    largest first, of equal ones the lowest id first. One collective, of 8 * k bytes per token and
    shard.

    torch.topk leaves the order of equals open. So it is given integers that differ: the logit's
    bits above, the id's complement below. They also carry both through the collective. They are
    made for an eighth of the chunk at a time, since they take several times the logits' memory.
    """
    real = shard.real_rows
    below = _LOW - torch.arange(shard.start, shard.start + real, device=logits.device)
    keys = torch.full((len(logits), k), torch.iinfo(torch.long).min, device=logits.device)
    rows = -(-len(logits) // 8)
    for part, out in zip(logits.split(rows), keys.split(rows), strict=True):
        bits = part.float().add(0.0).view(torch.int32)  # -0.0 becomes 0.0
        key = _ordered(bits).long().bitwise_left_shift_(32).bitwise_or_(below)
        out[:, : min(k, real)] = key.topk(min(k, real)).values
    if shard.group is not None and shard.group.size() > 1:
        everyones = [torch.empty_like(keys) for _ in range(shard.group.size())]
        dist.all_gather(everyones, keys, group=shard.group)
        keys = torch.cat(everyones, -1).topk(k).values
    values = _ordered((keys >> 32).int()).view(torch.float32)
    return values, _LOW - (keys & _LOW)
