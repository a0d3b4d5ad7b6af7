"""Slices of a plan moved between tensors of one process, each end knowing its own part alone."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megarl.models.piece_table import PieceTable, View
from megarl.transfer.boxes import Box
from megarl.transfer.gather import export_dtype
from megarl.transfer.geometry import TargetTable
from megarl.transfer.plan import Receiver, TransferPlan

Memory = dict[str, Tensor]  # a rank's storages by parameter
EMPTY = -1.0


def dtypes(table: PieceTable) -> dict[str, torch.dtype]:
    return {t.name: export_dtype(t, torch.bfloat16) for t in table.tensors}


def storages(views: Iterable[tuple[str, View]]) -> Memory:
    """Room for all of the views of a rank's parameters."""
    ends: dict[str, int] = defaultdict(int)
    for param, v in views:
        last = sum((n - 1) * s for n, s in zip(v.shape, v.strides, strict=True))
        ends[param] = max(ends[param], v.offset + last + 1)
    return {param: torch.full((end,), EMPTY) for param, end in ends.items()}


def hf_values(table: PieceTable) -> Memory:
    """Every element of every HF tensor has a number of its own."""
    values, end = {}, 1
    for t in table.tensors:
        values[t.name] = (end + torch.arange(float(t.numel))).view(t.shape)
        end += t.numel
    return values


def at(values: Tensor, box: Box) -> Tensor:
    return values[tuple(slice(a, b) for a, b in zip(*box, strict=True))].flatten()


def seen(memory: Memory, param: str, v: View) -> Tensor:
    return memory[param].as_strided(v.shape, v.strides, v.offset)


def trainers(table: PieceTable) -> list[Memory]:
    """Every trainer rank's parameters, full of the HF tensors' numbers."""
    values, found = hf_values(table), []
    for c in table.layout.all_coords:
        held = [(t, p) for t in table.tensors for p in t.held_by(c)]
        memory = storages((p.param, p.view) for _, p in held)
        for t, p in held:
            numbers = at(values[t.name], (p.start, p.stop))
            seen(memory, p.param, p.view).copy_(numbers.view(p.view.shape))
        found.append(memory)
    return found


def send(plan: TransferPlan) -> dict[tuple[int, Receiver, int], Tensor]:
    """What every trainer rank sends, by (rank, receiver, round)."""
    sent: dict[tuple[int, Receiver, int], Tensor] = {}
    for rank, memory in enumerate(trainers(plan.sources.table)):
        for m in (m for group in plan.sends(rank) for m in group):
            key = rank, m.receiver, m.round
            assert key not in sent, "one message for a pair and round"
            sent[key] = torch.cat(
                [seen(memory, s.param, v).flatten() for s in m.slices for v in s.views]
            )
    return sent


def assert_delivered(plan: TransferPlan, servers: Sequence[Sequence[TargetTable]]) -> None:
    """Every element of every entry arrives exactly once, and nothing else is sent."""
    sent, values = send(plan), hf_values(plan.sources.table)
    for receiver in plan.receivers:
        entries = servers[receiver.target][receiver.rank].entries
        memory = storages((e.param, v) for e in entries for v in e.views)
        rounds = json.loads(json.dumps(plan.receives(receiver)))  # as it travels
        for number, messages in enumerate(rounds):
            for sender, slices in messages:
                flat = sent.pop((sender, receiver, number))
                for s in slices:
                    entry, views = s if isinstance(s, list) else (s, None)
                    e = entries[entry]
                    for v in [View(*v) for v in views] if views else e.views:
                        there = seen(memory, e.param, v)
                        assert (there == EMPTY).all(), f"{e.tensor} is written twice"
                        there.copy_(flat[: there.numel()].view(there.shape))
                        flat = flat[there.numel() :]
                assert not flat.numel(), "both ends of a message agree in its size"
        for e in entries:
            there = seen(memory, e.param, *e.views).flatten()
            assert torch.equal(there, at(values[e.tensor], e.box)), e
    assert not sent, "all that is sent is received"
