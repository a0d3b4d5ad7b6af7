"""Placement and exchange as plain numbers: who works on which row, and which message brings it."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.api.batch import Home
from megarl.parallel import exchange
from megarl.parallel.packing import Cost, place_rows, split_minibatches, units_of

ROWS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)), min_size=1, max_size=24)


@given(rows=ROWS, n=st.integers(1, 5), dp=st.integers(1, 5), seed=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_units_are_whole_and_work_is_even(rows, n, dp, seed):
    lengths, units = [r[0] for r in rows], torch.tensor([r[1] for r in rows])
    n = min(n, len(units_of(units)))
    parts = split_minibatches(units, n, seed=seed)
    assert sorted(r for part in parts for r in part) == list(range(len(rows)))
    assert all(part == sorted(part) for part in parts)
    counts = [len(set(units[part].tolist())) for part in parts]
    assert sum(counts) == len(set(units.tolist())) and max(counts) - min(counts) <= 1

    cost = Cost(3, 1)
    index = place_rows(lengths, units, parts, dp=dp, cost=cost, slot=4)
    again = place_rows(lengths, units, parts, dp=dp, cost=cost, slot=4)
    assert torch.equal(index, again) and ((index >= 0) & (index < dp)).all()
    for part in parts:
        work: Counter[int] = Counter()
        by_unit: Counter[int] = Counter()
        for row in part:
            w = cost(max(1, -(-lengths[row] // 4)) * 4)
            work[int(index[row])] += w
            by_unit[int(units[row])] += w
        for unit in by_unit:
            assert len(set(index[[r for r in part if units[r] == unit]].tolist())) == 1
        assert max(work.values()) <= sum(work.values()) / dp + max(by_unit.values())


def test_mini_batches_of_single_rows_are_a_permutation_cut_evenly():
    order = torch.randperm(11, generator=torch.Generator().manual_seed(5))
    want = [sorted(part.tolist()) for part in order.tensor_split(3)]
    assert split_minibatches(torch.arange(11), 3, seed=5 + 2**32) == want
    assert split_minibatches(torch.arange(4), 1, seed=5) == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match="ppo_n_minibatches=3 exceeds the 2 units of the batch"):
        split_minibatches(torch.tensor([0, 0, 1]), 3, seed=0)


def test_rows_that_had_better_stay_together_do_so_while_work_is_even():
    """Four groups of 4 rows go whole to two indices; of three, one is halved; a single one is
    shared out."""

    def split(groups, dp):
        index = place_rows([9] * 4 * groups, rows, None, dp=dp, together=rows[: 4 * groups] // 4)
        return [len(set(index[4 * i : 4 * i + 4].tolist())) for i in range(groups)], index

    rows = torch.arange(16)
    assert split(4, 2)[0] == [1] * 4
    pieces, index = split(3, 2)
    assert sorted(pieces) == [1, 1, 2] and index.sum() == 6
    assert split(1, 4)[0] == [4]


def test_rows_outside_of_all_mini_batches_have_a_place():
    index = place_rows([5, 5, 5, 5], torch.arange(4), [[0, 1]], dp=2)
    assert sorted(index[:2].tolist()) == sorted(index[2:].tolist()) == [0, 1]


@st.composite
def homes(draw: st.DrawFn) -> tuple[Home, Home, torch.Tensor]:
    ranks, rows = draw(st.integers(2, 6)), draw(st.integers(1, 12))

    def home() -> Home:
        of_rank = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
        held = st.sampled_from(sorted(set(of_rank)))
        of_row = draw(st.lists(held, min_size=rows, max_size=rows))
        return Home(tuple(of_rank), torch.tensor(of_row))

    lengths = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    return home(), home(), torch.tensor(lengths)


@given(case=homes())
@settings(max_examples=100, deadline=None)
def test_every_row_reaches_every_rank_that_needs_it_once(case):
    before, after, lengths = case
    ranks = range(len(before.of_rank))
    plan = exchange.flows(before, after)
    held = [set(before.rows(r).tolist()) for r in ranks]
    had = [set(h) for h in held]
    got: Counter[tuple[int, int]] = Counter()
    entered: Counter[tuple[int, int]] = Counter()
    messages = {}
    for r in ranks:
        mine = exchange.hops(plan, lengths, exchange.CHUNK // 8, r)
        assert mine == sorted(mine, key=lambda hop: hop.order)
        messages |= {hop.order: hop for hop in mine}
    for _, hop in sorted(messages.items()):
        rows = hop.rows.tolist()
        assert len(rows) == 1 or int(lengths[rows].sum()) <= 8
        assert held[hop.src] >= set(rows)  # it has them when its turn comes
        held[hop.dst] |= set(rows)
        for row in rows:
            got[hop.dst, row] += 1
            index = after.of_rank[hop.dst]
            entered[index, row] += after.of_rank[hop.src] != index
    for r in ranks:
        want = set(after.rows(r).tolist())
        assert held[r] >= want
        assert {row for rank, row in got if rank == r} == want - had[r]
    assert set(got.values()) <= {1} and set(entered.values()) <= {0, 1}
