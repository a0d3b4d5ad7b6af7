"""A batch cut into this rank's packed micro-batches.

B sequences of the batch, b of a micro-batch, S positions (right-padded), T packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megarl.api.batch import Batch, Padded, Tokens
from megarl.models.trie_params import trie_params
from megarl.parallel import mcore
from megarl.parallel.layout import Layout
from megarl.parallel.packed_rotary import place_tokens
from megarl.parallel.packing import Alignment, Packed, pack
from megarl.parallel.trie import Trie
from megarl.parallel.trie_packing import pack_trie

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip

GIVEN_IDS = "given_ids"  # batch key [B,S,n]: the ids of the outputs about given tokens


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


def build(
    batch: Batch,
    micro_batches: Sequence[list[int]],
    layout: Layout,
    *,
    cp_rank: int,
    token_unit: int = 1,
    given: bool = False,
    share_prefixes: bool = False,
    beside: str | None = None,
) -> list[MicroBatch]:
    """Packs this rank's micro-batches, in the order of the plan; with `given` batch["given_ids"]
    [B,S,n] too, with `share_prefixes` as tries, whose tokens are also equal in the field `beside`.
    Passes of one step that cut the same rows alike, of whichever model, share what is made of the
    token ids alone."""
    align = alignment(layout, token_unit)
    out, alike = [], not given and beside is None
    names = ["input_ids", *(GIVEN_IDS,) * given, *([beside] if beside else [])]
    for rows in micro_batches:
        how = (tuple(rows), align, layout.cp, cp_rank, share_prefixes)
        packed = batch.packed.get(how) if alike else None
        if packed is None:
            padded = batch.padded(rows, names=names)
            # packed on the host: the index arithmetic would stall a GPU at every boolean mask
            pack_rows: Callable[..., Packed] = partial(pack, cp=layout.cp, cp_rank=cp_rank)
            if share_prefixes:
                pack_rows = partial(pack_trie, beside=padded.get(beside) if beside else None)
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


@dataclass(frozen=True)
class Frame:
    """Says where per-token results go, flat: all rows go to every rank (`everyone`), or the rows
    that a rank holds go to the ranks of its data-parallel index. T tokens of these rows."""

    rows: Tensor  # ascending
    lengths: Tensor  # [b], theirs
    everyone: bool

    @staticmethod
    def of(batch: Batch, *, everyone: bool) -> Frame:
        """Makes the frame of a batch: of all its rows for `everyone`, else of those this rank
        holds."""
        rows = torch.arange(len(batch)) if everyone else batch.rows
        return Frame(rows, batch.lengths[rows], everyone)

    def zeros(self, inner: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns zeros, [T, *inner], on the device."""
        return torch.zeros(int(self.lengths.sum()), *inner, dtype=dtype, device=mcore.device())

    def starts(self, rows: Sequence[int]) -> Tensor:
        """Returns where each of these rows begins among the T tokens, [len(rows)]."""
        ends = self.lengths.cumsum(0)
        places = torch.searchsorted(self.rows, torch.as_tensor(rows, dtype=torch.long))
        return (ends - self.lengths)[places]

    def put(self, full: Tensor, mb: MicroBatch, values: Tensor) -> None:
        """Writes a micro-batch's [b,S,...] into `full` [T,...]. The places are found on the host: a
        device need not stop for them."""
        lengths = mb.source.lengths[mb.rows]
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        t = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
        places = torch.stack([self.starts(mb.rows)[row] + t, row * values.shape[1] + t])
        into, of = places.to(full.device, non_blocking=True)
        full[into] = values.flatten(0, 1)[of].to(full.dtype)

    def places(self, mb: MicroBatch, layout: Layout, tp_rank: int) -> tuple[Tensor, Tensor]:
        """Returns which of the tokens between the layers of a tensor-parallel rank (see
        MicroBatch.tokens) are real, as a mask or as their numbers, and where these are among the T
        tokens. A token of a trie has a place in each of its rows."""
        token = mb.tokens(layout, tp_rank)
        if mb.packed.trie is not None:
            return self._places_of_nodes(mb, mb.packed.trie, len(token), tp_rank)
        real = token >= 0
        width = max(1, mb.packed.index.shape[1])
        starts = torch.tensor([*self.starts(mb.rows).tolist(), 0], device=token.device)
        return real, (starts[token // width] + token % width)[real]

    def _places_of_nodes(
        self, mb: MicroBatch, trie: Trie, share: int, tp_rank: int
    ) -> tuple[Tensor, Tensor]:
        """Returns what `places` does; the rank has `share` nodes of the trie, or all."""
        lengths = mb.source.lengths[mb.rows]
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        t = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
        node = trie.place[row, t]
        if share < len(trie.input_ids):
            node -= share * tp_rank
        mine = (node >= 0) & (node < share)
        both = torch.stack([node, self.starts(mb.rows)[row] + t])[:, mine].to(mcore.device())
        return both[0], both[1]

    def tokens(self, full: Tensor) -> Tokens:
        """Returns the result `full` [T,...] as Tokens on the host."""
        return Tokens(full.cpu(), self.lengths)
