"""Brings a pass its tokens: a batch is placed for the step, cut into micro-batches, and packed.

A batch is placed for the step, or borrowed from where another engine has it. Where passes compute
shared prefixes once (mb_spec.share_prefixes), what sequences share is known from their tokens,
which only the ranks of their data-parallel index hold: each index plans by itself, and they agree
on the number of micro-batches.

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

from megarl.api.batch import Batch, Home, Padded, Tokens
from megarl.engine.routing import ROUTED
from megarl.engine.setup import EngineState
from megarl.models.trie_params import trie_params
from megarl.parallel import exchange, mcore
from megarl.parallel.groups import ProcessGroups
from megarl.parallel.layout import Layout
from megarl.parallel.mcore import place_tokens
from megarl.parallel.packing import (
    Alignment,
    Packed,
    pack,
    pack_trie,
    plan_micro_batches,
    plan_tries,
)
from megarl.parallel.placement import engine_home, place_rows, units_of
from megarl.parallel.ranks import Ranks, world_comm
from megarl.parallel.trie import Bytes, Trie, token_bytes

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


# ---- where a batch is ---------------------------------------------------------------------------


def group_ids(batch: Batch, *, whole_groups: bool) -> Tensor | None:
    """Returns ids [B] of rows that stay together on a rank, with `whole_groups` in a micro-batch
    too; None if each is by itself. Raises ValueError where `whole_groups` has no field to go by."""
    if "unit_ids" in batch or ("rollout_ids" in batch and not whole_groups):
        return batch.unit_ids
    if not whole_groups:
        return None
    if "group_ids" not in batch:
        raise ValueError(
            "whole_groups=True needs batch['group_ids'] [B]: which rows belong together"
        )
    ids: Tensor = batch["group_ids"]
    return ids


def home_of(state: EngineState, batch: Batch, *, whole_groups: bool = False) -> Home:
    """Returns the batch's own home if this engine can work on it there, else the home that this
    engine would give it; where prefixes are shared, rows of a group stay together in it as far as
    the work stays even. Raises ValueError for a batch of other ranks than the engine's."""
    _check_ranks(batch)
    of_rank = tuple(c.dp for c in state.layout.all_coords)
    units = group_ids(batch, whole_groups=whole_groups)
    if batch.placed and batch.home.of_rank == of_rank and _whole(units, batch.home.of_row):
        return batch.home
    of_row = place_rows(
        batch.lengths.tolist(),
        torch.arange(len(batch)) if units is None else units,
        batch.minibatches,
        dp=state.layout.dp,
        cost=state.cost,
        slot=alignment(state.layout).slot,
        together=batch.get("group_ids") if state.config.mb_spec.share_prefixes else None,
    )
    return engine_home(state.layout, of_row)


def _check_ranks(batch: Batch) -> None:
    """Raises ValueError unless the batch is of the ranks of the world in scope."""
    theirs, ours = batch.comm, world_comm()
    if theirs is ours or not isinstance(theirs, Ranks | None):
        return
    named = [f"ranks {list(c.ranks)}" if c else "one rank alone" for c in (theirs, ours)]
    raise ValueError(
        f"this batch is of {named[0]}, the engine of {named[1]}: make the batch on the engine's "
        "ranks, inside `with world.scope():`"
    )


def _whole(units: Tensor | None, of_row: Tensor) -> bool:
    """Returns whether every unit stands at one data-parallel index."""
    if units is None:
        return True
    index = of_row.tolist()
    return all(len({index[r] for r in unit}) == 1 for unit in units_of(units))


def place(
    state: EngineState, batch: Batch, names: Iterable[str] | None = None, **how: Any
) -> Batch:
    """Returns the batch, or its fields `names`, where this engine works on it. A batch that has not
    been placed in this step is placed for good; of one placed for another layout, a copy is made of
    what is not at hand. how: of `home_of`. Collective."""
    home = home_of(state, batch, **how)
    if not batch.placed:
        exchange.place(batch, home)
    at_hand = home is batch.home
    if names is not None:
        batch = batch.select(torch.arange(len(batch)), [name for name in names if name in batch])
    return batch if at_hand else exchange.placed(batch, home)


# ---- packing ------------------------------------------------------------------------------------


def build(
    batch: Batch,
    micro_batches: Sequence[list[int]],
    layout: Layout,
    *,
    cp_rank: int,
    token_unit: int = 1,
    given: bool = False,
    share_prefixes: bool = False,
    match: str | None = None,
) -> list[MicroBatch]:
    """Packs this rank's micro-batches, in the order of the plan; with `given` batch["given_ids"]
    [B,S,n] too, with `share_prefixes` as tries, whose tokens match in the field `match`, too.
    Passes of one step that cut the same rows alike, of whichever model, share what is made of the
    token ids alone."""
    align = alignment(layout, token_unit)
    out, alike = [], not given and match is None
    names = ["input_ids", *(GIVEN_IDS,) * given, *([match] if match else [])]
    for rows in micro_batches:
        how = (tuple(rows), align, layout.cp, cp_rank, share_prefixes)
        packed = batch.packed.get(how) if alike else None
        if packed is None:
            padded = batch.padded(rows, names=names)
            # packed on the host: the index arithmetic would stall a GPU at every boolean mask
            pack_rows: Callable[..., Packed] = partial(pack, cp=layout.cp, cp_rank=cp_rank)
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


def plan(
    state: EngineState, batch: Batch, *, whole_groups: bool = False, backward: bool
) -> list[list[int]]:
    """Returns the rows of this rank's micro-batches, as many as on every data-parallel index, and
    under the interleaved schedule a multiple of pp. The batch has been placed. Collective where
    prefixes are shared."""
    spec, layout = state.config.mb_spec, state.layout
    larger = None if backward else spec.forward_max_tokens_per_mb
    max_tokens = larger or spec.max_tokens_per_mb  # of a device
    groups = group_ids(batch, whole_groups=True) if whole_groups else None
    multiple_of = layout.pp if layout.vpp > 1 else 1
    if not spec.share_prefixes:
        plan_of_all = plan_micro_batches(
            batch.lengths.tolist(),
            dp=layout.dp,
            max_tokens=max_tokens * layout.cp,
            align=alignment(layout, state.unit),
            multiple_of=multiple_of,
            cost=state.cost,
            groups=None if groups is None else units_of(groups),
            index=batch.home.of_row.tolist(),
        )
        return plan_of_all[state.groups.coords.dp]
    rows = batch.rows
    needs = plan_tries(
        _row_bytes(batch, match_field(state, batch)),
        max_tokens=max_tokens,
        align=alignment(layout),
        cost=state.cost,
        units=None if groups is None else units_of(groups[rows]),
    )
    count = torch.tensor(needs.count, device=mcore.device())
    if layout.world_size > 1:
        dist.all_reduce(count, dist.ReduceOp.MAX)
    filled = needs.micro_batches(-(-int(count) // multiple_of) * multiple_of)
    return [sorted(rows[mb].tolist()) for mb in filled]


def match_field(state: EngineState, batch: Batch) -> str | None:
    """Returns the field that tokens must have equal to be one beside their ids: the routes that a
    pass over the batch replays."""
    replays = state.config.mb_spec.share_prefixes and state.replays
    return ROUTED if replays and ROUTED in batch else None


def _row_bytes(batch: Batch, field: str | None) -> list[Bytes]:
    """Returns token_bytes [n,w] of each row that this rank holds."""
    ids = batch["input_ids"]
    whole = token_bytes(ids.values, None if field is None else batch[field].values)
    ends = ids.lengths.cumsum(0)
    return [whole[e - n : e] for n, e in zip(ids.lengths.tolist(), ends.tolist(), strict=True)]


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
        self.groups = groups
        self._rows = batch.rows
        self._lengths = batch.lengths[self._rows]

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
        places = torch.searchsorted(self._rows, torch.as_tensor(mb.rows, dtype=torch.long))
        return (self._lengths.cumsum(0) - self._lengths)[places]


def _tokens_of(mb: MicroBatch) -> tuple[Tensor, Tensor]:
    """Returns row and position of the tokens of a micro-batch, row after row."""
    lengths = mb.source.lengths[mb.rows]
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return row, torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
