"""Packs micro-batches of a batch, and puts the results of a pass in the order of its tokens.

B sequences of the batch, b of a micro-batch or that a rank holds, S positions (right-padded), T
packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.api.batch import Batch, Padded, Tokens
from megarl.models.trie_params import trie_params
from megarl.parallel import mcore
from megarl.parallel.groups import ProcessGroups
from megarl.parallel.layout import Layout
from megarl.parallel.mcore import place_tokens
from megarl.parallel.packing import Alignment, Packed, Trie, pack
from megarl.parallel.trie import pack_trie

from megatron.core.packed_seq_params import PackedSeqParams

GIVEN_IDS = "given_ids"  # batch key [B,S,n]: the ids of the outputs about given tokens
SHARED = "prefix_ratio"  # metric: tokens of the batch for each that a pass computes


@dataclass(frozen=True)
class MicroBatch:
    """Holds some rows of a batch that this rank has.

    `packed`: this context-parallel rank's share of the same sequences, packed, on the device.
    """

    rows: list[int]
    source: Batch
    packed: Packed

    def padded(self, names: Sequence[str] | None = None) -> Padded:
        """Returns these rows as [b,S] tensors on the host, S the length of the longest; they are
        made anew each time, so that only one micro-batch at a time is padded."""
        return self.source.padded(self.rows, names)

    @property
    def places(self) -> Tensor:
        """Returns the positions [b] of these rows among the rows of this rank."""
        return torch.searchsorted(self.source.rows, torch.as_tensor(self.rows, dtype=torch.long))

    def inner(self, name: str, part: slice) -> Tensor:
        """Returns [b,S,n,...], `padded` of a field [b,S,N,...]: n of its N numbers, no others."""
        tokens = self.source[name]
        return Tokens(tokens.values[:, part], tokens.lengths).take(self.places).padded()

    def tokens(self, layout: Layout, tp_rank: int) -> Tensor:
        """Returns [T/tp under sequence parallelism, else T]: the token of these rows, row * S + t,
        that each token between the layers of a tensor-parallel rank is, or -1."""
        token = self.packed.token
        return token.chunk(layout.tp)[tp_rank] if layout.sequence_parallel else token

    def params(self) -> PackedSeqParams:
        """Returns what attention and rotary embedding need to know about the packed tokens.

        Lengths are those of whole sequences: attention and rotary embedding know which share is
        this rank's.
        """
        if self.packed.trie is not None:
            return trie_params(self.packed.trie)
        cu, longest = self.packed.cu_seqlens, self.packed.max_slot
        place_tokens(cu, self.packed.position_ids)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            cu_seqlens_q_padded=cu,
            cu_seqlens_kv_padded=cu,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )


def alignment(layout: Layout, token_unit: int = 1) -> Alignment:
    """Returns the multiples that sequences and rows are filled up to. Context-parallel ranks take
    two chunks of every sequence; tensor-parallel ranks share the tokens of a rank under sequence
    parallelism. Every share is a multiple of `token_unit`."""
    slot = 2 * layout.cp if layout.cp > 1 else 1
    share = layout.tp if layout.sequence_parallel else 1
    return Alignment(slot=slot, row=math.lcm(slot, layout.cp * share * token_unit))


# ---- packing ------------------------------------------------------------------------------------


def build(
    batch: Batch,
    micro_batches: Sequence[list[int]],
    align: Alignment,
    *,
    cp: int = 1,
    cp_rank: int = 0,
    given: bool = False,
    share_prefixes: bool = False,
    match: str | None = None,
) -> list[MicroBatch]:
    """Packs this rank's micro-batches, in the order of the plan; with `given` batch["given_ids"]
    [B,S,n] too, with `share_prefixes` as tries, whose tokens match in the field `match`, too.
    Passes of one step that cut the same rows alike, of whichever model, share what is made of the
    token ids alone."""
    out, alike = [], not given and match is None
    names = ["input_ids", *(GIVEN_IDS,) * given, *([match] if match else [])]
    for rows in micro_batches:
        how = (tuple(rows), align, cp, cp_rank, share_prefixes)
        packed = batch.packed.get(how) if alike else None
        if packed is None:
            padded = batch.padded(rows, names=names)
            # packed on the host: the index arithmetic would stall a GPU at every boolean mask
            pack_rows: Callable[..., Packed] = partial(pack, cp=cp, cp_rank=cp_rank)
            if share_prefixes:
                pack_rows = partial(pack_trie, beside=padded[match] if match else None)
            packed = pack_rows(
                padded["input_ids"].long(),
                batch.lengths[rows].tolist(),
                align=align,
                given=padded.get(GIVEN_IDS) if given else None,
            ).to(mcore.device())
        if alike:
            batch.packed[how] = packed
        out.append(MicroBatch(rows, batch, packed))
    return out


def prefix_ratios(micro_batches: Iterable[MicroBatch]) -> Iterator[dict[str, tuple[float, float]]]:
    """Yields the sums of SHARED of each micro-batch: tokens of its sequences, and of its trie."""
    for mb in micro_batches:
        if mb.packed.trie is not None and mb.rows:
            yield {SHARED: (float(mb.source.lengths[mb.rows].sum()), float(mb.packed.trie.tokens))}


# ---- per-token results --------------------------------------------------------------------------


# (where among [T,...], the numbers that stand there), one micro-batch after another
Writes = Iterator[tuple[Any, Tensor]]
# (name, what follows T in its shape, dtype, writes)
Result = tuple[Any, Sequence[int], torch.dtype, Writes]


class ResultRows:
    """Knows where per-token results of a batch's held rows go: flat, [T,...] of T tokens."""

    def __init__(self, batch: Batch, groups: ProcessGroups) -> None:
        self.groups, self._lengths = groups, batch.lengths[batch.rows]

    def collect(self, inner: Sequence[int], dtype: torch.dtype, writes: Writes) -> Tokens:
        """Returns [T,*inner] on the host of every rank of a data-parallel index. Each number is
        written by one of these ranks. Collective."""
        shape = (int(self._lengths.sum()), *inner)
        full = torch.zeros(shape, dtype=dtype, device=mcore.device())
        for places, values in writes:
            full[places] = values.to(dtype)
        raw = full.view(torch.uint8)  # the ranks that wrote nothing add zero to a number's bytes
        for group in (self.groups.tp, self.groups.cp, self.groups.pp):
            if group.size() > 1:
                dist.all_reduce(raw, group=group)
        return Tokens(full.cpu(), self._lengths)

    def of_sequences(self, mb: MicroBatch, width: int) -> tuple[Tensor, Tensor]:
        """Returns where the tokens of a micro-batch go, and where they are in [b*width,...]. The
        places are found on the host: a device need not stop for them."""
        row, t = _tokens_of(mb)
        places = torch.stack([self._starts(mb)[row] + t, row * width + t])
        into, of = places.to(mcore.device(), non_blocking=True)
        return into, of

    def of_layers(self, mb: MicroBatch) -> tuple[Tensor, Tensor]:
        """Returns where the real ones of the tokens between the layers of this rank (see
        MicroBatch.tokens) go, and which these are, as a mask or as their numbers. A token of a trie
        goes to each of its rows."""
        layout, tp_rank = self.groups.layout, self.groups.coords.tp
        token = mb.tokens(layout, tp_rank)
        if mb.packed.trie is not None:
            return self._of_nodes(mb, mb.packed.trie, len(token), tp_rank)
        real = token >= 0
        width = max(1, mb.packed.index.shape[1])
        starts = torch.tensor([*self._starts(mb).tolist(), 0], device=token.device)
        return (starts[token // width] + token % width)[real], real

    def _of_nodes(
        self, mb: MicroBatch, trie: Trie, share: int, tp_rank: int
    ) -> tuple[Tensor, Tensor]:
        """Returns what `of_layers` does; the rank has `share` nodes of the trie, or all."""
        row, t = _tokens_of(mb)
        node = trie.place[row, t]
        if share < len(trie.input_ids):
            node -= share * tp_rank
        here = (node >= 0) & (node < share)
        places = torch.stack([self._starts(mb)[row] + t, node])[:, here].to(mcore.device())
        return places[0], places[1]

    def _starts(self, mb: MicroBatch) -> Tensor:
        """Returns where each row of a micro-batch begins among the T tokens, [b]."""
        return (self._lengths.cumsum(0) - self._lengths)[mb.places]


def _tokens_of(mb: MicroBatch) -> tuple[Tensor, Tensor]:
    """Returns row and position of the tokens of a micro-batch, row after row."""
    lengths = mb.source.lengths[mb.rows]
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return row, torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
