"""A global batch cut into this rank's packed micro-batches.

B sequences of the global batch, b of a micro-batch, S positions (right-padded), T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.parallel import mcore
from megarl.parallel.layout import Layout
from megarl.parallel.packing import Packed, pack, plan_micro_batches
from megarl.utils.batch import Batch, select, seqlens

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip


@dataclass(frozen=True)
class MicroBatch:
    """`batch`: these rows [b,S] of the global batch, trimmed, on the host.

    `packed`: the same sequences one after another, on the device.
    """

    rows: list[int]
    batch: Batch
    packed: Packed

    def params(self) -> PackedSeqParams:
        """What attention and rotary embedding need to know about the packed tokens.

        The longest slot is given as it is: a maximum equal to the total of several sequences would
        make the unfused rotary embedding count positions through all of them.
        """
        cu, longest = self.packed.cu_seqlens, self.packed.max_slot
        assert len(cu) == 2 or longest < len(self.packed.input_ids)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            cu_seqlens_q_padded=cu,
            cu_seqlens_kv_padded=cu,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )


def alignment(layout: Layout) -> int:
    """A sequence's slot is a multiple of this: tensor-parallel ranks share its tokens under
    sequence parallelism, context-parallel ranks take two chunks each.
    """
    return (layout.tp if layout.sequence_parallel else 1) * (2 * layout.cp if layout.cp > 1 else 1)


def plan(batch: Batch, layout: Layout, max_tokens: int) -> list[list[list[int]]]:
    """[dp rank][micro-batch] -> rows. The interleaved schedule wants a multiple of pp."""
    return plan_micro_batches(
        seqlens(batch),
        dp=layout.dp,
        max_tokens=max_tokens * layout.cp,
        align=alignment(layout),
        multiple_of=layout.pp if layout.vpp > 1 else 1,
    )


def build(batch: Batch, micro_batches: Sequence[list[int]], layout: Layout) -> list[MicroBatch]:
    """This rank's micro-batches, in the order of the plan."""
    out = []
    for rows in micro_batches:
        mine = select(batch, rows)
        # packed on the host: the index arithmetic would stall a GPU at every boolean mask
        packed = pack(mine["input_ids"].long(), seqlens(mine), align=alignment(layout))
        out.append(MicroBatch(rows, mine, packed.to(mcore.device())))
    return out
