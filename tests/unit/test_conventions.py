"""What TRL, verl, AReaL and slime compute, read in the files named below and written down again as
formulas over numbers: where it is what megarl computes, and the examples of docs/algorithms.md
where it is not.

TRL    huggingface/trl              trl/trainer/grpo_trainer.py, docs/source/{paper_index,gpg}.md
verl   volcengine/verl              verl/trainer/ppo/{core_algos,rollout_corr_helper}.py
AReaL  inclusionAI/AReaL            areal/utils/functional/functional.py
slime  THUDM/slime                  slime/utils/ppo_utils.py, slime/ray/rollout.py
ROLL   alibaba/ROLL                 roll/utils/functionals.py
GMPO   callsys/GMPO                 train_zero_math_gmpo.py
"""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from megarl.algos import PolicyLoss, critic_loss, gae, grpo_advantages, kl_estimate
from megarl.algos.advantages import levels_advantages
from megarl.algos.estimators import (
    gdpo_advantages,
    gpg_advantages,
    max_at_k_advantages,
    opo_advantages,
    rloo_advantages,
)
from megarl.algos.losses import LOSS_WEIGHTS, aggregate
from megarl.algos.policy_loss import Correction
from megarl.algos.preferences import DPO
from megarl.algos.surrogates import CISPO, GMPO, SAPO, Clip, token_ratio
from megarl.rollout.episode import has_signal
from tests.unit.bigram import prepared
from tests.unit.presets import preset

from .test_losses import make_batch
from .test_surrogates import batch_of_one_advantage

REWARDS, GROUPS = [1.0, 0.0, 0.0, 2.0, 5.0, 4.5], [0, 0, 0, 1, 1, 1]
MEMBERS = [[0, 1, 2], [3, 4, 5]]


def tensors(rewards, groups):
    return torch.tensor(rewards), torch.tensor(groups)


def by_group(fn):
    """fn(rewards of a group, one of them) of every sample."""
    out = []
    for members in MEMBERS:
        mine = [REWARDS[i] for i in members]
        out += [fn(mine, r) for r in mine]
    return torch.tensor(out)


# ---- advantages ---------------------------------------------------------------------------------


def test_group_advantages_of_verl_slime_and_trl():
    """verl compute_grpo_outcome_advantage and slime: (r - mean) / (std + 1e-6) with the std by
    n - 1; TRL: 1e-4 in its place."""

    def of(eps):
        return by_group(lambda g, r: (r - statistics.fmean(g)) / (statistics.stdev(g) + eps))

    ours = grpo_advantages(*tensors(REWARDS, GROUPS))
    torch.testing.assert_close(ours, of(1e-6), rtol=0, atol=1e-6)
    assert ours[0].item() == pytest.approx(1.15470, abs=1e-5)
    assert of(1e-4)[0].item() == pytest.approx(1.15450, abs=1e-5)


def test_the_std_of_the_batch_of_trl_and_of_lite_ppos_authors():
    """TRL scale_rewards="batch" and ROLL reward_norm (norm_mean_type=group, norm_std_type=batch):
    the std of all rewards as they are, not of what is left when the groups' means are gone."""
    rewards = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    groups = [0] * 4 + [1] * 4 + [2] * 4
    config = preset("lite_ppo")
    for ours in (
        grpo_advantages(*tensors(rewards, groups), config.adv_norm),
        levels_advantages(*tensors(rewards, groups), "group", "batch"),
    ):
        theirs = 0.5 / (statistics.stdev(rewards) + 1e-6)
        assert ours[0].item() == pytest.approx(theirs, abs=1e-6) == pytest.approx(0.9574, abs=1e-4)
        assert not ours[4:].any()


def test_gdpo_of_trl():
    """TRL multi_objective_aggregation="normalize_then_sum" (1.16.0):
    each reward less its group's mean, over the std by n - 1 plus 1e-4; these times reward_weights
    summed; the sums less their mean, over their std by n - 1 plus 1e-4. None is left out of each
    mean and std, adds nothing, and a completion without any has 0."""
    none = math.nan
    parts = [
        [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, none],
        [0.2, 0.9, none, 0.4, 7.0, 3.0, 5.0, none],
        [0.5, 0.5, 0.5, 0.5, 0.1, 0.3, 0.1, none],
    ]
    weights, members = [1.0, 0.5, -2.0], [range(4), range(4, 8)]

    def normed(x, values):
        values = [v for v in values if not math.isnan(v)]
        return (x - statistics.fmean(values)) / (statistics.stdev(values) + 1e-4)

    sums = []
    for group in members:
        for i in group:
            has = [k for k in range(3) if not math.isnan(parts[k][i])]
            own = [weights[k] * normed(parts[k][i], [parts[k][j] for j in group]) for k in has]
            sums.append(sum(own) if has else none)
    want = [0.0 if math.isnan(s) else normed(s, sums) for s in sums]
    given = torch.tensor(parts), weights, torch.arange(8) // 4
    ours = gdpo_advantages(*given, batch=True, eps=1e-4)
    assert ours.tolist() == pytest.approx(want, abs=1e-5) and ours[7] == 0.0
    # in any order of the rows; a missing part is no 0, which would be the worst of its group
    order = torch.tensor([5, 0, 7, 2, 4, 1, 6, 3])
    mixed = gdpo_advantages(given[0][:, order], weights, given[2][order], batch=True, eps=1e-4)
    torch.testing.assert_close(mixed, ours[order])
    zero = gdpo_advantages(given[0].nan_to_num(0.0), *given[1:], batch=True, eps=1e-4)
    assert abs(zero[2] - ours[2]) > 0.1 and abs(zero[7]) > 0.1


def test_groups_that_tell_nothing():
    """verl: a group of one has mean 0 and std 1; equal rewards leave rounding over 1e-6."""
    alone, of_verl = torch.tensor([0.7]), []
    assert (alone / (1.0 + 1e-6)).item() == pytest.approx(0.7, abs=1e-5)
    assert grpo_advantages(alone, torch.zeros(1)).item() == 0.0
    assert rloo_advantages(alone, torch.zeros(1)).item() == 0.0  # verl's rloo: 0.7, too
    for n in range(7, 17):
        tied = alone.expand(n)
        of_verl.append((tied - tied.mean()).abs().max() / (tied.std() + 1e-6))
        assert not grpo_advantages(tied, torch.zeros(n)).any()
    assert max(of_verl) > 0.01  # 0.056 for most n


def test_baselines_of_verl():
    """rloo: n / (n - 1) (r - mean); opo: the mean weighted by length."""
    rewards, groups = tensors(REWARDS, GROUPS)
    want = by_group(lambda g, r: (r - statistics.fmean(g)) * len(g) / (len(g) - 1))
    torch.testing.assert_close(rloo_advantages(rewards, groups), want)
    lengths = torch.tensor([3, 1, 4, 1, 5, 9])
    found = opo_advantages(rewards, groups, lengths)
    for members in MEMBERS:
        n = [int(lengths[i]) for i in members]
        mean = sum(k * REWARDS[i] for k, i in zip(n, members, strict=True)) / sum(n)
        assert found[members].tolist() == pytest.approx([REWARDS[i] - mean for i in members])


def test_max_at_k_is_verls_grpo_passk_without_the_std():
    rewards = torch.tensor([0.2, 1.0, 0.5])
    found = max_at_k_advantages(rewards, torch.zeros(3))
    assert found.tolist() == [0.0, 0.5, 0.0]
    assert (found / rewards.std()).max().item() == pytest.approx(1.2372, abs=1e-4)  # its default


def test_gpg_counts_groups_that_differ_as_its_paper_and_trl():
    """verl's alpha is samples over rewards that are not 0."""
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    informative = 1 / 2  # TRL: the share of groups whose advantages differ
    assert gpg_advantages(rewards, groups).tolist() == [0.5 / informative, -0.5 / informative, 0, 0]
    of_verl = len(rewards) / int(rewards.count_nonzero()) * 0.5
    assert of_verl == pytest.approx(0.6667, abs=1e-4)


def test_whitened_advantages_of_verl():
    """masked_whiten: (x - mean) / sqrt(var + 1e-8), var by n - 1, of the trained tokens alone."""
    _, batch = prepared(preset("reinforce_pp_baseline"))
    mask, groups = batch["loss_mask"].bool(), batch["group_ids"]
    raw = torch.zeros(batch["loss_mask"].shape)
    for g in groups.unique():
        rows = groups == g
        raw[rows] = (batch["rewards"][rows] - batch["rewards"][rows].mean())[:, None]
    x = raw[mask].tolist()
    scale = math.sqrt(statistics.variance(x) + 1e-8)
    want = [(v - statistics.fmean(x)) / scale for v in x]
    assert batch["advantages"][mask].tolist() == pytest.approx(want, abs=1e-5)


def test_gae_of_verl_where_only_trained_tokens_earn():
    """compute_gae_advantage_return, before it whitens: tokens of the environment are passed over,
    and so is what they earn; here that goes to the token before them."""
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 0]]).bool()
    values = torch.tensor([[9.0, 0.3, -0.2, 9.0, 9.0, 0.5, 0.1, 9.0]])
    rewards, lost = torch.zeros(1, 8), torch.zeros(1, 8)
    rewards[0, 6] = rewards[0, 2] = 1.0
    lost[0, 4] = 1.0

    def of_verl(earned, discount=0.9, lam=0.8):
        out, ahead, after = [0.0] * 8, 0.0, 0.0
        for t in (6, 5, 2, 1):
            delta = float(earned[0, t]) + discount * after - float(values[0, t])
            ahead = delta + discount * lam * ahead
            out[t], after = ahead, float(values[0, t])
        return torch.tensor([out])

    def ours(earned):
        return gae(earned, values, mask, last_value=torch.zeros(1), discount=0.9, gae_lambda=0.8)[0]

    torch.testing.assert_close(ours(rewards), of_verl(rewards))
    early = torch.zeros(1, 8)
    early[0, 2] = 1.0
    torch.testing.assert_close(ours(rewards + lost), of_verl(rewards + early))
    assert torch.equal(of_verl(rewards + lost), of_verl(rewards))


def test_dynamic_sampling_of_areal_keeps_groups_whose_rewards_differ():
    for rewards in ([0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.1, 0.1, 0.2]):
        assert has_signal({"rewards": torch.tensor(rewards)}) == (len(set(rewards)) > 1)


# ---- losses of tokens ---------------------------------------------------------------------------


def rows_of(batch, logp):
    """(row, its mask, logp, old and advantage of its trained tokens) where there are any."""
    for i in range(len(logp)):
        at = batch["loss_mask"][i]
        if at.any():
            fields = logp[i], batch["prox_logp"][i], batch["advantages"][i]
            yield i, at, [x[at].tolist() for x in fields]


def found_by(surrogate, logp, batch):
    mask = batch["loss_mask"]
    d = token_ratio(logp, batch["prox_logp"], mask)
    return surrogate(d, batch["advantages"], logp, mask).loss


def clip_of_all(u, a, low, high, dual):
    """verl, slime: where A < 0 at most -c A; AReaL: at most sign(A) c A, which is the same."""
    loss = max(-a * u, -a * min(max(u, 1 - low), 1 + high))
    of_verl = min(loss, -a * dual) if a < 0 else loss
    assert of_verl == min(loss, math.copysign(1.0, a) * dual * a) or a == 0
    return of_verl


def sapo_of_all(u, a):
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + math.exp(-tau * (u - 1)))


OF_TOKENS = {
    "clip": (
        Clip(eps_low=0.1, eps_high=0.2, dual=1.5),
        lambda u, a, x: clip_of_all(u, a, 0.1, 0.2, 1.5),
    ),
    # verl and slime bound the ratio's distance from 1; TRL's epsilon_high is the bound itself
    "cispo": (CISPO(eps_low=1.0, eps_high=0.3), lambda u, a, x: -min(max(u, 0.0), 1.3) * a * x),
    "sapo": (SAPO(), lambda u, a, x: sapo_of_all(u, a)),
}


@pytest.mark.parametrize("name", OF_TOKENS)
def test_token_losses_of_verl_slime_and_areal(name):
    logp, batch = make_batch()
    surrogate, formula = OF_TOKENS[name]
    found = found_by(surrogate, logp, batch)
    for i, at, (x, old, adv) in rows_of(batch, logp):
        want = [formula(math.exp(p - o), a, p) for p, o, a in zip(x, old, adv, strict=True)]
        assert found[i][at].tolist() == pytest.approx(want, abs=1e-12)


def test_gmpo_of_its_authors_and_of_verl():
    """sgn = -1 where A >= 0, else 1; the tokens' max(sgn d, clamp(sgn d)) is averaged and turned
    back: where A >= 0 that is min(d, eps), below it is max(d, -eps)."""
    logp, batch = batch_of_one_advantage()
    eps = 0.2
    found = found_by(GMPO(eps_low=eps), logp, batch)
    for i, at, (x, old, adv) in rows_of(batch, logp):
        sgn = -1 if adv[0] >= 0 else 1
        d = [sgn * (p - o) for p, o in zip(x, old, strict=True)]
        kept = [sgn * max(v, min(max(v, -eps), eps)) for v in d]
        want = -adv[0] * math.exp(statistics.fmean(kept))
        assert found[i][at].tolist() == pytest.approx([want] * len(x), abs=1e-12)


def test_sequence_ratios_of_areal_average_the_advantages():
    """AReaL's and ours are one where a row has one advantage; where they differ by token, AReaL
    trains on their mean."""
    logp, batch = batch_of_one_advantage()
    options = dict(ratio="sequence-token", surrogate=Clip(eps_low=9.0, eps_high=9.0))
    for i, at, (x, old, adv) in rows_of(batch, logp):
        s = math.exp(statistics.fmean(p - o for p, o in zip(x, old, strict=True)))
        one = {k: v[i : i + 1] for k, v in batch.items()}
        row = PolicyLoss(**options)({"logprobs": logp[i : i + 1]}, one)[0]
        assert row.item() == pytest.approx(-s * statistics.fmean(adv) * len(x), abs=1e-9)
        one["advantages"] = torch.where(at, torch.arange(len(at), dtype=logp.dtype), 0.0)[None]
        y = logp[i : i + 1].clone().requires_grad_()
        PolicyLoss(**options)({"logprobs": y}, one)[0].backward()
        torch.testing.assert_close(y.grad, -s * one["advantages"])  # each its own, not their mean


def test_kl_of_verl_is_bounded_and_gives_far_tokens_no_gradient():
    """kl_penalty: k1, k2, k3, and k3+; low_var_kl of verl and slime is clamped to 10."""
    logp = torch.tensor([-0.5, -12.0], requires_grad=True)
    ref = torch.tensor([-0.7, -0.1])
    d = (ref - logp).detach()
    assert torch.equal(kl_estimate(logp, ref, "k1"), -d)
    assert torch.equal(kl_estimate(logp, ref, "k2"), d.square() / 2)
    torch.testing.assert_close(kl_estimate(logp, ref, "k3"), d.exp() - 1 - d, rtol=1e-5, atol=1e-7)
    ours = kl_estimate(logp, ref, "k3")
    of_verl = ((ref - logp).exp() - (ref - logp) - 1).clamp(-10, 10)
    slopes = [torch.autograd.grad(x.sum(), logp, retain_graph=True)[0] for x in (ours, of_verl)]
    assert ours[1].item() == pytest.approx(147254, rel=1e-4) and of_verl[1].item() == 10
    assert slopes[1][1] == 0 > slopes[0][1] and slopes[0][0] == pytest.approx(slopes[1][0])


# ---- means --------------------------------------------------------------------------------------


def two_rows(lengths=(1, 3)):
    """Token losses 1 in the first row and 0 in the second."""
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    batch = {"loss_mask": mask, "batch_share": torch.tensor([0.5, 0.5])}
    return torch.tensor([[1.0], [0.0]]).expand(2, 4), batch


def ours(agg, losses, batch, scale=1.0):
    return scale * float(aggregate(losses, batch, agg)) / LOSS_WEIGHTS[agg](batch)


def test_token_means_are_of_the_whole_batch():
    """As verl's with batch_num_tokens, AReaL's, slime's with calculate_per_token_loss and TRL's
    dapo; TRL's bnpo, and GRPO before, average the means of micro-batches."""
    losses, batch = two_rows()
    assert ours("token-mean", losses, batch) == 1 / 4
    assert statistics.fmean((1 / 1, 0 / 3)) == 1 / 2  # of micro-batches of one row


def test_sequence_means_are_of_rows_with_a_trained_token():
    """As verl's seq-mean-token-mean without global_batch_size; TRL's grpo divides by all rows."""
    losses, batch = two_rows((2, 0))
    assert ours("sequence-mean", losses, batch) == 1.0
    assert statistics.fmean((2 / 2, 0 / max(1, 0))) == 1 / 2


def test_the_constant_of_dr_grpo_is_the_bound_on_an_answers_length():
    """TRL's dr_grpo: sum / (rows * max_completion_length); verl's seq-mean-token-sum-norm: sum /
    the width that the batch is padded to."""
    losses, batch = two_rows()
    bound = 8
    assert ours("sequence-sum", losses, batch, 1 / bound) == 1 / (2 * bound)
    assert float(losses[0, 0]) / losses.shape[1] == 1 / 4


# ---- corrections, values, preferences -----------------------------------------------------------


def test_decoupled_loss_of_areal():
    """The loss times w = exp(prox - behaviour), 0 where w is above the cap, over all tokens."""
    logp, batch = make_batch()
    loss = PolicyLoss(
        surrogate=Clip(eps_low=0.2), correction=Correction(mask="token", mask_high=1.2)
    )
    total, dropped = 0.0, 0
    for i, t in batch["loss_mask"].nonzero().tolist():
        x, old, behaviour, a = (
            float(v[i, t])
            for v in (logp, batch["prox_logp"], batch["logprobs"], batch["advantages"])
        )
        w = math.exp(old - behaviour)
        dropped += w > 1.2
        u = math.exp(x - old)
        total += w * (w <= 1.2) * max(-a * u, -a * min(max(u, 0.8), 1.2))
    found, stats = loss({"logprobs": logp}, batch)
    assert found.item() == pytest.approx(total, abs=1e-9) and dropped > 0
    assert stats["pg_loss"][1] == batch["loss_mask"].sum()  # verl's rejection leaves them out


def test_value_losses_of_verl_trl_and_areal():
    """0.5 max((v - R)^2, (v_old + clamp(v - v_old) - R)^2); AReaL's Huber: e^2 / 2 below delta,
    delta (e - delta / 2) above."""
    batch = {"loss_mask": torch.tensor([[True, True]])}
    batch |= {"values": torch.tensor([[1.0, 0.0]]), "returns": torch.tensor([[3.0, 0.1]])}
    values = {"values": torch.tensor([[2.0, 0.05]])}
    assert critic_loss(values, batch, value_clip=0.2)[0].item() == pytest.approx(
        0.5 * (3.0 - 1.2) ** 2 + 0.5 * 0.05**2
    )
    assert critic_loss(values, batch, value_clip=None, huber=0.5)[0].item() == pytest.approx(
        0.5 * (1.0 - 0.5 / 2) + 0.05**2 / 2
    )


def test_ipo_of_trl_is_the_length_normalised_one():
    """TRL averages the log ratios of tokens for ipo, and sums them for its other losses."""
    batch = {
        "loss_mask": torch.tensor([[True, True], [True, False]]),
        "group_ids": torch.zeros(2, dtype=torch.long),
        "chosen": torch.tensor([True, False]),
        "ref_logp": torch.zeros(2, 2),
    }
    logp = {"logprobs": torch.tensor([[-0.5, -1.5], [-3.0, 0.0]])}
    h = {True: -1.0 + 3.0, False: -2.0 + 3.0}
    for mean, value in h.items():
        loss = DPO(ipo=True, beta=0.5, length_normalized=mean)
        assert loss(logp, batch)[0].item() == pytest.approx((value - 1.0) ** 2)
