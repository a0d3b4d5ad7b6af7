"""Ratios, surrogates, corrections and KL terms against loops over tokens with gradients by hand,
written from the papers' formulas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megarl.algos import PolicyLoss
from megarl.algos.policy_loss import Correction
from megarl.algos.surrogates import CISPO, GMPO, SAPO, TOPR, Clip, LogLikelihood, Unclipped
from megarl.config.algo import PPOActorConfig

from .test_losses import make_batch

LOW, HIGH = 0.05, 0.08  # narrow: a sequence's ratio is a mean


def clip(u, a):
    """PPO: (value, d value / d u)."""
    bounded = min(u * a, min(max(u, 1 - LOW), 1 + HIGH) * a)
    inside = u * a <= min(max(u, 1 - LOW), 1 + HIGH) * a
    return -bounded, (-a if inside else 0.0)


def sapo(u, a):
    tau = 1.0 if a > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (u - 1)))
    return -4 / tau * gate * a, -4 * gate * (1 - gate) * a


OF_RATIO = {"clip": clip, "sapo": sapo, "unclipped": lambda u, a: (-u * a, -a)}
SURROGATES = {
    "clip": Clip(eps_low=LOW, eps_high=HIGH),
    "cispo": CISPO(eps_low=LOW, eps_high=HIGH),
    "sapo": SAPO(),
    "gmpo": GMPO(eps_low=LOW, eps_high=HIGH),
    "topr": TOPR(),
    "unclipped": Unclipped(),
    "log_likelihood": LogLikelihood(),
}


def row(name, ratio, logp, old, adv):
    """(values [n], gradient [n]) of a row's n trained tokens: sums over tokens of the loss."""
    n, d = len(logp), [x - o for x, o in zip(logp, old, strict=True)]
    mean = math.exp(sum(d) / n)
    values, grad = [], [0.0] * n
    for t in range(n):
        u = math.exp(d[t]) if ratio == "token" else mean
        a, x = adv[t], logp[t]
        if name in OF_RATIO:
            value, slope = OF_RATIO[name](u, a)
            if ratio == "sequence":  # d u / d logp_j = u / n for every token j of the row
                grad = [g + slope * u / n for g in grad]
            else:  # GSPO-token: the sequence's value, the token's own gradient
                grad[t] += slope * u
        elif name == "cispo":
            weight = min(max(u, 1 - LOW), 1 + HIGH)
            value = -weight * a * x
            grad[t] -= weight * a
        elif name == "gmpo":
            kept = [min(e, HIGH) if a > 0 else max(e, -LOW) for e in d]
            mean_kept = math.exp(sum(kept) / n)
            value = -a * mean_kept
            free = [e <= HIGH if a > 0 else e >= -LOW for e in d]
            grad = [g - a * mean_kept / n * f for g, f in zip(grad, free, strict=True)]
        elif name == "topr":
            weight = 1.0 if a > 0 else min(1.0, math.exp(sum(d)))
            value = -weight * a * x
            grad[t] -= weight * a
        else:
            value = -a * x
            grad[t] -= a
        values.append(value)
    return values, grad


def batch_of_one_advantage(seed=0):
    """Rows of one advantage each, of both signs, where the ratio has gone its way and where not."""
    logp, batch = make_batch(seed)
    way = torch.where(batch["loss_mask"], logp - batch["prox_logp"], 0.0).sum(1).sign()
    each = way * torch.tensor([1.2, -0.7, 0.3, -1.5, -0.8, 0.0], dtype=torch.float64)
    batch["advantages"] = each[:, None] * batch["loss_mask"]
    return logp, batch


CASES = [
    (name, ratio)
    for name, ratio in itertools.product(SURROGATES, ("token", "sequence", "sequence-token"))
    if ratio == "token" or name in OF_RATIO or name == "cispo"
]


@pytest.mark.parametrize("agg", ["token-mean", "sequence-mean", "sequence-sum"])
@pytest.mark.parametrize(("name", "ratio"), CASES)
def test_value_and_gradient_equal_the_loop(name, ratio, agg):
    logp, batch = batch_of_one_advantage()
    mask, total, want = batch["loss_mask"], 0.0, torch.zeros_like(logp)
    for i in range(len(logp)):
        at = mask[i].nonzero().flatten()
        if not len(at):
            continue
        picked = [batch["prox_logp"][i, at], batch["advantages"][i, at]]
        values, grad = row(name, ratio, *(x.tolist() for x in (logp[i, at], *picked)))
        scale = 1 / len(at) if agg == "sequence-mean" else 1.0
        total += scale * sum(values)
        want[i, at] = scale * torch.tensor(grad, dtype=torch.float64)
    logp.requires_grad_()
    loss, stats = PolicyLoss(surrogate=SURROGATES[name], ratio=ratio, loss_agg=agg)(
        {"logprobs": logp}, batch
    )
    loss.backward()
    assert loss.item() == pytest.approx(total, abs=1e-9)
    torch.testing.assert_close(logp.grad, want, rtol=0, atol=1e-9)
    if name not in ("sapo", "unclipped", "log_likelihood"):
        assert stats["clip_frac"][0] > 0, "the data must exercise the bound"


def test_gspo_token_is_gspo_where_a_row_has_one_advantage():
    """arXiv 2507.18071, sec. 4.3: GSPO and GSPO-token are then the same, value and gradient."""
    found = []
    for ratio in ("sequence", "sequence-token"):
        logp, batch = batch_of_one_advantage()
        logp.requires_grad_()
        loss, _ = PolicyLoss(ratio=ratio, loss_agg="sequence-mean")({"logprobs": logp}, batch)
        loss.backward()
        found.append((loss.item(), logp.grad))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-12)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-12)


def test_on_policy_every_surrogate_has_the_gradient_of_reinforce():
    for name, surrogate in SURROGATES.items():
        logp, batch = batch_of_one_advantage()
        batch["prox_logp"] = logp.clone()
        logp.requires_grad_()
        PolicyLoss(surrogate=surrogate, loss_agg="sequence-mean")({"logprobs": logp}, batch)[
            0
        ].backward()
        n = batch["loss_mask"].sum(1, keepdim=True).clamp(min=1)
        torch.testing.assert_close(logp.grad, -batch["advantages"] / n, msg=name)


CORRECTIONS = [
    dict(weight="token", weight_cap=1.1),
    dict(weight="sequence", weight_cap=2.0),
    dict(weight="geometric", weight_cap=1.02),
    dict(weight="none", mask="geometric", mask_low=0.95, mask_high=1.05),
    dict(weight="token", mask="token", mask_low=0.8, mask_high=1.3),
    dict(weight="token", mask="sequence", mask_low=0.5, mask_high=2.0),
    dict(weight="token", veto=0.5),
    dict(weight="token", weight_cap=1.2, mask="geometric", mask_low=0.9, veto=0.4),
]


@pytest.mark.parametrize("options", CORRECTIONS, ids=str)
def test_corrections_equal_the_loop(options):
    _, batch = make_batch()
    mask, old, behaviour = batch["loss_mask"], batch["prox_logp"], batch["logprobs"]
    weight, dropped = Correction(**options).of_tokens(old, behaviour, mask)
    seen = set()
    for i in range(len(mask)):
        at = mask[i].nonzero().flatten().tolist()
        w = {t: math.exp(old[i, t] - behaviour[i, t]) for t in at}
        product = math.prod(w.values())
        geometric = product ** (1 / len(w)) if w else 1.0
        for t in at:
            level = {"token": w[t], "sequence": product, "geometric": geometric, "none": 1.0}
            want = min(level[options["weight"]], options.get("weight_cap", math.inf))
            by = level[options.get("mask", "none")]
            inside = options.get("mask_low", 0.0) <= by <= options.get("mask_high", math.inf)
            gone = (options.get("mask", "none") != "none" and not inside) or min(
                w.values()
            ) < options.get("veto", 0.0)
            assert weight[i, t].item() == pytest.approx(want, rel=1e-12)
            assert bool(dropped[i, t]) == gone
            seen.add((gone, want < level[options["weight"]]))
    assert not dropped[~mask].any()
    assert len(seen) > 1, "the data must exercise the bounds"


def test_a_correction_multiplies_losses_and_keeps_the_denominator():
    logp, batch = make_batch()
    correction = Correction(weight="token", weight_cap=1.1, mask="token", mask_high=1.5)
    plain = PolicyLoss()({"logprobs": logp}, batch)[1]
    weight, dropped = correction.of_tokens(
        batch["prox_logp"], batch["logprobs"], batch["loss_mask"]
    )
    loss, stats = PolicyLoss(correction=correction)({"logprobs": logp}, batch)
    found = Clip()(
        torch.where(batch["loss_mask"], logp - batch["prox_logp"], 0.0),
        batch["advantages"],
        logp,
        batch["loss_mask"],
    )
    want = (found.loss * weight)[batch["loss_mask"] & ~dropped].sum()
    assert loss.item() == pytest.approx(want.item(), abs=1e-12)
    assert stats["pg_loss"][1] == plain["pg_loss"][1]
    assert int(stats["behav_dropped_frac"][0]) == int(dropped.sum()) > 0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k1+", "k3+", "k3-weighted"])
def test_kl_terms_have_the_value_and_slope_of_their_definition(kind):
    logp, batch = make_batch()
    mask = batch["loss_mask"]
    logp.requires_grad_()
    with_kl = PolicyLoss(kl_coef=0.5, kl_estimator=kind)({"logprobs": logp}, batch)[0]
    without = PolicyLoss()({"logprobs": logp}, batch)[0]
    (slope,) = torch.autograd.grad(with_kl - without, logp)
    total = 0.0
    for i, t in mask.nonzero().tolist():
        x, ref, old = (
            float(v[i, t].detach()) for v in (logp, batch["ref_logp"], batch["prox_logp"])
        )
        d, u = x - ref, math.exp(x - old)
        k3 = math.exp(-d) - 1 + d
        value = {"k1": d, "k2": d * d / 2, "k3": k3, "k1+": d, "k3+": k3, "k3-weighted": u * k3}
        # d/dx of u k3 = u (k3 + 1 - exp(-d)) = u d: under the old policy its mean is the gradient
        # of KL(policy || reference)
        by = {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d), "k1+": d, "k3+": d, "k3-weighted": u * d}
        total += 0.5 * value[kind]
        assert slope[i, t].item() == pytest.approx(0.5 * by[kind], abs=1e-9)
    assert (with_kl - without).item() == pytest.approx(total, abs=1e-9)


def test_unbiased_kl_gradients_have_the_mean_of_the_exact_one():
    """Over all four tokens of a softmax, weighted by the policy that drew them: k2 and the + terms
    on policy, k3-weighted off policy; k3 by itself is not the gradient of KL(policy || reference).
    """
    from megarl.algos.kl import kl_term

    g = torch.Generator().manual_seed(3)
    logits, ref, other = (torch.randn(4, generator=g, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    ref, other = ref.log_softmax(0), other.log_softmax(0)
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)

    def mean_gradient(kind, drawn_by):
        term = (drawn_by.exp().detach() * kl_term(logp, ref, drawn_by.detach(), kind)).sum()
        return torch.autograd.grad(term, logits, retain_graph=True)[0]

    for kind in ("k2", "k1+", "k3+", "k3-weighted"):
        torch.testing.assert_close(mean_gradient(kind, logp), exact)
    torch.testing.assert_close(mean_gradient("k3-weighted", other), exact)
    assert (mean_gradient("k3", logp) - exact).abs().max() > 1e-2
    assert (mean_gradient("k2", other) - exact).abs().max() > 1e-2


def test_entropy_bonus_and_constant_length():
    logp, batch = make_batch()
    entropy = torch.rand_like(logp).requires_grad_()
    outputs = {"logprobs": logp, "entropy": entropy}
    options = dict(loss_agg="sequence-sum", scale=1 / 32)
    base = PolicyLoss(**options)(outputs, batch)[0]
    loss = PolicyLoss(entropy_coef=0.1, **options)(outputs, batch)[0]
    loss.backward()
    want = -0.1 / 32 * batch["loss_mask"].double()
    torch.testing.assert_close(entropy.grad, want)
    assert (loss - base).item() == pytest.approx((want * entropy).sum().item())


@pytest.mark.parametrize("name", ["gmpo", "topr"])
def test_surrogates_of_tokens_refuse_other_ratios(name):
    from megarl.algos.specs import surrogate_of

    config = PPOActorConfig(ratio="sequence")
    config.surrogate.type = name
    with pytest.raises(ValueError, match=rf"actor.surrogate={name}: .*actor.ratio=token"):
        surrogate_of(config)
