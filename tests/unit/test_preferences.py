"""Losses over pairs against loops written from the papers' formulas, value and gradient."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.algos.preferences import DPO, BradleyTerry, SimPO, in_pairs, pair_weight


def batch_of_pairs(seed=0, pairs=4, width=10):
    """Pairs whose rows stand in any order, and logp with gradient."""
    g = torch.Generator().manual_seed(seed)
    b = 2 * pairs
    order = torch.randperm(b, generator=g)
    lengths = torch.randint(4, width + 1, (b,), generator=g)
    attention = torch.arange(width) < lengths[:, None]
    batch = {
        "input_ids": torch.zeros(b, width, dtype=torch.long),
        "attention_mask": attention,
        "loss_mask": attention & (torch.arange(width) > 1),
        "ref_logp": -3 * torch.rand(b, width, generator=g, dtype=torch.float64),
        "group_ids": order // 2,
        "chosen": order % 2 == 0,
        "margin": (order // 2).double() / 4,
    }
    logp = -3 * torch.rand(b, width, generator=g, dtype=torch.float64)
    return logp.requires_grad_(), batch


def sides(batch):
    """(row of the chosen, row of the rejected answer) of every pair."""
    for group in batch["group_ids"].unique():
        rows = (batch["group_ids"] == group).nonzero().flatten().tolist()
        yield sorted(rows, key=lambda i: not batch["chosen"][i])


def logsig(x):
    return -math.log(1 + math.exp(-x))


def loop(loss, logp, batch):
    total = 0.0
    for best, rest in sides(batch):
        total_logp, total_ref, n = ({}, {}, {})
        for i in (best, rest):
            at = batch["loss_mask"][i].nonzero().flatten().tolist()
            total_logp[i] = sum(float(logp[i, t]) for t in at)
            total_ref[i] = sum(float(batch["ref_logp"][i, t]) for t in at)
            n[i] = len(at)
        mean = {i: total_logp[i] / n[i] for i in (best, rest)}
        if isinstance(loss, SimPO):
            total -= logsig(loss.beta * (mean[best] - mean[rest]) - loss.gamma)
        else:
            by = n if loss.length_normalized else dict.fromkeys((best, rest), 1)
            h = (total_logp[best] - total_ref[best]) / by[best]
            h -= (total_logp[rest] - total_ref[rest]) / by[rest]
            total += (h - 1 / (2 * loss.beta)) ** 2 if loss.ipo else -logsig(loss.beta * h)
            total -= loss.sft_coef * mean[best]
    return total


LOSSES = [
    DPO(),
    DPO(beta=0.3, sft_coef=0.5),
    DPO(ipo=True),
    DPO(ipo=True, length_normalized=True),
    SimPO(),
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_value_and_gradient_equal_the_loop(loss):
    logp, batch = batch_of_pairs()
    found, _ = loss({"logprobs": logp}, batch)
    assert found.item() == pytest.approx(loop(loss, logp, batch), abs=1e-9)
    assert torch.autograd.gradcheck(
        lambda x: loss({"logprobs": x}, batch)[0], logp, eps=1e-6, atol=1e-6
    )
    outside = torch.autograd.grad(found, logp)[0][~batch["loss_mask"]]
    assert (outside == 0).all()


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_cutting_between_pairs_changes_nothing(loss):
    logp, batch = batch_of_pairs()
    whole = loss({"logprobs": logp}, batch)[0] / pair_weight(batch)
    parts = [
        (batch["group_ids"] == group).nonzero().flatten().tolist()
        for group in batch["group_ids"].unique()
    ]
    cut = sum(
        loss({"logprobs": logp[rows]}, {k: v[rows] for k, v in batch.items()})[0] for rows in parts
    )
    single = [pair_weight({"chosen": batch["chosen"][i : i + 1]}) for i in range(8)]
    assert sum(single) == pair_weight(batch) == 4
    assert (cut / 4).item() == pytest.approx(whole.item(), abs=1e-12)


@pytest.mark.parametrize("with_margin", [False, True])
def test_bradley_terry_scores_the_last_token(with_margin):
    _, batch = batch_of_pairs()
    g = torch.Generator().manual_seed(1)
    values = torch.randn(8, 10, generator=g, dtype=torch.float64).requires_grad_()
    if not with_margin:
        del batch["margin"]
    loss = BradleyTerry(center=0.01)
    found, stats = loss({"values": values}, batch)
    total, right = 0.0, 0
    for best, rest in sides(batch):
        r = [float(values[i, int(batch["attention_mask"][i].sum()) - 1]) for i in (best, rest)]
        margin = float(batch["margin"][best]) if with_margin else 0.0
        total += -logsig(r[0] - r[1] - margin) + 0.01 * (r[0] + r[1]) ** 2
        right += r[0] > r[1]
    assert found.item() == pytest.approx(total, abs=1e-9)
    assert [int(x) for x in stats["accuracy"]] == [right, 4]
    assert torch.autograd.gradcheck(lambda x: loss({"values": x}, batch)[0], values)


@pytest.mark.parametrize(
    "change",
    [
        {"chosen": torch.ones(8, dtype=torch.bool)},
        {"group_ids": torch.zeros(8, dtype=torch.long)},
        {"group_ids": torch.arange(8)},
    ],
)
def test_rows_that_are_no_pairs_are_refused(change):
    logp, batch = batch_of_pairs()
    with pytest.raises(ValueError, match="one chosen and one rejected row"):
        in_pairs(logp.sum(1), batch | change)
