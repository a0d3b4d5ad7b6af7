"""Loss and gradient of every surrogate, by every ratio and mean, and of the critic: the same for
every way to cut, order and pad the rows, and equal to finite differences in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megarl.algos import LOSS_WEIGHTS, PolicyLoss, critic_loss, sft_loss
from megarl.algos.kl import KL_TERMS, kl_term
from megarl.algos.losses import aggregate
from megarl.algos.policy_loss import Correction
from megarl.algos.surrogates import RATIOS
from megarl.api.tokens import select

from .test_losses import make_batch
from .test_surrogates import CASES, SURROGATES, batch_of_one_advantage

CUTS = {
    "micro-batches": [[3, 2], [0], [5, 4, 1]],
    "a row each": [[0], [1], [2], [3], [4], [5]],
    "another order": [[4, 0, 5, 2, 1, 3]],
}
CORRECTION = Correction(weight="token", weight_cap=1.3, mask="geometric", mask_low=0.9, veto=0.3)
CRITICS = list(itertools.product((None, 0.2), (None, 0.7)))
# by what each is differentiated; the others stop the gradient of the ratio
OF_RATIO, OF_LOGP = ("clip", "sapo", "gmpo", "unclipped"), ("cispo", "topr", "log_likelihood")


def widened(values: torch.Tensor, by: int) -> torch.Tensor:
    """[b,S] with columns of padding, which hold anything where they hold numbers."""
    fill = math.nan if values.is_floating_point() else 0
    return torch.nn.functional.pad(values, (0, by), value=fill)


def mean(fn, weight, x, batch, parts, *, pad=0):
    """(loss, gradient) by x [b,S] of the mean that fn and weight make of the parts."""
    x = x.detach().clone().requires_grad_()
    total, weights = 0.0, 0.0
    for rows in parts:
        part = select(batch, rows)
        width = part["input_ids"].shape[1]
        part = {k: widened(v, pad) if v.ndim == 2 else v for k, v in part.items()}
        total = total + fn(widened(x[rows][:, :width], pad), part)
        weights += weight(part)
    (total / weights).backward()
    return float(total.detach()) / weights, x.grad


def same_in_every_cut(fn, weight, x, batch):
    whole = mean(fn, weight, x, batch, [list(range(6))])
    for name, parts in CUTS.items():
        for pad in (0, 9):
            loss, grad = mean(fn, weight, x, batch, parts, pad=pad)
            assert loss == pytest.approx(whole[0], rel=1e-12, abs=1e-12), (name, pad)
            torch.testing.assert_close(grad, whole[1], rtol=1e-11, atol=1e-13, msg=name)
    assert whole[1].count_nonzero() > 6


@pytest.mark.parametrize("agg", LOSS_WEIGHTS)
@pytest.mark.parametrize(("name", "ratio"), CASES)
def test_a_policy_loss_does_not_depend_on_cuts_order_and_padding(name, ratio, agg):
    logp, batch = batch_of_one_advantage()
    loss = PolicyLoss(
        surrogate=SURROGATES[name],
        ratio=ratio,
        correction=CORRECTION,
        kl_coef=0.1,
        entropy_coef=0.01,
        loss_agg=agg,
    )

    def fn(x, part):
        return loss({"logprobs": x, "entropy": x.square()}, part)[0]

    same_in_every_cut(fn, LOSS_WEIGHTS[agg], logp, batch)


def values_of(batch):
    g = torch.Generator().manual_seed(2)
    for name in ("values", "returns"):
        batch[name] = torch.randn(batch["loss_mask"].shape, generator=g, dtype=torch.float64)
    return batch["values"] + torch.randn(batch["values"].shape, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("agg", LOSS_WEIGHTS)
@pytest.mark.parametrize(("clip", "huber"), CRITICS)
def test_a_critics_loss_does_not_depend_on_cuts_order_and_padding(clip, huber, agg):
    _, batch = make_batch()
    values = values_of(batch)

    def fn(x, part):
        return critic_loss({"values": x}, part, value_clip=clip, huber=huber, loss_agg=agg)[0]

    same_in_every_cut(fn, LOSS_WEIGHTS[agg], values, batch)


# ---- finite differences -------------------------------------------------------------------------


def check_gradient(fn, *inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(fn, inputs, eps=1e-6, atol=1e-7, rtol=1e-5, fast_mode=True)


@pytest.mark.parametrize("agg", LOSS_WEIGHTS)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("name", OF_RATIO)
def test_gradients_of_policy_losses_are_finite_differences(name, ratio, agg):
    logp, batch = batch_of_one_advantage()
    ratio = "token" if name == "gmpo" else ratio
    loss = PolicyLoss(
        surrogate=SURROGATES[name],
        ratio=ratio,
        correction=CORRECTION,
        kl_coef=0.3,
        entropy_coef=0.1,
        loss_agg=agg,
    )
    check_gradient(
        lambda x, e: loss({"logprobs": x, "entropy": e}, batch)[0], logp, torch.rand_like(logp)
    )


@pytest.mark.parametrize("name", SURROGATES)
def test_gradients_of_surrogates_are_finite_differences(name):
    """By the log ratio or by logp, whichever carries the gradient; the other one gives none."""
    logp, batch = batch_of_one_advantage()
    mask, adv, surrogate = batch["loss_mask"], batch["advantages"], SURROGATES[name]
    d = torch.where(mask, logp - batch["prox_logp"], 0.0)
    if name in OF_LOGP:
        check_gradient(lambda x: surrogate(d, adv, x, mask).loss[mask], logp)
        still = surrogate(d.requires_grad_(), adv, logp.detach(), mask).loss
    else:
        check_gradient(lambda x: surrogate(x, adv, logp, mask).loss[mask], d)
        still = surrogate(d, adv, logp.requires_grad_(), mask).loss
    assert not still.requires_grad


@pytest.mark.parametrize("name", RATIOS)
def test_gradients_of_ratios(name):
    logp, batch = make_batch()
    mask, old = batch["loss_mask"], batch["prox_logp"]
    if name != "sequence-token":
        check_gradient(lambda x: RATIOS[name](x, old, mask), logp)
        return
    logp.requires_grad_()  # its value is another function than what it is differentiated as
    (grad,) = torch.autograd.grad((RATIOS[name](logp, old, mask) * old).sum(), logp)
    torch.testing.assert_close(grad, torch.where(mask, old, 0.0))


@pytest.mark.parametrize("kind", KL_TERMS)
def test_gradients_of_kl_terms(kind):
    logp, batch = make_batch()
    ref, old = batch["ref_logp"], batch["prox_logp"]
    if not kind.endswith("+"):
        check_gradient(lambda x: kl_term(x, ref, old, kind), logp)
        return
    logp.requires_grad_()
    found, want = (
        torch.autograd.grad(kl_term(logp, ref, old, k).sum(), logp)[0] for k in (kind, "k2")
    )
    assert torch.equal(found, want)


@pytest.mark.parametrize("agg", LOSS_WEIGHTS)
def test_gradients_of_means_and_of_the_critic(agg):
    logp, batch = make_batch()
    check_gradient(lambda x: aggregate(x, batch, agg), logp)
    check_gradient(lambda x: sft_loss({"logprobs": x}, batch)[0], logp)
    values = values_of(batch)
    for clip, huber in CRITICS:
        options = dict(value_clip=clip, huber=huber, loss_agg=agg)
        check_gradient(lambda x, o=options: critic_loss({"values": x}, batch, **o)[0], values)
