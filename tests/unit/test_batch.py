"""Batch in one process: ragged fields in and out, and sums that depend on their row alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.api.batch import Batch, Padded, Tokens
from megarl.api.tokens import concat_padded

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def padded(lengths: list[int], seed: int = 0) -> Padded:
    g = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths) + 2)
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return {
        "input_ids": torch.randint(1, 99, shape, generator=g) * mask,
        "attention_mask": mask,
        "versions": torch.randint(0, 5, shape, generator=g, dtype=torch.int32).where(mask, -1),
        "logprobs": torch.randn(shape, generator=g) * mask,
        "routed_experts": torch.randint(0, 9, (*shape, 2, 3), generator=g).byte()
        * mask[..., None, None],
        "rewards": torch.randn(shape[0], generator=g),
    }


def same(got: Padded, want: Padded, lengths: list[int]) -> None:
    """Equal up to the columns that no row reaches."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        if value.ndim > 1:
            value = value[:, : max(lengths, default=0)]
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


@given(lengths=LENGTHS)
@settings(max_examples=25, deadline=None)
def test_padded_in_padded_out(lengths):
    want = padded(lengths)
    batch = Batch.from_padded(want)
    assert batch.lengths.tolist() == lengths and len(batch["input_ids"].values) == sum(lengths)
    assert "attention_mask" not in batch and set(batch) == set(want) - {"attention_mask"}
    same(batch.padded(), want, lengths)
    odd = list(range(len(lengths)))[1::2]
    part = {k: v[odd] for k, v in want.items()}
    some = [lengths[i] for i in odd]
    same(batch.padded(odd), part, some)
    same(batch.select(odd).padded(), part, some)
    same(batch.fetch(odd), part, some)
    kept = batch.keep(torch.tensor([i in odd for i in range(len(lengths))]))
    same(kept.padded(), part, some)


@given(lengths=LENGTHS, room=st.integers(1, 30))
@settings(max_examples=25, deadline=None)
def test_chunks_are_the_rows_in_order_within_bounds(lengths, room):
    batch = Batch.from_padded(padded(lengths))
    found, values = [], []
    for rows, part in batch.chunks(room, ["logprobs"]):
        assert part.keys() == {"logprobs", "attention_mask"}
        assert part["logprobs"].numel() <= room or len(rows) == 1
        found += rows.tolist()
        values.append(Tokens.from_padded(part["logprobs"], batch.lengths[rows]))
    assert found == list(range(len(lengths)))
    assert torch.equal(Tokens.concat(values).values, batch["logprobs"].values)


def test_episodes_join_in_the_order_of_their_ids():
    parts = [padded([3, 1], seed=1), padded([5], seed=2), padded([0, 2], seed=3)]
    for part, episode in zip(parts, (7, 2, 4)):
        part["episode_ids"] = torch.full((len(part["rewards"]),), episode)
    batch = Batch.from_local(parts)
    assert batch.lengths.tolist() == [5, 0, 2, 3, 1]
    for number, i in enumerate((1, 2, 0)):
        rows = (batch["episode_ids"] == (2, 4, 7)[number]).nonzero().flatten()
        same(batch.padded(rows), parts[i], parts[i]["attention_mask"].sum(1).tolist())


@given(rows=st.lists(st.lists(st.floats(-1e6, 1e6, width=32), max_size=40), min_size=2, max_size=6))
@settings(max_examples=25, deadline=None)
def test_a_row_sum_depends_on_the_row_alone(rows):
    lengths = torch.tensor([len(r) for r in rows])
    values = torch.tensor([x for r in rows for x in r])
    mask = torch.arange(40) < lengths[:, None]
    whole = {"input_ids": mask.long(), "attention_mask": mask}
    batch = Batch.from_padded(whole)
    batch["x"] = Tokens(values, lengths)

    def total(row: Padded) -> torch.Tensor:
        assert torch.get_num_threads() == 1  # threads would cut a long sum
        return row["x"].double().sum()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    sums = batch.row_sums(total, ["x"])
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
    alone = [batch.select([i]).row_sums(total) for i in range(len(rows))]
    assert torch.equal(sums, torch.cat(alone))
    assert sums.tolist() == pytest.approx([math.fsum(map(float, r)) for r in rows], abs=1e-6)


def test_rows_that_are_dropped_leave_no_trace_in_mini_batches_or_placement():
    batch = Batch.from_padded(padded([1, 2, 3, 4]))
    batch["unit_ids"] = torch.tensor([0, 0, 1, 1])
    batch.minibatches, batch.placed = [[0, 1], [2, 3]], True
    kept = batch.keep(torch.tensor([True, False, True, True]))
    assert kept.minibatches is None and not kept.placed
    assert kept.unit_ids.tolist() == [0, 1, 1] and kept.lengths.tolist() == [1, 3, 4]


def test_what_does_not_fit_is_named():
    batch = Batch.from_padded(padded([2, 3]))
    with pytest.raises(ValueError, match=r"batch\['x'\] = \(3,\): a per-sample field is a Tensor"):
        batch["x"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"batch\['x'\] = \(2, 5\): .* Tokens.from_padded\(value"):
        batch["x"] = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"batch\['x'\] = list"):
        batch["x"] = [1.0, 2.0]
    with pytest.raises(ValueError, match="Tokens of 2 rows do not fit the lengths"):
        batch["x"] = Tokens(torch.zeros(5), torch.tensor([3, 2]))
    with pytest.raises(ValueError, match="4 values do not make rows of 5 tokens"):
        Tokens(torch.zeros(4), torch.tensor([3, 2]))
    with pytest.raises(KeyError, match="the batch has no 'y'"):
        batch["y"]
    with pytest.raises(ValueError, match="does not hold all of them"):
        batch.padded([2])
    for rows in ([1, 0], [0, 0], [0, 2], [-1]):
        with pytest.raises(ValueError, match="they must ascend, from 0 to 1"):
            batch.select(rows)
    with pytest.raises(ValueError, match=r"a mask of rows has shape \(3,\), not \[2\]"):
        batch.keep(torch.ones(3).bool())
    with pytest.raises(ValueError, match="no rank brings a row"):
        Batch.from_local(None)
    other = {k: v for k, v in padded([1]).items() if k != "logprobs"}
    with pytest.raises(
        ValueError, match=r"rank 0: .* not have the same fields: logprobs differ.*\[b, S\] and none"
    ):
        Batch.from_local([padded([2]), other])
    nameless = {("ids" if k == "input_ids" else k): v for k, v in padded([1]).items()}
    for broken, why in (
        (nameless, "the batch has no 'input_ids'"),
        (padded([2]) | {"rewards": torch.zeros(2)}, "'rewards' has 2 rows, input_ids has 1"),
        (padded([2]) | {"name": ["x"]}, "'name' is a list"),
        (padded([2]) | {"x": torch.ones(1, 3)}, r"'x' of shape \(1, 3\): .* \[B, S\] = \[1, 4\]"),
        (padded([2]) | {"attention_mask": torch.ones(1, 3)}, r"attention_mask \(1, 3\) and input"),
    ):
        with pytest.raises(ValueError, match=f"rank 0: {why}"):
            Batch.from_local([padded([1]), broken])


def test_joined_batches_are_padded_on_the_right_with_what_stands_for_nothing() -> None:
    short, long = padded([2]), padded([5])
    joined = concat_padded([short, long])
    assert joined["attention_mask"].tolist() == [[True] * 2 + [False] * 5, [True] * 5 + [False] * 2]
    assert joined["versions"][0, 2:].eq(-1).all() and joined["input_ids"][0, 2:].eq(0).all()
    assert torch.equal(joined["routed_experts"][0, :2], short["routed_experts"][0, :2])
