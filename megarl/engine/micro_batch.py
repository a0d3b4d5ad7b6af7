"""Brings a pass its tokens: a batch is placed for the step, cut into micro-batches, and packed.

A batch is placed for the step, borrowed from where another engine has it, or made of a dict. Where
passes compute shared prefixes once (mb_spec.share_prefixes), what sequences share is known from
their tokens, which only the ranks of their data-parallel index hold: each index plans by itself,
and they agree on the number of micro-batches.

B sequences of the batch, b of a micro-batch or that a rank holds, S positions (right-padded), T
packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.api.batch import Batch, Home, Padded, Tokens
from megarl.engine.routing import ROUTED
from megarl.engine.setup import EngineState
from megarl.models.flops import sequence_cost
from megarl.models.trie_params import trie_params
from megarl.parallel import exchange, mcore
from megarl.parallel.layout import Layout
from megarl.parallel.packed_rotary import place_tokens
from megarl.parallel.packing import Alignment, Packed, pack
from megarl.parallel.placement import engine_home, place_rows, units_of
from megarl.parallel.trie import Bytes, Trie, token_bytes
from megarl.parallel.trie_packing import pack_trie, plan_tries

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip

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


def as_batch(given: Batch | Padded, names: Iterable[str] | None = None) -> Batch:
    """Returns a Batch as it is, or makes one of a plain dict that is the same on every rank.
    `names`: the fields of the dict that are needed, None for all."""
    if isinstance(given, Batch):
        return given
    wanted = set(given if names is None else names) | {"input_ids", "attention_mask"}
    padded = {k: v for k, v in given.items() if k in wanted}
    return Batch.from_padded(padded, comm=exchange.world_comm())


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
        cost=sequence_cost(state.model),
        slot=alignment(state.layout).slot,
        together=batch.get("group_ids") if state.config.mb_spec.share_prefixes else None,
    )
    return engine_home(state.layout, of_row)


def _check_ranks(batch: Batch) -> None:
    """Raises ValueError unless the batch is of the ranks of the world in scope."""
    theirs, ours = batch.comm, exchange.world_comm()
    if theirs is ours or not isinstance(theirs, exchange.WorldComm | None):
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


def place(state: EngineState, batch: Batch, *, whole_groups: bool = False) -> None:
    """Moves the batch to where this engine works on it, if none has placed it yet. Collective."""
    if not batch.placed:
        exchange.place(batch, home_of(state, batch, whole_groups=whole_groups))


def settle(state: EngineState, batch: Batch, *, whole_groups: bool = False) -> Batch:
    """Returns the batch where this engine works on it. A batch that has not been placed in this
    step is placed for good; of one placed for another layout, a copy is made of what is not at
    hand. Collective."""
    place(state, batch, whole_groups=whole_groups)
    return exchange.placed(batch, home_of(state, batch, whole_groups=whole_groups))


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


def trie_rows(
    state: EngineState, batch: Batch, *, whole_groups: bool, backward: bool
) -> list[list[int]]:
    """Returns the rows of this rank's micro-batches, as many as on every data-parallel index. The
    batch has been placed. Collective."""
    spec, layout = state.config.mb_spec, state.layout
    larger = None if backward else spec.forward_max_tokens_per_mb
    held = batch.rows
    groups = group_ids(batch, whole_groups=True) if whole_groups else None
    needs = plan_tries(
        _rows(batch, match_field(state, batch)),
        max_tokens=larger or spec.max_tokens_per_mb,
        align=alignment(layout),
        cost=sequence_cost(state.model),
        units=None if groups is None else units_of(groups[held]),
    )
    count = torch.tensor(needs.count, device=mcore.device())
    if layout.world_size > 1:
        dist.all_reduce(count, dist.ReduceOp.MAX)
    multiple = layout.pp if layout.vpp > 1 else 1
    rows = held.tolist()
    filled = needs.micro_batches(-(-int(count) // multiple) * multiple)
    return [sorted(rows[i] for i in mb) for mb in filled]


def match_field(state: EngineState, batch: Batch) -> str | None:
    """Returns the field that tokens must have equal to be one beside their ids: the routes that a
    pass over the batch replays."""
    replays = state.config.mb_spec.share_prefixes and state.config.replays
    return ROUTED if replays and ROUTED in batch else None


def _rows(batch: Batch, field: str | None) -> list[Bytes]:
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
