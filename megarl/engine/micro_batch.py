"""Packs micro-batches of a batch, and puts the results of a pass in the order of its tokens.

B sequences of the batch, b of a micro-batch or that a rank holds, S positions (right-padded), T
packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.api.batch import Batch, Padded, Tokens
from megarl.models.attention import SlotParams
from megarl.models.trie_params import BOUNDS, LONGEST, trie_params
from megarl.observability.logging import get_logger
from megarl.parallel import mcore
from megarl.parallel.groups import ProcessGroups
from megarl.parallel.layout import Layout
from megarl.parallel.mcore import pinned, place_tokens, to_device
from megarl.parallel.packing import Alignment, Packed, Trie, pack, slot_lengths
from megarl.parallel.trie import pack_trie

from megatron.core.packed_seq_params import PackedSeqParams

log = get_logger(__name__)
GIVEN_IDS = "given_ids"  # batch key [B,S,n]: the ids of the outputs about given tokens
SHARED = "prefix_ratio"  # metric: tokens of the batch for each that a pass computes


@dataclass(frozen=True)
class MicroBatch:
    """Holds some rows of a batch that this rank has: on the host, and while it runs on the device.

    pack: makes `packed` the first time.
    size: `length`, or None where only packing tells.
    fields: the batch's fields for the loss, padded.
    """

    rows: list[int]
    source: Batch
    pack: Callable[[], Packed]
    size: int | None = None
    fields: Padded = field(default_factory=dict)

    @property
    def packed(self) -> Packed:
        """Returns this context-parallel rank's share of the sequences, packed."""
        return self.pack()

    @property
    def length(self) -> int:
        """Returns the packed tokens of this context-parallel rank; only a trie is packed for it."""
        return len(self.packed.input_ids) if self.size is None else self.size

    def padded(self, names: Sequence[str] | None = None) -> Padded:
        """Returns these rows as [b,S] tensors on the host, S the length of the longest, made anew
        each time."""
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
        cu, longest = self.packed.cu_seqlens, max(self.packed.slots)
        place_tokens(cu, self.packed.position_ids)
        return SlotParams(
            qkv_format="thd",
            **dict.fromkeys(BOUNDS, cu),
            **dict.fromkeys(LONGEST, longest),
            slots=self.packed.slots,
        )


def alignment(layout: Layout, token_unit: int = 1) -> Alignment:
    """Returns the multiples that sequences and rows are filled up to. Context-parallel ranks take
    two chunks of every sequence; tensor-parallel ranks share the tokens of a rank under sequence
    parallelism. Every share is a multiple of `token_unit`."""
    slot = 2 * layout.cp if layout.cp > 1 else 1
    share = layout.tp if layout.sequence_parallel else 1
    return Alignment(slot=slot, row=math.lcm(slot, layout.cp * share * token_unit))


# ---- packing ------------------------------------------------------------------------------------


@dataclass
class Sharing:
    """Says when a pass computes shared prefixes once: where whole sequences are at least `least`
    times the work of their tries."""

    least: float
    logged: bool = False

    def pays(self, whole: float, tries: float) -> bool:
        """Returns whether tries pay, by the work of the batch's sequences and of their tries; the
        first answer of `auto` is logged."""
        ratio = whole / tries if tries else 1.0
        if not self.logged and tries:
            self.logged = True
            log.info(
                "mb_spec.share_prefixes=auto: prefixes are %s, whole sequences are %.2f times the "
                "work of their tries, which pay from %.2f on; each batch decides anew",
                "shared" if ratio >= self.least else "not shared", ratio, self.least,
            )  # fmt: skip
        return ratio >= self.least


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
    """Returns this rank's micro-batches, in the order of the plan, each packed when asked for:
    with `given` batch["given_ids"] [B,S,n] too, with `share_prefixes` as tries, whose tokens match
    in the field `match`, too. Passes of one step that cut the same rows alike, of whichever model,
    share what is made of the token ids alone."""
    names = ["input_ids", *(GIVEN_IDS,) * given, *([match] if match else [])]
    alike = not given and match is None

    def packed(rows: list[int]) -> Packed:
        how = (tuple(rows), align, cp, cp_rank, share_prefixes)
        if alike and how in batch.packed:
            return batch.packed[how]
        padded = batch.padded(rows, names=names)
        # on the host: the index arithmetic would stall a GPU at every boolean mask
        pack_rows: Callable[..., Packed] = partial(pack, cp=cp, cp_rank=cp_rank)
        if share_prefixes:
            pack_rows = partial(pack_trie, beside=padded[match] if match else None)
        fresh = pack_rows(
            padded["input_ids"].long(),
            batch.lengths[rows].tolist(),
            align=align,
            given=padded.get(GIVEN_IDS) if given else None,
        ).moved(pinned)
        if alike:
            batch.packed[how] = fresh
        return fresh

    out = []
    for rows in micro_batches:
        slots = slot_lengths(batch.lengths[rows].tolist(), align)
        size = None if share_prefixes else sum(slots) // cp
        out.append(MicroBatch(rows, batch, cache(partial(packed, rows)), size))
    return out


def ahead(
    micro_batches: Sequence[MicroBatch], thread: Executor, names: Sequence[str] = ()
) -> Iterator[MicroBatch]:
    """Yields micro-batches on the device, with the fields `names`; while one runs, the `thread`
    makes the next one ready on the host. Raises what packing raised."""

    def ready(mb: MicroBatch) -> tuple[Packed, Padded]:
        return mb.packed, {k: pinned(v) for k, v in mb.padded(names).items()} if names else {}

    coming = [thread.submit(ready, mb) for mb in micro_batches[:1]]
    for i, mb in enumerate(micro_batches):
        packed, fields = coming.pop().result()
        coming += [thread.submit(ready, after) for after in micro_batches[i + 1 : i + 2]]
        yield replace(
            mb,
            pack=cache(partial(packed.moved, to_device)),
            fields={k: to_device(v) for k, v in fields.items()},
        )


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
        into, of = to_device(places)
        return into, of

    def of_layers(self, mb: MicroBatch) -> tuple[Tensor, Tensor]:
        """Returns where the real ones of the tokens between the layers of this rank (see
        MicroBatch.tokens) go, and their numbers. A token of a trie goes to each of its rows."""
        layout, tp_rank = self.groups.layout, self.groups.coords.tp
        token = mb.tokens(layout, tp_rank)
        if mb.packed.trie is not None:
            return self._of_nodes(mb, mb.packed.trie, len(token), tp_rank)
        (real,) = (token >= 0).nonzero(as_tuple=True)
        width = max(1, mb.packed.index.shape[1])
        starts, token = self._starts(mb), token[real]
        into, of = to_device(torch.stack([starts[token // width] + token % width, real]))
        return into, of

    def _of_nodes(
        self, mb: MicroBatch, trie: Trie, share: int, tp_rank: int
    ) -> tuple[Tensor, Tensor]:
        """Returns what `of_layers` does; the rank has `share` nodes of the trie, or all."""
        row, t = _tokens_of(mb)
        node = trie.place[row, t]
        if share < len(trie.input_ids):
            node -= share * tp_rank
        here = (node >= 0) & (node < share)
        into, of = to_device(torch.stack([self._starts(mb)[row] + t, node])[:, here])
        return into, of

    def _starts(self, mb: MicroBatch) -> Tensor:
        """Returns where each row of a micro-batch begins among the T tokens, [b]."""
        return (self._lengths.cumsum(0) - self._lengths)[mb.places]


def _tokens_of(mb: MicroBatch) -> tuple[Tensor, Tensor]:
    """Returns row and position of the tokens of a micro-batch, row after row."""
    lengths = mb.source.lengths[mb.rows]
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return row, torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
