"""A delta applied to what it was made from gives the new bits, whatever they mean as numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.api.records import WeightUpdateMeta
from megarl.config.check_parts import rollout_problems
from megarl.config.loader import load_config
from megarl.config.rules import RL, rule_problems
from megarl.weight_sync.receiver.megarl_receiver import messages
from megarl.weight_sync.receiver.megarl_receiver.messages import KINDS, Delta, encode, land

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}
Sizes = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    """So that tensors span chunks and chunks span tensors."""
    with mock.patch.object(messages, "CHUNK", 700):
        yield


def apply(d: Delta, old: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """As a server does, which holds each tensor of the message as a parameter."""
    params, views, end = {}, [], 0
    for i, (itemsize, nbytes) in enumerate(sizes):
        start, end = end, end + nbytes
        dtype, name, count = DTYPES[itemsize], str(i), nbytes // itemsize
        params[name] = old[start:end].clone().view(dtype)
        views.append((start, end, dtype, name, 0, [count], [1]))
    if d.changed:
        land(params, views, d.message(), len(d.rows))
    return torch.cat([p.view(torch.uint8) for p in params.values()])


def changed_at(old: torch.Tensor, sizes: Sizes, which: torch.Tensor) -> torch.Tensor:
    """`old` with one bit flipped in each element of `which` [elements] bool."""
    new, first, byte = old.clone(), 0, 0
    for itemsize, nbytes in sizes:
        mask = which[first : first + nbytes // itemsize]
        new[byte : byte + nbytes].view(BITS[itemsize])[mask] ^= 1
        first, byte = first + mask.numel(), byte + nbytes
    return new


@settings(max_examples=60, deadline=None)
@given(
    fp32=st.lists(st.integers(1, 900), max_size=2),
    bf16=st.lists(st.integers(1, 900), max_size=4),
    fp8=st.lists(st.integers(1, 900), max_size=2),
    share=st.sampled_from((0.0, 0.001, 0.01, 0.1, 0.3, 0.9, 1.0)),
    seed=st.integers(0, 1 << 30),
)
def test_any_change_of_any_tensors(
    fp32: list[int], bf16: list[int], fp8: list[int], share: float, seed: int
) -> None:
    counts = [(4, n) for n in fp32] + [(2, n) for n in bf16] + [(1, n) for n in fp8]
    if not counts:
        return
    torch.manual_seed(seed)
    sizes = [(i, i * n) for i, n in counts]
    old = torch.randint(0, 256, (sum(n for _, n in sizes),), dtype=torch.uint8)
    which = torch.rand(sum(n for _, n in counts)) < share
    new = changed_at(old, sizes, which)
    d = encode(new, old, sizes)
    assert torch.equal(apply(d, old, sizes), new)
    assert d.count == which.numel() and d.changed == int(which.sum())
    assert d.payload.numel() <= new.numel()  # never longer than what it stands for


def test_bits_that_compare_as_numbers_do_not() -> None:
    """-0.0 equals 0.0 and must be sent; a NaN differs from itself and must not."""
    nan, other = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    old = torch.tensor([0.0, float(nan), 1.0, 2.0], dtype=torch.bfloat16).repeat(100)
    new = old.clone()
    new[0], new[5] = -0.0, other
    flat_old, flat_new = old.view(torch.uint8), new.view(torch.uint8)
    sizes = [(2, flat_old.numel())]
    d = encode(flat_new, flat_old, sizes)
    assert d.changed == 2
    assert torch.equal(apply(d, flat_old, sizes), flat_new)


@pytest.mark.parametrize(
    "every, kind, nbytes",
    (
        (0, "gaps", 0),  # nothing changed
        (600, "gaps", 2 * 2 + 4),  # two changes; 599 unchanged between: two skips and two bytes
        (100, "gaps", 7 * 3),
        (4, "bitmap", 175 * 2 + 88),
        (1, "dense", 1400),
    ),
)
def test_the_shortest_words_are_found(every: int, kind: str, nbytes: int) -> None:
    old = torch.zeros(1400, dtype=torch.uint8)
    which = torch.zeros(700, dtype=torch.bool)
    if every:
        which[::every] = True
    d = encode(changed_at(old, [(2, 1400)], which), old, [(2, 1400)])
    assert [KINDS[row[0]] for row in d.rows] == [kind] and d.payload.numel() == nbytes


@pytest.mark.parametrize("gap", (0, 1, 254, 255, 256, 509, 510, 511))
def test_gaps_around_the_longest_a_byte_can_say(gap: int) -> None:
    old = torch.zeros(2 * 700, dtype=torch.uint8)
    which = torch.zeros(700, dtype=torch.bool)
    which[[3, 3 + gap + 1]] = True
    new = changed_at(old, [(2, 1400)], which)
    d = encode(new, old, [(2, 1400)])
    assert KINDS[d.rows[0][0]] == "gaps" and d.rows[0][4] == 2 + gap // 255
    assert torch.equal(apply(d, old, [(2, 1400)]), new)


@pytest.mark.parametrize(
    "fields, said",
    (
        (dict(type="disk", path="/x", delta=True), "type='disk' sends whole weights"),
        (dict(type="disk", path="/x", quantization="fp8_block"), "type='disk' sends whole"),
        (dict(type="nccl", delta=True, quantization="fp8_block"), "of quantized weights"),
        (dict(type="nccl", delta=True, sharded="off"), "changes go by slices"),
        (dict(type="nccl", quantization="int4"), "quantization='int4'"),
        (dict(type="nccl", sharded="yes"), "sharded='yes'"),
    ),
)
def test_what_does_not_go_together(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WeightUpdateMeta(version=1, **fields)


@pytest.mark.parametrize(
    "overrides, said",
    (
        (
            ["weight_sync.options.delta=true", "weight_sync.type=disk"],
            "needs type=distributed",
        ),
        (["weight_sync.options.quantization=fp8_block", "weight_sync.type=disk"], "needs type"),
        (
            ["weight_sync.options.delta=true", "weight_sync.options.quantization=fp8_block"],
            "needs weight_sync.options.quantization=none",
        ),
        (
            ["weight_sync.options.delta=true", "server.type=sglang"],
            "go by slices alone.* use sharded",
        ),
        (["weight_sync.options.quantization=fp8_block", "server.type=sglang"], "needs server.path"),
        (
            ["weight_sync.options.sharded=on", "weight_sync.type=disk"],
            "needs type",
        ),
        (
            ["weight_sync.options.sharded=on", "weight_sync.options.quantization=fp8_block"],
            "keep no FP8",
        ),
        (["weight_sync.options.sharded=off", "weight_sync.options.delta=true"], "leave sharded"),
    ),
)
def test_configurations_that_cannot_work(overrides: list[str], said: str) -> None:
    cfg = load_config(None, ["actor.path=m", *overrides])
    (found,) = [*rollout_problems(cfg), *rule_problems(RL, cfg)]
    assert re.search(rf"^weight_sync\.options\.(delta|quantization|sharded).*{said}", found)


@pytest.mark.parametrize("where", ([200, 0], [9, 1], [255, 3]))
def test_positions_beyond_the_chunk_are_refused(where: list[int]) -> None:
    d = Delta([(0, 2, 10, 2, 2)], torch.tensor([0, 0, 0, 0, *where], dtype=torch.uint8), 2)
    with pytest.raises(ValueError, match="do not fit"):
        apply(d, torch.zeros(20, dtype=torch.uint8), [(2, 20)])


def test_a_length_that_is_another_messages_is_refused() -> None:
    d = Delta([(0, 2, 9, 1, 1)], torch.zeros(3, dtype=torch.uint8), 1)
    with pytest.raises(ValueError, match="changes of 18 bytes in 3 for a message of 20 in 3"):
        apply(d, torch.zeros(20, dtype=torch.uint8), [(2, 20)])
