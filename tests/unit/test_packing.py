"""Micro-batch plans and the packed layout, with plain numbers."""

import pytest
import torch

from megarl.api.batch import row_lengths
from megarl.parallel.packing import (
    Alignment,
    Cost,
    pack,
    plan_micro_batches,
    unpack,
)


def test_tokens_are_balanced_over_ranks():
    lens = [100, 1, 1, 1, 50, 50, 1, 1, 1, 1]
    plan = plan_micro_batches(lens, dp=2, max_tokens=1000)
    loads = [sum(lens[i] for mb in mbs for i in mb) for mbs in plan]
    assert abs(loads[0] - loads[1]) <= 1


def test_micro_batches_of_one_rank_are_balanced():
    plan = plan_micro_batches([10, 10, 10, 10, 10, 10], dp=1, max_tokens=40)
    assert [len(mb) for mb in plan[0]] == [3, 3]


def test_fewer_sequences_than_ranks_leave_empty_micro_batches():
    plan = plan_micro_batches([5, 7], dp=4, max_tokens=100)
    assert plan == [[[1]], [[0]], [[]], [[]]]


def test_a_sequence_above_the_budget_is_alone():
    plan = plan_micro_batches([50, 3, 3], dp=1, max_tokens=10)
    assert plan == [[[0], [1, 2]]]


def test_attention_makes_long_sequences_dear():
    lens = [100, *[50] * 4]
    plan = plan_micro_batches(lens, dp=2, max_tokens=1000, cost=Cost(1, 1))
    assert plan == [[[0]], [[1, 2, 3, 4]]]  # 10100 beside 4 * 2550
    plan = plan_micro_batches(lens, dp=2, max_tokens=1000)
    assert sorted(len(mbs[0]) for mbs in plan) == [2, 3]  # 150 tokens each


def test_first_fit_is_used_where_balance_would_break_the_budget():
    lens = [6, 6, 4, 4, 4]  # balance over two: 6+4+4 = 14 | 6+4 = 10; the budget of 12 fits exactly
    plan = plan_micro_batches(lens, dp=1, max_tokens=12)
    assert plan == [[[0, 1], [2, 3, 4]]]


def test_zero_budget_is_an_error():
    with pytest.raises(ValueError, match="max_tokens_per_mb=0"):
        plan_micro_batches([1], dp=1, max_tokens=0)


def test_pack_layout():
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0], [3, 0, 0, 0]])
    p = pack(ids, [3, 2, 1], align=Alignment(slot=2, row=2))
    assert p.input_ids.tolist() == [5, 6, 7, 0, 8, 9, 3, 0]
    assert p.labels.tolist() == [6, 7, 0, 0, 9, 0, 0, 0]
    assert p.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert p.cu_seqlens.tolist() == [0, 4, 6, 8] and p.cu_seqlens.dtype == torch.int32
    assert p.slots == [4, 2, 2]


def test_unpack_puts_what_is_said_about_a_token_beside_it():
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0], [3, 0, 0, 0]])
    p = pack(ids, [3, 2, 1], align=Alignment(slot=2, row=2))
    about_next = p.labels.float().requires_grad_()  # "says" the next token itself
    out = unpack(about_next, p)
    assert out.tolist() == [[0, 6, 7, 0], [0, 9, 0, 0], [0, 0, 0, 0]]
    out.sum().backward()
    assert about_next.grad is not None
    assert about_next.grad.tolist() == [1, 1, 0, 0, 1, 0, 0, 0]
    wide = unpack(torch.arange(16.0).reshape(8, 2), p)
    assert wide.shape == (3, 4, 2) and wide[1, 1].tolist() == [8, 9]


@pytest.mark.parametrize("align", [1, 4])
def test_an_empty_micro_batch_is_one_dummy_slot(align):
    p = pack(torch.zeros(0, 5, dtype=torch.long), [], align=Alignment(align, align))
    assert p.input_ids.tolist() == [0] * align and p.cu_seqlens.tolist() == [0, align]
    assert unpack(torch.ones(align), p).shape == (0, 5)


def test_an_empty_row_is_kept():
    p = pack(torch.tensor([[0, 0], [4, 5]]), [0, 2])
    assert p.cu_seqlens.tolist() == [0, 1, 3]
    assert unpack(torch.ones(3), p).tolist() == [[0, 0], [0, 1]]


def test_batches_that_are_not_right_padded_are_refused():
    ids = torch.zeros(2, 3, dtype=torch.long)
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]]).bool()
    with pytest.raises(ValueError, match="row 1 is not right-padded"):
        row_lengths({"input_ids": ids, "attention_mask": mask})
    with pytest.raises(ValueError, match="no 'attention_mask'"):
        row_lengths({"input_ids": ids})
    with pytest.raises(ValueError, match="empty"):
        row_lengths({"input_ids": ids[:0], "attention_mask": mask[:0]})


def test_groups_stay_in_one_micro_batch() -> None:
    lens, groups = [9, 3, 4, 8, 2, 5, 7, 6], [[0, 7], [1, 4], [2, 6], [3, 5]]
    for budget in (1, 12, 20, 1000):
        plan = plan_micro_batches(lens, dp=2, max_tokens=budget, groups=groups)
        mbs = [mb for rank in plan for mb in rank]
        assert sorted(row for mb in mbs for row in mb) == list(range(8))
        for group in groups:
            assert sum(set(group) <= set(mb) for mb in mbs) == 1
        for mb in mbs:
            assert len(mb) <= 2 or sum(lens[row] for row in mb) <= budget
