"""Sums over rows: each row by itself, whatever stands beside it and however rows are taken."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algos import rows, whiten
from megarl.algos.checks import nonfinite_inputs
from megarl.algos.metrics import explained_variance, logp_gap_stats, worst_logp_gaps
from megarl.algos.rows import map_rows, moments, reduce_rows, total, trained_tokens
from megarl.api.batch import Batch, Padded, Tokens

NAMES = ("values", "returns", "prox_logp", "logprobs")


def a_batch(lengths: list[int]) -> Batch:
    g, n = torch.Generator().manual_seed(sum(lengths)), sum(lengths)
    ragged = torch.tensor(lengths)
    tokens = {name: Tokens(torch.randn(n, generator=g), ragged) for name in NAMES}
    tokens["loss_mask"] = Tokens(torch.rand(n, generator=g) < 0.7, ragged)
    tokens["input_ids"] = Tokens(torch.arange(n), ragged)
    padded = {"input_ids": torch.zeros(len(lengths), max([1, *lengths]), dtype=torch.long)}
    width = padded["input_ids"].shape[1]
    mask = torch.arange(width) < ragged[:, None]
    batch = Batch.from_padded(padded | {"attention_mask": mask})
    for name, values in tokens.items():
        batch[name] = values
    return batch


def doubled_and_numbered(taken: torch.Tensor, part: Padded) -> tuple[torch.Tensor, ...]:
    return 2 * part["values"], taken[:, None].expand_as(part["values"])


def numbers(batch: Batch) -> list[torch.Tensor]:
    """What is computed of the rows, or of the whole batch."""
    return [
        trained_tokens(batch),
        reduce_rows(batch, lambda part: [part["values"], part["returns"]], NAMES[:2]),
        reduce_rows(batch, lambda part: [part["values"]], NAMES[:1], "max"),
        torch.tensor(moments(batch, lambda part: part["values"], NAMES[:1]), dtype=torch.float64),
        torch.tensor(explained_variance(batch)),
        whiten(batch, "values").values,
        torch.tensor(list(logp_gap_stats(batch).values())),
        *(made.values for made in map_rows(batch, doubled_and_numbered, NAMES[:1])),
    ]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(sum),
    chunk=st.sampled_from([1, 7, 20]),
)
def test_no_bit_depends_on_how_many_rows_are_taken_at_a_time(lengths, chunk):
    batch = a_batch(lengths)
    with pytest.MonkeyPatch.context() as m:
        want = numbers(batch)
        m.setattr(rows, "CHUNK_TOKENS", chunk)
        got = numbers(batch)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(want[-2], 2 * batch["values"].values)
    assert torch.equal(want[-1], torch.arange(len(lengths)).repeat_interleave(batch.lengths))
    values = batch["values"].values.split(lengths)
    torch.testing.assert_close(want[1][:, 0], torch.stack([v.double().sum() for v in values]))
    tops = [float(v.max()) if len(v) else -math.inf for v in values]
    assert want[2][:, 0].tolist() == tops
    mask = batch["loss_mask"].values
    chosen = batch["values"].values[mask].double()
    assert want[3][0] == len(chosen)
    if len(chosen) > 1:
        assert float(want[3][1]) == pytest.approx(float(chosen.mean()))
        assert float(want[3][2]) == pytest.approx(float(chosen.var() * (len(chosen) - 1)))


def test_a_total_is_rounded_once_and_says_what_is_not_finite():
    assert total(torch.tensor([1e16, 1.0, -1e16, 1.0], dtype=torch.float64)) == 2.0
    assert math.isnan(total(torch.tensor([1.0, math.inf, -math.inf])))


def test_worst_tokens_are_found_in_whatever_rows_they_are():
    batch = a_batch([5, 3, 8, 2])
    gap = (batch["prox_logp"].values.double() - batch["logprobs"].values.double()).abs()
    gap = gap.masked_fill(~batch["loss_mask"].values, -1.0)
    starts = batch["values"].starts
    found = worst_logp_gaps(batch, k=4)
    places = [int(starts[w.row]) + w.position for w in found]
    assert places == gap.topk(4).indices.tolist()


def test_numbers_that_are_not_finite_are_placed_in_their_row():
    batch = a_batch([2, 3, 4])
    values = batch["returns"].values
    values[6], batch["loss_mask"].values[6] = math.inf, True  # row 2, position 1
    finding = str(nonfinite_inputs(batch))
    assert "returns: 1 numbers in rows 2, the first at [2, 1]: inf" in finding
