"""Plans that batch packed sequences: every query once, padding bounded, groups few."""

from __future__ import annotations

import random

import pytest
import torch

from megarl.models.attention_batching import GROWTH, SHORT, items, make_plan
from megarl.parallel.packing import zigzag_index

CPU = torch.device("cpu")


def ragged(n: int, longest: int, unit: int = 1) -> list[int]:
    rng = random.Random(n)
    return [unit * rng.randint(1, longest // unit) for _ in range(n)]


@pytest.mark.parametrize("cp", (1, 2, 4))
def test_every_query_is_taken_from_its_own_row(cp: int) -> None:
    lengths = ragged(50, 400, unit=2 * cp)
    for rank in range(cp):
        plan = make_plan(lengths, cp, rank, CPU)
        assert plan.q_index is not None and plan.take is not None
        assert len(plan.q_index) == sum(g.n * g.q_len for g in plan.groups)
        assert torch.equal(plan.q_index[plan.take], torch.arange(sum(lengths) // cp))


@pytest.mark.parametrize("cp", (1, 2, 4))
def test_queries_see_exactly_the_keys_up_to_themselves(cp: int) -> None:
    lengths = [16, 8, 72]
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    for rank in range(cp):
        held = zigzag_index(lengths, cp, rank)  # global position of this rank's tokens
        for item in items(lengths, cp, rank):
            keys = torch.arange(item.k_start, item.k_start + item.k_len)
            queries = held[item.q_start : item.q_start + item.q_len]
            assert torch.equal(queries, keys[-item.q_len :])
            assert owner[keys].eq(owner[queries[0]]).all()
            assert item.k_start == 0 or owner[item.k_start - 1] != owner[item.k_start]


def test_ranks_share_a_sequence_without_overlap() -> None:
    lengths = [8, 24, 16]
    held = torch.cat([zigzag_index(lengths, 4, r) for r in range(4)])
    assert torch.equal(held.sort().values, torch.arange(48))


def test_padding_is_bounded_and_groups_are_few() -> None:
    lengths = ragged(500, 2000)
    plan = make_plan(lengths, 1, 0, CPU)
    padded = sum(g.n * g.q_len for g in plan.groups)
    assert padded <= GROWTH * sum(lengths) + SHORT * len(lengths)
    assert len(plan.groups) <= 20
    assert len(make_plan([12] * 300, 1, 0, CPU).groups) == 1


def test_equal_lengths_need_no_gathering() -> None:
    plan = make_plan([50] * 8, 1, 0, CPU)
    assert plan.q_index is None and plan.k_index is None and plan.take is None
    assert [(g.n, g.q_len, g.k_len) for g in plan.groups] == [(8, 50, 50)]
    assert make_plan([50, 49, 50], 1, 0, CPU).take is not None  # padded
    assert make_plan([50, 10, 50], 1, 0, CPU).take is not None  # two groups, out of order


def test_a_length_that_does_not_cut_into_chunks_is_an_error() -> None:
    with pytest.raises(AssertionError, match="10 tokens must be padded to 4"):
        make_plan([10], 2, 0, CPU)
