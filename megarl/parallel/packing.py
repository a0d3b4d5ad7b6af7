"""Which sequence goes where, and back: micro-batch plans and the packed layout. Pure.

B sequences of the global batch, b of a micro-batch, S positions (right-padded), T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from megarl.utils.batch import Batch

Plan = list[list[list[int]]]  # [dp rank][micro-batch] -> rows of the global batch


def padded_length(length: int, align: int) -> int:
    """Room one sequence takes in a packed row; an empty sequence still takes one unit."""
    return -(-max(1, length) // align) * align


def _spread(items: Sequence[int], sizes: Sequence[int], bins: int) -> list[list[int]]:
    """Longest first into the lightest bin (LPT); ties by position, so always the same."""
    out: list[list[int]] = [[] for _ in range(bins)]
    load = [0] * bins
    for i in sorted(items, key=lambda i: (-sizes[i], i)):
        k = min(range(bins), key=lambda k: (load[k], len(out[k]), k))
        out[k].append(i)
        load[k] += sizes[i]
    return out


def _first_fit(items: Sequence[int], sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Longest first into the first bin with room; a sequence above the budget has its own."""
    out: list[list[int]] = []
    load: list[int] = []
    for i in sorted(items, key=lambda i: (-sizes[i], i)):
        for k in range(len(out)):
            if load[k] + sizes[i] <= budget:
                out[k].append(i)
                load[k] += sizes[i]
                break
        else:
            out.append([i])
            load.append(sizes[i])
    return out


def plan_micro_batches(
    seqlens: Sequence[int], *, dp: int, max_tokens: int, align: int = 1, multiple_of: int = 1
) -> Plan:
    """Every sequence once, over dp ranks and micro-batches of at most `max_tokens` padded tokens.

    All ranks get the same number of micro-batches, a multiple of `multiple_of`; some are empty when
    there are too few sequences. Tokens are balanced over ranks and over a rank's micro-batches, and
    a rank's micro-batches run from heavy to light so that the ranks stay in step. A sequence longer
    than the budget is alone in its micro-batch. The same input gives the same plan on every rank.
    """
    if max_tokens < 1:
        raise ValueError(f"mb_spec.max_tokens_per_mb={max_tokens}: a micro-batch needs a token")
    sizes = [padded_length(n, align) for n in seqlens]
    ranks = _spread(range(len(sizes)), sizes, dp)
    fitted = [_first_fit(items, sizes, max_tokens) for items in ranks]
    count = max(1, *(len(f) for f in fitted))
    count = -(-count // multiple_of) * multiple_of

    def load(rows: list[int]) -> int:
        return sum(sizes[i] for i in rows)

    plan: Plan = []
    for items, fallback in zip(ranks, fitted, strict=True):
        mbs = _spread(items, sizes, count)
        if any(len(mb) > 1 and load(mb) > max_tokens for mb in mbs):
            mbs = fallback + [[] for _ in range(count - len(fallback))]
        plan.append([sorted(mb) for mb in sorted(mbs, key=lambda mb: (-load(mb), mb))])
    return plan


@dataclass(frozen=True)
class Packed:
    """b sequences one after another in T tokens; `lengths` are real tokens, `slots` padded ones."""

    input_ids: torch.Tensor  # [T] int64
    labels: torch.Tensor  # [T] int64: the next token of the same sequence, 0 where there is none
    position_ids: torch.Tensor  # [T] int64, from 0 in every sequence
    cu_seqlens: torch.Tensor  # [b+1] int32, of the slots
    index: torch.Tensor  # [b,S] int64: where the output for (row, position t) stands, for t >= 1
    valid: torch.Tensor  # [b,S] bool: t >= 1 and real
    max_slot: int

    def to(self, device: torch.device) -> Packed:
        moved: dict[str, Any] = {
            f.name: value.to(device, non_blocking=True)
            for f in fields(self)
            if torch.is_tensor(value := getattr(self, f.name))
        }
        return replace(self, **moved)


def pack(input_ids: torch.Tensor, lengths: Sequence[int], *, align: int = 1) -> Packed:
    """Packs right-padded [b,S] rows, each filled up with zeros to a multiple of `align`.

    The filling belongs to its sequence: under causal attention nothing real sees it, and attention
    kernels need no notion of gaps between sequences. With b = 0 there is one dummy token, because
    every pipeline stage and every tensor-parallel peer expects a forward pass.
    """
    b, width = input_ids.shape
    device = input_ids.device
    slots = [padded_length(n, align) for n in lengths] or [padded_length(0, align)]
    cu = torch.tensor([0, *slots], device=device).cumsum(0)
    total = sum(slots)
    ids = torch.zeros(total, dtype=torch.long, device=device)
    labels = torch.zeros_like(ids)
    positions = torch.arange(total, device=device) - torch.repeat_interleave(
        cu[:-1], torch.tensor(slots, device=device)
    )
    lens = torch.as_tensor(list(lengths), dtype=torch.long, device=device)[:, None]  # [b,1]
    t = torch.arange(width, device=device)[None]  # [1,S]
    real = t < lens
    place = (cu[:-1][:b, None] + t).clamp(max=total - 1)  # of token (row, t)
    ids[place[real]] = input_ids[real]
    valid = real & (t >= 1)
    index = (place - 1).clamp(min=0)  # what is said about x_t is read off position t-1
    labels[index[valid]] = input_ids[valid]
    return Packed(ids, labels, positions, cu.int(), index, valid, max(slots))


def unpack(values: torch.Tensor, packed: Packed) -> torch.Tensor:
    """[T,...] per-token values, made at t-1 about x_t, to padded [b,S,...]; 0 at t=0 and padding.

    Differentiable.
    """
    out = values[packed.index]
    mask = packed.valid.reshape(*packed.valid.shape, *[1] * (values.ndim - 1))
    return torch.where(mask, out, torch.zeros((), dtype=out.dtype, device=out.device))


def check_right_padded(batch: Batch) -> None:
    """Raises ValueError naming the first row of `attention_mask` that is not right-padded."""
    for key in ("input_ids", "attention_mask"):
        if key not in batch:
            raise ValueError(f"the batch has no {key!r}, only {sorted(batch)}")
    mask = batch["attention_mask"].bool()
    if len(mask) == 0:
        raise ValueError("the batch is empty: B = 0")
    broken = (mask[:, 1:] & ~mask[:, :-1]).any(1)
    if broken.any():
        row = int(broken.nonzero()[0])
        raise ValueError(
            f"attention_mask of row {row} is not right-padded (a real token after a padded one)"
        )
