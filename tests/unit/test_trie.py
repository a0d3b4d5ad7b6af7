"""A trie holds every distinct prefix of its sequences once, depth-first."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.parallel.trie import build_trie, sort_rows

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("repeatable")

IDS = st.integers(0, 2) | st.sampled_from([255, 256, 2**31 + 1])  # few, so that prefixes are shared
ROWS = st.lists(st.lists(IDS, max_size=12), max_size=12)


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
    rows = [np.array(r, dtype=np.int64) for r in ([256], [3, 1], [3], [3, 1], [], [255, 9])]
    order, common = sort_rows(rows)
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
