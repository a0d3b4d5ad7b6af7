"""Makes the tables that the ranks of a stock SGLang server would record, without a server.

Names are not SGLang's, where nothing depends on them. Shapes, fusions and bytes are: q, k and v
are one matrix (key/value heads are repeated where there are more ranks), gate and up another, and
all experts of a layer a third and a fourth, cut over ranks by `tp` or dealt out to them.
"""

from __future__ import annotations

import math

from megarl.models.families import family_of
from megarl.models.hf_config import ModelConfig
from megarl.models.ops import FusedQKV, Op
from megarl.models.piece_table import View, padded_vocab_size
from megarl.models.sharding import SliceMap, shard_map
from megarl.transfer.geometry import Entry, TargetTable

VOCAB_PADDING = 64  # rows of a rank are a multiple of this


def server_tables(m: ModelConfig, tp: int, ep: int = 1) -> list[TargetTable]:
    """Returns the table of each of the `tp` ranks of a server, its experts dealt out over `ep`
    groups of them and cut within a group. Raises ValueError where the model does not divide so."""
    _check(m, tp, ep)
    found: list[list[Entry]] = [[] for _ in range(tp)]
    cuts: dict[tuple[Op, int], _Cut] = {}  # layers and experts are cut alike
    for param, _ in family_of(m).params(m):
        ranks, first, offset, name = tp, 0, 0, param.name
        if param.expert is not None:
            ranks, own = tp // ep, m.experts.num_experts // ep
            first, offset = param.expert // own * ranks, param.expert % own
            name = name.replace(f".local_experts.{param.expert}.", ".")
        if (param.op, ranks) not in cuts:
            cuts[param.op, ranks] = _cut(m, param.op, ranks)
        size, boxes_of = cuts[param.op, ranks]
        for tensor, boxes in zip(param.hf, boxes_of, strict=True):
            for b in boxes:
                at = offset * size + b.view.offset
                entry = Entry(tensor, b.start, b.stop, name, at, b.view.shape, b.view.strides)
                found[first + b.rank].append(entry)
    made = f"{m.family}-{m.num_layers}x{m.hidden_size}-tp{tp}-ep{ep}"
    return [TargetTable(entries, f"{made}-rank{rank}") for rank, entries in enumerate(found)]


_Cut = tuple[int, list[tuple[SliceMap, ...]]]  # numbers of a rank, and boxes of each HF tensor


def _check(m: ModelConfig, tp: int, ep: int) -> None:
    if tp % ep:
        raise ValueError(f"ep={ep} does not divide the server's tp={tp}")
    sizes = {"attention heads": (m.num_attention_heads, tp), **_expert_sizes(m, tp, ep)}
    for name, (size, ranks) in sizes.items():
        if size % ranks:
            raise ValueError(f"{size} {name} do not divide over {ranks} ranks of a server")


def _expert_sizes(m: ModelConfig, tp: int, ep: int) -> dict[str, tuple[int, int]]:
    if m.moe is None:
        return {}
    width = m.moe.intermediate_size
    return {"experts": (m.moe.num_experts, ep), "columns of an expert": (width, tp // ep)}


def _cut(m: ModelConfig, op: Op, ranks: int) -> _Cut:
    vocab = padded_vocab_size(m.vocab_size, ranks, VOCAB_PADDING)
    if isinstance(op, FusedQKV):
        return _queries_keys_values(m, op, ranks)
    found = shard_map(m, op, ranks, vocab)
    return math.prod(found.shape), [boxes for _, boxes in found.sources]


def _queries_keys_values(m: ModelConfig, op: FusedQKV, ranks: int) -> _Cut:
    """Cuts q, k and v by heads, each rank's below each other; more ranks than key/value heads
    share them."""
    cols = 1 if op.bias else m.hidden_size
    kv = m.num_key_value_heads
    heads = (m.num_attention_heads, kv, kv)
    found: list[tuple[SliceMap, ...]] = []
    row = 0
    for n in heads:
        own = max(1, n // ranks)
        rows = own * m.head_dim
        boxes = []
        for rank in range(ranks):
            first = rank * n // ranks * m.head_dim
            start, stop = (first, 0), (first + rows, cols)
            shape, strides = (rows, cols), (cols, 1)
            dims = 1 if op.bias else 2
            view = View(row * cols, shape[:dims], strides[:dims])
            boxes.append(SliceMap(rank, view, start[:dims], stop[:dims]))
        found.append(tuple(boxes))
        row += rows
    return row * cols, found
