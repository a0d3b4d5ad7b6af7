"""Slices of the weights, from trainers' parameters to those of servers, moved in one process."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models.piece_table import PieceTable, build_piece_table
from megarl.parallel.layout import Layout
from megarl.planning.server_tables import server_tables
from megarl.weight_sync.slices.plan import (
    Entry,
    Receiver,
    ServerTable,
    SlicePlan,
    plan_slices,
)
from tests.unit.family_configs import FAMILIES, config
from tests.unit.test_reallocation_plan import layouts, numbered

Memory = dict[str, torch.Tensor]  # storages by parameter


def itemsizes(table: PieceTable) -> dict[str, int]:
    return {t.name: 4 if t.buffer else 2 for t in table.tensors}


def storages(table: ServerTable) -> Memory:
    """Room for every view of the table, filled with -1."""
    ends: dict[str, int] = defaultdict(int)
    for e in table.entries:
        last = sum((n - 1) * s for n, s in zip(e.shape, e.strides, strict=True))
        ends[e.param] = max(ends[e.param], e.offset + last + 1)
    return {name: torch.full((end,), -1.0) for name, end in ends.items()}


def hf_values(table: PieceTable) -> dict[str, torch.Tensor]:
    values, end = {}, 1
    for t in table.tensors:
        values[t.name] = (end + torch.arange(float(t.numel))).view(t.shape)
        end += t.numel
    return values


def deliver(plan: SlicePlan, servers: list[list[ServerTable]]) -> dict[Receiver, Memory]:
    """Sends and receives everything as the plan says; each end knows its own part of it only."""
    sent: dict[tuple[int, Receiver, int], list[torch.Tensor]] = {}
    params = numbered(plan.table)
    for rank in range(plan.table.layout.world_size):
        for group in plan.sends(rank):
            for m in group:
                key = rank, m.receiver, m.step
                assert key not in sent, "one message for a pair and step"
                sent[key] = [
                    params[rank][s.param].as_strided(v.shape, v.strides, v.offset).flatten()
                    for s in m.slices
                    for v in s.views
                ]
    memories = {}
    for receiver in plan.receivers:
        table = servers[receiver.server][receiver.rank]
        memory = memories[receiver] = storages(table)
        rounds = json.loads(json.dumps(plan.receives(*receiver)))
        for step, messages in enumerate(rounds):
            for sender, slices in messages:
                flat = torch.cat(sent.pop((sender, receiver, step)))
                for part in slices:
                    number, views = part if isinstance(part, list) else (part, None)
                    e = table.entries[number]
                    for offset, shape, strides in views or [(e.offset, e.shape, e.strides)]:
                        there = memory[e.param].as_strided(shape, strides, offset)
                        assert (there == -1).all(), f"{e.tensor} is written twice"
                        there.copy_(flat[: there.numel()].view(shape))
                        flat = flat[there.numel() :]
                assert not flat.numel(), "both ends of a message agree in its size"
    assert not sent, "all that is sent is received"
    return memories


def assert_filled(table: PieceTable, theirs: ServerTable, memory: Memory) -> None:
    values = hf_values(table)
    for e in theirs.entries:
        box = tuple(slice(a, b) for a, b in zip(*e.box, strict=True))
        there = memory[e.param].as_strided(e.shape, e.strides, e.offset)
        assert torch.equal(there.flatten(), values[e.tensor][box].flatten()), e


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_element_of_every_server_arrives_exactly_once(data: Any) -> None:
    m = config(data.draw(st.sampled_from(sorted(FAMILIES))))
    table = build_piece_table(m, data.draw(layouts(m)))
    shapes = st.sampled_from([(1, 1), (2, 1), (4, 1)] + ([(2, 2), (4, 2)] if m.moe else []))
    servers = [server_tables(m, tp, ep) for tp, ep in data.draw(st.lists(shapes, max_size=3))]
    limit = data.draw(st.sampled_from((1, 30, 400, 1 << 20)))
    plan = plan_slices(table, servers, itemsizes=itemsizes(table), round_bytes=limit)
    for receiver, memory in deliver(plan, servers).items():
        assert_filled(table, servers[receiver.server][receiver.rank], memory)
