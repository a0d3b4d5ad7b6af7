"""What holds for every plan, packed row and layout, by random search."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.api.batch import Batch, Tokens
from megarl.engine.micro_batch import alignment, build
from megarl.models.flops import sequence_cost
from megarl.models.hf_config import read_hf_config
from megarl.parallel.layout import Layout
from megarl.parallel.packing import (
    Alignment,
    Cost,
    MicroBatchPlan,
    Packed,
    pack,
    padded_length,
    plan_micro_batches,
    slot_lengths,
    unpack,
    zigzag_index,
)

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("repeatable")

LENGTHS = st.lists(st.one_of(st.integers(0, 8), st.integers(0, 80)), min_size=1, max_size=40)
COSTS = st.builds(Cost, st.integers(1, 5), st.integers(0, 3))
LAYOUTS = st.builds(
    Layout, tp=st.sampled_from([1, 2, 3, 4]), cp=st.sampled_from([1, 2, 3, 4]),
    dp=st.integers(1, 4), pp=st.integers(1, 4), sequence_parallel=st.booleans(),
)  # fmt: skip


def parameters(**kw):
    return st.fixed_dictionaries({
        "dp": st.integers(1, 6), "max_tokens": st.sampled_from([1, 16, 64, 10_000]), "cost": COSTS,
        "align": LAYOUTS.map(alignment), "multiple_of": st.sampled_from([1, 2, 4]), **kw,
    })  # fmt: skip


@given(LENGTHS, parameters())
def test_every_sequence_once_within_the_budget_in_equally_many_micro_batches(lens, kw):
    plan = plan_micro_batches(lens, **kw)
    assert len(plan) == kw["dp"]
    assert len({len(mbs) for mbs in plan}) == 1 and len(plan[0]) % kw["multiple_of"] == 0
    assert sorted(i for mbs in plan for mb in mbs for i in mb) == list(range(len(lens)))
    for mbs in plan:
        for mb in mbs:
            total = sum(slot_lengths([lens[i] for i in mb], kw["align"]))
            assert total <= kw["max_tokens"] or len(mb) <= 1
        loads = [work(mb, lens, kw) for mb in mbs]
        assert loads == sorted(loads, reverse=True)
    assert plan == plan_micro_batches(lens, **kw)


def work(rows, lens, kw):
    return sum(kw["cost"](padded_length(lens[i], kw["align"].slot)) for i in rows)


@given(LENGTHS, parameters(), st.data())
def test_groups_stay_whole_and_are_spread_like_long_sequences(lens, kw, data):
    names = [data.draw(st.integers(0, 2 * len(lens))) for _ in lens]
    groups = [[i for i, g in enumerate(names) if g == name] for name in dict.fromkeys(names)]
    plan = plan_micro_batches(lens, groups=groups, **kw)
    assert len({len(mbs) for mbs in plan}) == 1 and len(plan[0]) % kw["multiple_of"] == 0
    bins = [mb for mbs in plan for mb in mbs]
    assert sorted(i for mb in bins for i in mb) == list(range(len(lens)))
    for group in groups:
        assert sum(set(group) <= set(mb) for mb in bins) == 1
    for mb in bins:
        assert mb == sorted(mb)  # so that rows of a pair keep their order
        total = sum(slot_lengths([lens[i] for i in mb], kw["align"]))
        assert total <= kw["max_tokens"] or len({names[i] for i in mb}) <= 1
    loads = [sum(work(mb, lens, kw) for mb in mbs) for mbs in plan]
    assert max(loads) - min(loads) <= max(work(group, lens, kw) for group in groups)
    alone = [[i] for i in range(len(lens))]
    assert plan_micro_batches(lens, groups=alone, **kw) == plan_micro_batches(lens, **kw)


@given(LENGTHS, parameters())
def test_no_rank_has_more_than_the_mean_and_one_sequence(lens, kw):
    dp = kw["dp"]
    loads = [sum(work(mb, lens, kw) for mb in mbs) for mbs in plan_micro_batches(lens, **kw)]
    dearest = max(work([i], lens, kw) for i in range(len(lens)))
    assert max(loads) <= sum(loads) / dp + (1 - 1 / dp) * dearest
    assert max(loads) - min(loads) <= dearest


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 3), COSTS)
def test_no_rank_has_more_than_a_third_above_the_best_possible(lens, dp, cost):
    plan = plan_micro_batches(lens, dp=dp, max_tokens=10_000, cost=cost)
    heaviest = max(sum(cost(lens[i]) for mb in mbs for i in mb) for mbs in plan)
    assert heaviest <= (4 / 3 - 1 / (3 * dp)) * best(tuple(cost(n) for n in lens), dp)


@cache
def best(costs: tuple[int, ...], bins: int) -> int:
    """The smallest possible heaviest bin, by trying everything."""
    states = {(0,) * bins}
    for c in costs:
        states = {
            tuple(sorted((*s[:k], s[k] + c, *s[k + 1 :]))) for s in states for k in range(bins)
        }
    return min(s[-1] for s in states)


@given(LENGTHS, LAYOUTS)
def test_slots_hold_their_sequences_and_cut_into_equal_shares(lens, layout):
    align = alignment(layout)
    slots = slot_lengths(lens, align)
    assert all(n <= slot for n, slot in zip(lens, slots, strict=True))
    assert sum(slots) - sum(lens) <= len(lens) * align.slot + align.row
    share, rest = divmod(sum(slots), layout.cp)
    assert rest == 0 and (not layout.sequence_parallel or share % layout.tp == 0)
    if layout.cp > 1:
        assert all(slot % (2 * layout.cp) == 0 for slot in slots)


@given(LENGTHS, st.integers(1, 4))
def test_shares_together_are_the_sequences_and_unpack_puts_them_back(lens, cp):
    align = Alignment(2 * cp, 2 * cp)
    width = max(lens)
    ids = torch.arange(1, len(lens) * width + 1).view(len(lens), width)
    ids = torch.where(torch.arange(width) < torch.tensor(lens)[:, None], ids, 0)
    shares = [pack(ids, lens, align=align, cp=cp, cp_rank=r) for r in range(cp)]
    assert len({s.input_ids.numel() for s in shares}) == 1

    # what each token would say about its next one, gathered rank after rank
    said = torch.cat([s.labels for s in shares])
    want = ids.clone()
    want[:, :1] = 0
    for share in shares:
        assert torch.equal(unpack(said, share), want)
    # and each rank holds its tokens at their places in their sequences
    slots = slot_lengths(lens, align)
    whole = pack(ids, lens, align=align)
    for rank, share in enumerate(shares):
        held = zigzag_index(slots, cp, rank) if cp > 1 else torch.arange(sum(slots))
        assert torch.equal(share.input_ids, whole.input_ids[held])
        assert torch.equal(share.position_ids, whole.position_ids[held])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 6))
def test_zigzag_shares_cover_everything_once_and_are_balanced(units, cp):
    slots = [2 * cp * n for n in units]
    held = [zigzag_index(slots, cp, r) for r in range(cp)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(sum(slots)))
    whole = pack(torch.zeros(len(slots), 1, dtype=torch.long), slots).position_ids
    seen = [int((whole[h] + 1).sum()) for h in held]  # keys that the rank's queries see
    assert len(set(seen)) == 1


@given(LAYOUTS)
def test_ranks_and_coordinates_are_inverse(layout):
    assert len(set(layout.all_coords)) == layout.world_size
    for rank, c in enumerate(layout.all_coords):
        assert layout.dense_rank(pp=c.pp, tp=c.tp, dp=c.dp, cp=c.cp) == rank


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_chunks_hold_every_layer_once_in_order(pp, vpp, data):
    n = pp * vpp
    split = tuple(data.draw(st.lists(st.integers(1, 5), min_size=n, max_size=n)))
    for layout in (Layout(pp=pp, vpp=vpp, split=split), Layout(pp=pp, vpp=vpp)):
        layers = sum(split) if layout.split else 3 * n
        chunks = [layout.layers(layers, p, v) for v in range(vpp) for p in range(pp)]
        assert [i for c in chunks for i in c] == list(range(layers))
        assert [len(c) for c in chunks] == list(layout.split or [3] * n)


def test_a_split_of_another_number_of_layers_is_an_error():
    with pytest.raises(ValueError, match=r"6 layers do not divide .* chunks of \[2, 3\]"):
        Layout(pp=2, split=(2, 3)).layers(6, 0)


BATCH = 512
QWEN3_8B = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=4096, head_dim=128,
    intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=151936, max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6,
)  # fmt: skip
LAYOUTS = {
    "dp8": Layout(dp=8),
    "tp8 sp dp8": Layout(tp=8, dp=8, sequence_parallel=True),
    "tp8 sp cp2 dp4": Layout(tp=8, cp=2, dp=4, sequence_parallel=True),
    "tp2 sp cp4 dp8": Layout(tp=2, cp=4, dp=8, sequence_parallel=True),
}


def gsm8k_like(rng: random.Random) -> int:
    """Draws lengths of a question of about 100 tokens and a worked answer of about 150."""
    return round(rng.lognormvariate(4.6, 0.35)) + round(rng.lognormvariate(5.0, 0.45))


def long_tail(rng: random.Random) -> int:
    """Draws lengths of reasoning: a median of 1500 tokens, a tail cut at 32k."""
    return 100 + min(32_000, round(rng.lognormvariate(7.3, 1.1)))


# lengths and the token budget of one device
DISTRIBUTIONS: dict[str, tuple[Callable[[random.Random], int], int]] = {
    "GSM8K-like": (gsm8k_like, 8192),
    "long tail": (long_tail, 32768),
}


def qwen3_cost() -> Cost:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(QWEN3_8B))
        return sequence_cost(read_hf_config(directory))


def make_plan(lengths: Sequence[int], layout: Layout, budget: int, by: Cost) -> MicroBatchPlan:
    return plan_micro_batches(
        lengths, dp=layout.dp, max_tokens=budget * layout.cp, align=alignment(layout), cost=by
    )


def efficiency(lengths: Sequence[int], layout: Layout, plan: MicroBatchPlan) -> float:
    """Returns useful tokens / computed tokens; dummies of empty micro-batches count as computed."""
    rows = [slot_lengths([lengths[i] for i in mb], alignment(layout)) for mbs in plan for mb in mbs]
    return sum(lengths) / sum(map(sum, rows))


def imbalance(lengths: Sequence[int], plan: MicroBatchPlan, work: Cost) -> float:
    """Returns the heaviest rank's work / the mean: the others wait for it at the end of a step."""
    loads = [sum(work(lengths[i]) for mb in mbs for i in mb) for mbs in plan]
    return max(loads) * len(loads) / sum(loads)


@pytest.mark.parametrize("lengths", DISTRIBUTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_real_lengths_fill_micro_batches_and_balance_ranks(lengths, layout):
    draw, budget = DISTRIBUTIONS[lengths]
    shape, work, rng = LAYOUTS[layout], qwen3_cost(), random.Random(0)
    lens = [draw(rng) for _ in range(BATCH)]
    plan = make_plan(lens, shape, budget, work)
    assert efficiency(lens, shape, plan) >= 0.97
    assert imbalance(lens, plan, work) <= 1.01
    if lengths == "long tail":  # where the square counts
        other = make_plan(lens, shape, budget, Cost())
        assert imbalance(lens, plan, work) < imbalance(lens, other, work)


def test_passes_over_the_same_rows_share_what_is_packed():
    ids = torch.arange(12).view(3, 4)
    batch = Batch.from_padded({"input_ids": ids, "attention_mask": torch.ones_like(ids).bool()})

    def packed(of: Batch, cut: list[list[int]]) -> list[Packed]:
        return [mb.packed for mb in build(of, cut, Alignment())]

    cut = [[0, 2], [1]]
    first, again = packed(batch, cut), packed(batch.select(range(3), ["input_ids"]), cut)
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert packed(batch, [[0], [1]])[1] is first[1]
    assert packed(batch, [[0], [1]])[0].input_ids.tolist() == ids[0].tolist()
    part = packed(batch.select([1, 2]), [[1]])  # its rows have other numbers
    assert part[0].input_ids.tolist() == ids[2].tolist()
    batch["input_ids"] = Tokens(batch["input_ids"].values + 1, batch["input_ids"].lengths)
    assert packed(batch, cut)[1].input_ids.tolist() == (ids[1] + 1).tolist()
