"""A trie holds every distinct prefix of its sequences once, depth-first; micro-batches are planned
by what their tries hold, and packed as these."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.engine import OptimizerConfig, TrainEngineConfig
from megarl.engine.setup import resolve
from megarl.parallel.packing import Alignment, Cost, unpack
from megarl.parallel.trie import build_trie, pack_trie, plan_tries, sort_rows, token_bytes
from tests.tiny import save_tiny

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("repeatable")

IDS = st.integers(0, 2) | st.sampled_from([255, 256, 2**31 + 1])  # few, so that prefixes are shared
COST = Cost(3, 2)
ROWS = st.lists(st.lists(IDS, max_size=12), max_size=12)


def as_bytes(row):
    return token_bytes(torch.tensor(row, dtype=torch.long))


def padded(rows):
    width = max((len(r) for r in rows), default=0)
    return torch.tensor([[*r, *[7] * (width - len(r))] for r in rows]).reshape(len(rows), width)


@given(ROWS, st.sampled_from([1, 4]))
def test_every_distinct_prefix_stands_once(rows, unit):
    trie = build_trie(padded(rows).long(), [len(r) for r in rows], multiple_of=unit)
    prefixes = {tuple(r[: t + 1]) for r in rows for t in range(len(r))}
    assert trie.tokens == len(prefixes)
    total = len(trie.input_ids)
    assert total % unit == 0 and 0 <= total - max(1, trie.tokens) < unit
    found = {}
    for i, row in enumerate(rows):
        for t, x in enumerate(row):
            node = int(trie.place[i, t])
            assert found.setdefault(tuple(row[: t + 1]), node) == node
            assert (trie.input_ids[node], trie.depth[node]) == (x, t)
            assert trie.parent[node] == (trie.place[i, t - 1] if t else node)
    assert sorted(found.values()) == list(range(trie.tokens))


def test_tokens_with_other_numbers_beside_them_are_apart():
    """Of three equal rows one has another number beside its second token."""
    ids, beside = torch.full((3, 3), 5), torch.zeros(3, 3, 2, 2, dtype=torch.int16)
    beside[1, 1, 1, 0] = -1
    trie = build_trie(ids, [3] * 3, beside=beside)
    assert trie.tokens == 5
    assert torch.equal(trie.place[0], trie.place[2]) and trie.place[1, 0] == trie.place[0, 0]
    assert set(trie.place[1, 1:].tolist()).isdisjoint(trie.place[0].tolist())


@given(ROWS, st.sampled_from([1, 4]))
def test_segments_are_runs_without_forks_depth_first_and_heaviest_first(rows, unit):
    trie = build_trie(padded(rows).long(), [len(r) for r in rows], multiple_of=unit)
    ends, at = [s.end for s in trie.segments], 0
    for i, s in enumerate(trie.segments):
        assert s.start == at < s.end
        at = s.end
        assert (trie.parent[s.start + 1 : s.end] == torch.arange(s.start, s.end - 1)).all()
        assert s.parent is None or s.parent < i
        above = s.start if s.parent is None else trie.segments[s.parent].end - 1
        assert trie.parent[s.start] == above
        assert trie.depth[s.start] == (0 if s.parent is None else trie.depth[above] + 1)
    assert at == len(trie.input_ids)
    for i in reversed(range(len(trie.segments))):
        if (p := trie.segments[i].parent) is not None:
            ends[p] = max(ends[p], ends[i])
    by_parent = {}
    for s, end in zip(trie.segments, ends, strict=True):
        if s.start < trie.tokens:
            by_parent.setdefault(s.parent, []).append((s.start, end))
    for children in by_parent.values():
        assert all(a[1] == b[0] for a, b in pairwise(children))
        sizes = [end - start for start, end in children]
        assert sizes == sorted(sizes, reverse=True)


def test_rows_are_sorted_by_their_numbers_and_equal_ones_keep_their_order():
    rows = ([256], [3, 1], [3], [3, 1], [], [255, 9])
    order, common = sort_rows([as_bytes(r) for r in rows])
    assert order.tolist() == [4, 2, 1, 3, 5, 0]
    assert common.tolist() == [0, 0, 1, 2, 0, 0]


def test_the_trie_of_a_group_holds_its_prompt_once():
    """Two prompts of 3 and 2 tokens; one sequence ends where others go on, one comes twice."""
    rows = [[5, 6, 7, 1, 2], [8, 9, 4], [5, 6, 7, 1, 3], [5, 6, 7], [8, 9, 4], [5, 6, 7, 2]]
    trie = build_trie(padded(rows).long(), [len(r) for r in rows], multiple_of=4)
    assert trie.input_ids.tolist() == [5, 6, 7, 1, 2, 3, 2, 8, 9, 4, 0, 0]
    assert [tuple(s) for s in trie.segments] == [
        (0, 3, None), (3, 4, 0), (4, 5, 1), (5, 6, 1), (6, 7, 0), (7, 10, None), (10, 12, None),
    ]  # fmt: skip
    assert trie.depth.tolist() == [0, 1, 2, 3, 4, 4, 3, 0, 1, 2, 0, 1]
    assert trie.place[3, :3].tolist() == [0, 1, 2] and trie.place[4, :3].tolist() == [7, 8, 9]


@given(ROWS, st.sampled_from([1, 5, 12, 100]), st.integers(0, 3), st.data())
def test_planned_micro_batches_hold_whole_units_within_the_budget(rows, budget, more, data):
    ids = [as_bytes(r) for r in rows]
    names = [data.draw(st.integers(0, 2 * len(rows))) for _ in rows]
    units = [[i for i, n in enumerate(names) if n == name] for name in dict.fromkeys(names)]
    for groups in (None, units):
        needs = plan_tries(ids, max_tokens=budget, cost=COST, units=groups)
        plan = needs.micro_batches(needs.count + more)
        assert len(plan) == needs.count + more
        assert sorted(i for mb in plan for i in mb) == list(range(len(rows)))
        for mb in plan:
            tokens = build_trie(padded(rows).long()[mb], [len(rows[i]) for i in mb]).tokens
            assert tokens <= budget or len({names[i] if groups else i for i in mb}) == 1
        for unit in groups or ():
            assert sum(set(unit) <= set(mb) for mb in plan) == 1
        for item in needs.items:
            assert item.work >= trie_work([rows[i] for i in item.rows])


def trie_work(rows):
    """The work of a trie: tokens, and pairs of a token and those it attends to, 2 (t + 1) - 1."""
    nodes = {tuple(r[: t + 1]) for r in rows for t in range(len(r))}
    return sum(3 + 2 * (2 * len(n) - 1) for n in nodes)


def test_the_work_of_an_item_counts_what_is_shared_once():
    rows = [[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 5]]
    (item,) = plan_tries([as_bytes(r) for r in rows], max_tokens=100, cost=COST).items
    assert (item.size, item.work) == (5, trie_work(rows))


def test_what_does_not_fit_is_cut_between_prompts_and_in_even_parts():
    """Two groups of 4 with prompts of 10 tokens and answers of 5; then the longer group alone."""
    prompts = [[7] * 10, [8] * 10]
    rows = [[*prompts[i % 2], 9, i, i, i, i] for i in range(8)]
    ids = [as_bytes(r) for r in rows]
    plan = plan_tries(ids, max_tokens=35).micro_batches(2)
    assert sorted(plan) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    halves = plan_tries(ids[::2], max_tokens=25).micro_batches(2)
    assert sorted(map(len, halves)) == [2, 2]
    with pytest.raises(ValueError, match=r"mb_spec\.max_tokens_per_mb=0"):
        plan_tries(ids, max_tokens=0)


@pytest.mark.parametrize("with_ids", [False, True])
def test_answers_about_the_nodes_reach_every_row(with_ids):
    """Each question is about a token, after its parent; one for each node, or with ids that rows
    have each for itself one for each token of each row."""
    rows = [[5, 6, 7, 1, 2], [8], [5, 6, 7, 1, 3], [5, 6, 7], [5, 6, 7], []]
    ids, lengths = padded(rows).long(), [len(r) for r in rows]
    given_ids = torch.arange(ids.numel()).view(*ids.shape, 1) if with_ids else None
    packed = pack_trie(ids, lengths, align=Alignment(row=4), given=given_ids)
    trie = packed.trie
    assert len(packed.at) == len(packed.labels) == (12 if with_ids else len(packed.input_ids))
    depth = unpack(trie.depth[packed.at] + 1, packed)
    real = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    assert torch.equal(packed.valid, real & (torch.arange(ids.shape[1]) > 0))
    assert torch.equal(depth, torch.arange(ids.shape[1]).where(packed.valid, 0))
    assert torch.equal(unpack(packed.labels, packed), ids.where(packed.valid, 0))
    if with_ids:
        want = given_ids[..., 0].where(packed.valid, 0)
        assert torch.equal(unpack(packed.given, packed)[..., 0], want)
    flat = packed.token[packed.token >= 0]
    assert torch.equal(ids.flatten()[flat], packed.input_ids[: trie.tokens])
    alone = pack_trie(ids[1:2], [1], given=None if given_ids is None else given_ids[1:2])
    assert len(alone.labels) == 1 and not alone.valid.any()


def test_a_frozen_model_leaves_the_choice_to_the_log_of_the_trained_one(tmp_path: Path) -> None:
    path = str(save_tiny(tmp_path / "model", "qwen3"))
    for optimizer in (OptimizerConfig(), None):
        sharing = resolve(TrainEngineConfig(path=path, optimizer=optimizer), 1).sharing
        assert sharing is not None and sharing.logged == (optimizer is None)
