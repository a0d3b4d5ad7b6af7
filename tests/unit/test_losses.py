"""Losses and their gradients against plain loops over tokens, written from the papers' formulas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megarl.algos import LOSS_WEIGHTS, PolicyLoss, sft_loss, token_weight
from megarl.algos.policy_loss import Correction
from megarl.algos.surrogates import Clip
from megarl.api.tokens import select

ROLLOUTS = [0, 0, 1, 2, 2, 3]  # of the sequences


def make_batch(seed: int = 0, b: int = 6, s: int = 24) -> tuple[torch.Tensor, dict]:
    """Ratios well outside the clip on both sides; one sequence without a trained token."""
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(4, s + 1, (b,), generator=g)
    attention = torch.arange(s)[None] < lens[:, None]
    mask = attention.clone()
    mask[:, :2] = False
    mask[2] = False
    mask &= torch.rand(b, s, generator=g) > 0.15

    def logps(spread: float) -> torch.Tensor:
        return base + spread * torch.randn(b, s, generator=g, dtype=torch.float64)

    base = -torch.rand(b, s, generator=g, dtype=torch.float64) * 3
    batch = {
        "input_ids": torch.randint(3, 50, (b, s), generator=g),
        "attention_mask": attention,
        "loss_mask": mask,
        "logprobs": logps(0.4),
        "prox_logp": logps(0.3),
        "ref_logp": logps(0.5),
        "advantages": torch.randn(b, s, generator=g, dtype=torch.float64) * mask,
        "rollout_tokens": torch.tensor(
            [sum(int(mask[j].sum()) for j in range(b) if ROLLOUTS[j] == r) for r in ROLLOUTS]
        ),
        "batch_share": mask.any(1).double() / mask.any(1).sum(),
    }
    return logps(0.6), batch


def grpo_loss(
    outputs,
    batch,
    *,
    eps_clip=0.2,
    eps_clip_higher=None,
    c_clip=None,
    decoupled=False,
    behav_imp_weight_cap=None,
    **rest,
):
    clip = Clip(eps_low=eps_clip, eps_high=eps_clip_higher, dual=c_clip)
    correction = None
    if decoupled:
        high = math.inf if behav_imp_weight_cap is None else behav_imp_weight_cap
        correction = Correction(mask="token", mask_high=high)
    return PolicyLoss(surrogate=clip, correction=correction, **rest)(outputs, batch)


def kl(d: float, kind: str) -> float:
    """d = logp - ref_logp"""
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kind]


def kl_slope(d: float, kind: str) -> float:
    return {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[kind]


def reference(
    logp,
    batch,
    *,
    eps_clip=0.2,
    eps_clip_higher=None,
    c_clip=None,
    old_logp="prox_logp",
    decoupled=False,
    behav_imp_weight_cap=None,
    kl_coef=0.0,
    kl_estimator="k3",
    loss_agg="token-mean",
):
    """(loss_sum, gradient, weight, counts) one token at a time, gradient by hand."""
    eps_high = eps_clip if eps_clip_higher is None else eps_clip_higher
    b, s = logp.shape
    total, grad = 0.0, torch.zeros_like(logp)
    rollouts: set[int] = set()
    seqs, counts = 0, dict(tokens=0, low=0, high=0, dual=0, dropped=0)
    for i in range(b):
        n = sum(bool(m) for m in batch["loss_mask"][i])
        if n == 0:
            continue
        seqs += 1
        if loss_agg == "rollout-mean":
            n = int(batch["rollout_tokens"][i])
            rollouts.add(ROLLOUTS[i])
        scale = 1.0 if loss_agg in ("token-mean", "sequence-sum", "token-sum") else 1.0 / n
        for t in range(s):
            if not batch["loss_mask"][i, t]:
                continue
            counts["tokens"] += 1
            x, a = float(logp[i, t]), float(batch["advantages"][i, t])
            old, behav = float(batch[old_logp][i, t]), float(batch["logprobs"][i, t])
            r = math.exp(x - old)
            if a >= 0:
                clipped = r > 1 + eps_high
                loss = -a * min(r, 1 + eps_high)
                slope = 0.0 if clipped else -a * r
                counts["high"] += clipped and a > 0
            else:
                clipped = r < 1 - eps_clip
                loss = -a * max(r, 1 - eps_clip)
                slope = 0.0 if clipped else -a * r
                counts["low"] += clipped
                if c_clip is not None and r > c_clip:
                    loss, slope = -a * c_clip, 0.0
                    counts["dual"] += 1
            if decoupled:
                w = math.exp(old - behav)
                if behav_imp_weight_cap is not None and w > behav_imp_weight_cap:
                    w = 0.0
                    counts["dropped"] += 1
                loss, slope = w * loss, w * slope
            if kl_coef:
                d = x - float(batch["ref_logp"][i, t])
                loss += kl_coef * kl(d, kl_estimator)
                slope += kl_coef * kl_slope(d, kl_estimator)
            total += scale * loss
            grad[i, t] += scale * slope
    weights = {
        "token-mean": counts["tokens"],
        "sequence-mean": seqs,
        "sequence-sum": seqs,
        "rollout-mean": len(rollouts),
        "token-sum": 1,
    }
    return total, grad, weights[loss_agg], counts


OPTIONS = [
    {},
    {"old_logp": "logprobs"},
    {"eps_clip_higher": 0.28},
    {"eps_clip": 0.1, "eps_clip_higher": 0.5, "c_clip": 1.5},
    {"decoupled": True},
    {"decoupled": True, "behav_imp_weight_cap": 1.2, "c_clip": 2.0},
    {"kl_coef": 0.3, "kl_estimator": "k1"},
    {"kl_coef": 0.3, "kl_estimator": "k2", "decoupled": True, "behav_imp_weight_cap": 1.1},
    {"kl_coef": 0.3, "kl_estimator": "k3", "c_clip": 3.0},
]
CASES = [dict(o, loss_agg=agg) for o, agg in itertools.product(OPTIONS, LOSS_WEIGHTS)]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_value_gradient_weight_and_clip_counts_equal_the_loop(options):
    logp, batch = make_batch()
    want, want_grad, weight, counts = reference(logp, batch, **options)

    logp = logp.requires_grad_()
    loss, stats = grpo_loss({"logprobs": logp}, batch, **options)
    loss.backward()

    assert loss.item() == pytest.approx(want, abs=1e-9)
    torch.testing.assert_close(logp.grad, want_grad, rtol=0, atol=1e-9)
    assert LOSS_WEIGHTS[options["loss_agg"]](batch) == pytest.approx(weight, abs=1e-12)
    for name in ("low", "high", "dual"):
        hits, tokens = stats[f"clip_frac_{name}"]
        assert (int(hits), int(tokens)) == (counts[name], counts["tokens"]), name
    assert int(stats["behav_dropped_frac"][0]) == counts["dropped"]
    # every option must have been exercised by the data
    assert counts["low"] and counts["high"]
    assert counts["dual"] or options.get("c_clip") is None
    assert counts["dropped"] or options.get("behav_imp_weight_cap") is None


@pytest.mark.parametrize("options", CASES, ids=str)
def test_cutting_the_batch_changes_nothing(options):
    logp, batch = make_batch(seed=1)
    weight = LOSS_WEIGHTS[options["loss_agg"]]

    def mean(parts: list[list[int]]) -> tuple[float, dict[str, float], torch.Tensor]:
        x = logp.clone().requires_grad_()
        losses, weights, sums = [], 0.0, {}
        for rows in parts:
            part = select(batch, rows)  # also trims the padding
            width = part["input_ids"].shape[1]
            loss, stats = grpo_loss(
                {"logprobs": x[rows][:, :width], "entropy": -x[rows][:, :width]}, part, **options
            )
            losses.append(loss)
            weights += weight(part)
            for k, (s, w) in stats.items():
                old = sums.get(k, (0.0, 0.0))
                sums[k] = (old[0] + float(s), old[1] + float(w))
        total = torch.stack(losses).sum() / weights
        total.backward()
        return total.item(), {k: s / w for k, (s, w) in sums.items()}, x.grad

    whole = mean([[0, 1, 2, 3, 4, 5]])
    cut = mean([[3, 2], [0], [5, 4, 1]])
    assert cut[0] == pytest.approx(whole[0], abs=1e-12)
    assert cut[1] == pytest.approx(whole[1], abs=1e-6)
    torch.testing.assert_close(cut[2], whole[2], rtol=0, atol=1e-12)


def test_unchanged_policy_has_ratio_one_and_no_clipping():
    _, batch = make_batch()
    _, stats = grpo_loss({"logprobs": batch["prox_logp"].clone()}, batch)
    mean = {k: float(s) / float(w) for k, (s, w) in stats.items()}
    assert mean["ratio"] == 1.0 and mean["ratio_abs_dev"] == 0.0
    assert mean["clip_frac"] == 0.0


def test_figures_by_hand():
    """Two trained tokens; behaviour 0.5 and 0.25, policy 0.25 and 0.5, reference 0.5 for both."""
    logs = lambda *v: torch.tensor([[0.0, *map(math.log, v)]])  # noqa: E731
    batch = {
        "loss_mask": torch.tensor([[False, True, True]]),
        "logprobs": logs(0.5, 0.25),
        "prox_logp": logs(0.5, 0.5),
        "ref_logp": logs(0.5, 0.5),
        "advantages": torch.tensor([[0.0, 1.0, 1.0]]),
    }
    outputs = {"logprobs": logs(0.25, 0.5), "entropy": torch.tensor([[9.0, 1.0, 2.0]])}
    _, stats = grpo_loss(outputs, batch, old_logp="prox_logp")
    mean = {k: float(s) / float(w) for k, (s, w) in stats.items()}
    log2 = math.log(2)
    assert mean["ratio"] == pytest.approx(0.75)  # 0.5 and 1
    assert mean["ratio_abs_dev"] == pytest.approx(0.25)
    assert mean["ratio_sq_dev"] == pytest.approx(0.125)
    assert mean["pg_loss"] == pytest.approx(-0.75)
    assert mean["approx_kl_k1"] == pytest.approx(0.0, abs=1e-7)  # log 2 and -log 2
    assert mean["approx_kl"] == pytest.approx(((0.5 - 1 + log2) + (2 - 1 - log2)) / 2)
    assert mean["kl_ref"] == pytest.approx(((2 - 1 - log2) + 0) / 2)
    assert mean["entropy"] == pytest.approx(1.5)
    assert mean["behav_imp_weight"] == pytest.approx(1.5)  # 1 and 2
    assert mean["behav_imp_weight_sq"] == pytest.approx(2.5)
    assert mean["advantage"] == pytest.approx(1.0)
    assert mean["logp"] == pytest.approx(-1.5 * log2)


def test_huge_ratios_stay_finite():
    logp, batch = make_batch()
    logp = logp + 2000.0
    logp.requires_grad_()
    loss, stats = grpo_loss({"logprobs": logp}, batch, decoupled=True, kl_coef=0.1)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logp.grad).all()
    assert all(math.isfinite(float(s)) for s, _ in stats.values())


def test_masked_positions_may_hold_anything():
    logp, batch = make_batch()
    want, _ = grpo_loss({"logprobs": logp}, batch, decoupled=True, kl_coef=0.1)
    off = ~batch["loss_mask"]
    dirty = {
        k: v.masked_fill(off, math.nan) if v.is_floating_point() and v.ndim == 2 else v
        for k, v in batch.items()
    }
    x = logp.masked_fill(off, math.nan).requires_grad_()
    loss, stats = grpo_loss({"logprobs": x}, dirty, decoupled=True, kl_coef=0.1)
    loss.backward()
    assert loss.item() == want.item()
    assert (x.grad[off] == 0).all()
    assert all(math.isfinite(float(s)) for s, _ in stats.values())


def test_unknown_aggregation_names_the_choices():
    logp, batch = make_batch()
    with pytest.raises(ValueError, match=r"loss_agg='mean'.*sequence-mean, rollout-mean"):
        grpo_loss({"logprobs": logp}, batch, loss_agg="mean")


def test_sft_loss_and_matches():
    logp = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, -4.0], [0.0, -5.0, -6.0]])
    logp.requires_grad_()
    mask = torch.tensor([[False, True, True], [False, False, True], [False, False, False]])
    match = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    batch = {"loss_mask": mask}
    loss, stats = sft_loss({"logprobs": logp, "greedy_match": match}, batch)
    loss.backward()
    assert loss.item() == 7.0 and token_weight(batch) == 3.0
    assert torch.equal(logp.grad, -mask.float())
    assert [int(v) for v in stats["token_accuracy"]] == [2, 3]
    assert [int(v) for v in stats["exact_match"]] == [1, 2]  # row 1; row 2 trains nothing
    assert sft_loss({"logprobs": logp}, batch)[1] == {}
