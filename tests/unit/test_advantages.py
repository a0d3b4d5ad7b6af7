"""GRPO advantages against numbers worked out by hand."""

import pytest
import torch

from megarl.algos import grpo_advantages, shape_rewards, spread_over_tokens
from megarl.config.algo import PPOActorConfig


def test_group_mean_and_std_by_hand():
    # group 7: 1, 0, 0, 1 -> mean 0.5, sample std sqrt(1/3); group 3: 2, 6 -> mean 4, std sqrt(8)
    rewards = torch.tensor([1.0, 0.0, 2.0, 0.0, 6.0, 1.0])
    groups = torch.tensor([7, 7, 3, 7, 3, 7])  # not sorted, not together
    a, b = 0.5 / (1 / 3) ** 0.5, 2 / 8**0.5
    want = torch.tensor([a, -a, -b, -a, b, a])
    got = grpo_advantages(rewards, groups, "group", eps=0.0)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_eps_is_added_to_the_std():
    got = grpo_advantages(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]), "group", eps=1.0)
    want = 1.0 / (2**0.5 + 1.0)
    torch.testing.assert_close(got, torch.tensor([-want, want]))


def test_group_mean_leaves_the_scale():
    got = grpo_advantages(
        torch.tensor([1.0, 0, 0, 0, 10, 20]), torch.tensor([0, 0, 0, 0, 1, 1]), "group_mean"
    )
    torch.testing.assert_close(got, torch.tensor([0.75, -0.25, -0.25, -0.25, -5.0, 5.0]))


def test_none_is_the_reward():
    rewards = torch.tensor([1.0, -2.0])
    assert grpo_advantages(rewards, torch.tensor([0, 1]), "none").tolist() == [1.0, -2.0]


@pytest.mark.parametrize("mode", ["group", "group_mean"])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(mode):
    # 0.1 is no binary fraction: the mean of three of them is off by an ulp
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0, 1.0, 0.0])
    groups = torch.tensor([0, 0, 0, 1, 2, 2])
    got = grpo_advantages(rewards, groups, mode)
    assert got[:4].tolist() == [0.0] * 4
    assert got[4] > 0 > got[5]


def test_other_groups_do_not_matter():
    rewards, groups = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 0])
    alone = grpo_advantages(rewards, groups, "group")
    more = grpo_advantages(
        torch.cat([rewards, torch.tensor([9.0, -9.0])]),
        torch.cat([groups, torch.tensor([5, 5])]),
        "group",
    )
    assert torch.equal(more[:3], alone)


def test_spread_stands_at_trained_tokens_only():
    mask = torch.tensor([[False, True, True], [False, False, True]])
    got = spread_over_tokens(torch.tensor([2.0, -1.0]), mask)
    assert got.tolist() == [[0.0, 2.0, 2.0], [0.0, 0.0, -1.0]]


def test_reward_shaping_is_bias_then_scale_then_clip():
    config = PPOActorConfig(reward_bias=-0.5, reward_scaling=10.0, reward_clip=6.0)
    got = shape_rewards(torch.tensor([0, 1, 2]), config)
    assert got.tolist() == [-5.0, 5.0, 6.0]


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="adv_norm='batch'"):
        grpo_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.long), "batch")
    with pytest.raises(ValueError, match=r"\(2, 1\)"):
        grpo_advantages(torch.zeros(2, 1), torch.zeros(2, dtype=torch.long))
