"""A global batch cut into this rank's packed micro-batches.

B sequences of the global batch, b of a micro-batch, S positions (right-padded), T packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.parallel import mcore
from megarl.parallel.layout import Layout
from megarl.parallel.packing import Alignment, Cost, Packed, pack, plan_micro_batches
from megarl.utils.batch import Padded, select, seqlens

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip


@dataclass(frozen=True)
class MicroBatch:
    """`batch`: these rows [b,S] of the global batch, trimmed, on the host.

    `packed`: this context-parallel rank's share of the same sequences, packed, on the device.
    """

    rows: list[int]
    batch: Padded
    packed: Packed

    def params(self) -> PackedSeqParams:
        """What attention and rotary embedding need to know about the packed tokens.

        Lengths are those of whole sequences: attention and rotary embedding know which share is
        this rank's. The longest slot is given as it is: a maximum equal to the total of several
        sequences would make the unfused rotary embedding count positions through all of them.
        """
        cu, longest = self.packed.cu_seqlens, self.packed.max_slot
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
    """Context-parallel ranks take two chunks of every sequence; tensor-parallel ranks share the
    tokens of a rank under sequence parallelism. Every share is a multiple of `token_unit`.
    """
    slot = 2 * layout.cp if layout.cp > 1 else 1
    share = layout.tp if layout.sequence_parallel else 1
    return Alignment(slot=slot, row=math.lcm(slot, layout.cp * share * token_unit))


def plan(
    batch: Padded,
    layout: Layout,
    max_tokens: int,
    cost: Cost,
    *,
    whole_groups: bool = False,
    token_unit: int = 1,
) -> list[list[list[int]]]:
    """[dp rank][micro-batch] -> rows. `max_tokens` is what one device holds of a micro-batch. The
    interleaved schedule wants a multiple of pp. `whole_groups` keeps the rows of a group together.
    """
    return plan_micro_batches(
        seqlens(batch),
        dp=layout.dp,
        max_tokens=max_tokens * layout.cp,
        align=alignment(layout, token_unit),
        multiple_of=layout.pp if layout.vpp > 1 else 1,
        cost=cost,
        groups=_groups(batch) if whole_groups else None,
    )


def _groups(batch: Padded) -> list[list[int]]:
    """Rows by their group_ids, in the order of first appearance."""
    if "group_ids" not in batch:
        raise ValueError(
            "whole_groups=True needs batch['group_ids'] [B]: which rows belong together"
        )
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(batch["group_ids"].tolist()):
        groups.setdefault(group, []).append(row)
    return list(groups.values())


def build(
    batch: Padded,
    micro_batches: Sequence[list[int]],
    layout: Layout,
    *,
    cp_rank: int,
    token_unit: int = 1,
) -> list[MicroBatch]:
    """This rank's micro-batches, in the order of the plan."""
    out = []
    for rows in micro_batches:
        mine = select(batch, rows)
        # packed on the host: the index arithmetic would stall a GPU at every boolean mask
        packed = pack(
            mine["input_ids"].long(), seqlens(mine), align=alignment(layout, token_unit),
            cp=layout.cp, cp_rank=cp_rank,
        )  # fmt: skip
        out.append(MicroBatch(rows, mine, packed.to(mcore.device())))
    return out
