"""Estimators of advantages against brute force and loops, written from the papers' formulas."""

from __future__ import annotations

import itertools
import math
import statistics
from functools import partial

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algos import grpo_advantages, shape_rewards
from megarl.algos.advantages import levels_advantages
from megarl.algos.estimators import (
    asymre_advantages,
    gdpo_advantages,
    gpg_advantages,
    max_at_k_advantages,
    opo_advantages,
    pass_at_k_advantages,
    rloo_advantages,
)
from megarl.algos.specs import NAMES, advantages_of
from megarl.config.algo import PPOActorConfig
from megarl.config.base import SeamConfig
from megarl.config.check import check_config
from megarl.config.container import View
from megarl.config.errors import ConfigError
from megarl.config.loader import config_yaml, load_config
from megarl.trainer.user_code import check_code


@st.composite
def grouped(draw, sizes=(1, 6)):
    """(rewards, group_ids, lengths): groups of 1 to 6 in any order, with ties."""
    sizes = draw(st.lists(st.integers(*sizes), min_size=1, max_size=4))
    ids = draw(st.permutations([i for i, n in enumerate(sizes) for _ in range(n)]))
    rewards = draw(
        st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=len(ids), max_size=len(ids))
    )
    lengths = draw(st.lists(st.integers(1, 90), min_size=len(ids), max_size=len(ids)))
    return torch.tensor(rewards), torch.tensor(ids), torch.tensor(lengths)


def of_group(ids, i):
    return [j for j in range(len(ids)) if ids[j] == ids[i]]


@settings(deadline=None)
@given(grouped())
def test_baselines_equal_the_loop(drawn):
    rewards, ids, lengths = drawn
    r, telling = rewards.double().tolist(), 0
    for i in range(len(r)):
        same = [r[j] for j in of_group(ids, i)]
        telling += min(same) < max(same)
    batch_std = statistics.stdev(r) if len(r) > 1 else 0.0
    found = {
        "rloo": rloo_advantages(rewards, ids),
        "opo": opo_advantages(rewards, ids, lengths),
        "gpg": gpg_advantages(rewards, ids),
        "asymre": asymre_advantages(rewards, ids, -0.1),
        "max": max_at_k_advantages(rewards, ids),
        "group_batch": grpo_advantages(rewards, ids, "group_batch"),
        "population": grpo_advantages(rewards, ids, "group", std="population"),
    }
    for i in range(len(r)):
        same = of_group(ids, i)
        values, tied = [r[j] for j in same], len({r[j] for j in same}) == 1
        others = [r[j] for j in same if j != i]
        n = [int(lengths[j]) for j in same]
        mean = statistics.fmean(values)
        weighted = sum(a * b for a, b in zip(n, values, strict=True)) / sum(n)
        want = {
            "rloo": 0.0 if tied else r[i] - statistics.fmean(others),
            "opo": 0.0 if tied else r[i] - weighted,
            "gpg": 0.0 if tied else (r[i] - mean) * len(r) / telling,
            "asymre": r[i] - mean + 0.1,
            # what the maximum loses without this sample
            "max": max(values) - max(others) if others and r[i] > max(others) else 0.0,
            "group_batch": 0.0 if tied else (r[i] - mean) / (batch_std + 1e-6),
            "population": 0.0 if tied else (r[i] - mean) / (statistics.pstdev(values) + 1e-6),
        }
        for name, value in want.items():
            assert found[name][i].item() == pytest.approx(value, abs=1e-5), name
        if tied:
            assert all(found[name][i] == 0.0 for name in want if name != "asymre")


@pytest.mark.parametrize("mean", ["group", "leave_one_out", "batch", "none"])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
@settings(max_examples=15, deadline=None)
@given(drawn=grouped(), kind=st.sampled_from(["sample", "population"]))
def test_levels_of_mean_and_std_equal_the_loop(mean, std, drawn, kind):
    rewards, ids, _ = drawn
    r = rewards.double().tolist()
    whole = list(range(len(r)))

    def level(name, i, x):
        """The mean or the std of x at a level."""
        at = whole if name == "batch" else of_group(ids, i)
        return [x[j] for j in at]

    def spread(x):
        few = len(x) < 2
        return 0.0 if few else (statistics.stdev if kind == "sample" else statistics.pstdev)(x)

    x = []
    for i in whole:
        others = [r[j] for j in of_group(ids, i) if j != i]
        less = {
            "leave_one_out": statistics.fmean(others) if others else r[i],
            "none": 0.0,
        }.get(mean, statistics.fmean(level(mean, i, r)))
        x.append(r[i] - less)
    found = levels_advantages(rewards, ids, mean, std, kind)
    for i in whole:
        want = x[i]
        if std != "none":
            want /= spread(level(std, i, r)) + 1e-6
        if std == "group" and len(set(level("group", i, r))) == 1:
            want = 0.0
        assert found[i].item() == pytest.approx(want, rel=1e-4, abs=1e-5)


def test_a_level_that_is_none_is_named():
    for options in ({"mean": "prompt"}, {"std": "leave_one_out"}):
        config = PPOActorConfig(advantages=SeamConfig(type="levels", options=options))
        with pytest.raises(ValueError, match=rf"options\.{next(iter(options))}=.*use one of group"):
            advantages_of(config)


@pytest.mark.parametrize("k", [1, 2, 3])
@given(st.lists(st.booleans(), min_size=3, max_size=7))
def test_pass_at_k_is_the_mean_over_all_draws_of_k(k, right):
    """A draw of k answers earns 1 if one is right; an answer's advantage is the mean normalised
    earning of the draws it is in (arXiv 2508.10751)."""
    draws = list(itertools.combinations(range(len(right)), k))
    earned = [float(any(right[i] for i in draw)) for draw in draws]
    mean, std = statistics.fmean(earned), statistics.pstdev(earned)
    rewards = torch.tensor([float(x) for x in right])
    found = pass_at_k_advantages(rewards, torch.zeros(len(right), dtype=torch.long), k)
    for i in range(len(right)):
        mine = [e for draw, e in zip(draws, earned, strict=True) if i in draw]
        want = (statistics.fmean(mine) - mean) / std if std else 0.0
        assert found[i].item() == pytest.approx(want, abs=1e-5)


@settings(deadline=None)
@given(grouped())
def test_gdpo_of_one_part_is_grpo_to_the_bit(drawn):
    rewards, ids, _ = drawn
    grpo = grpo_advantages(rewards, ids)
    assert torch.equal(gdpo_advantages(rewards[None], [1.0], ids, batch=False), grpo)
    scaled = gdpo_advantages(rewards[None], [3.0], ids, batch=True)
    if grpo.any():  # the std of all divides: of any weight it is GRPO but for a factor
        torch.testing.assert_close(scaled, grpo / (grpo.double().std() + 1e-6 / 3).float())
    assert not scaled[grpo == 0].any()


@settings(deadline=None)
@given(grouped(), st.sampled_from([1.0, 3.0, 0.25, -1.0, 0.0]))
def test_algorithm_gdpo_with_one_part_is_grpo_to_the_bit(drawn, weight):
    part, ids, _ = drawn
    ours = PPOActorConfig(path="nowhere")
    ours.advantages = SeamConfig(type="gdpo", options={"parts": {"right": weight}})
    batch = {"reward_part/right": part, "group_ids": ids}
    batch["rewards"] = (weight * part.double()).float()  # as the reward `weighted` has it
    found = advantages_of(ours).per_sample(batch)
    assert torch.equal(found, advantages_of(PPOActorConfig(path="nowhere")).per_sample(batch))
    ours.advantages.options["batch"] = True  # as TRL
    want = gdpo_advantages(part[None], [weight], ids, batch=True)
    assert torch.equal(advantages_of(ours).per_sample(batch), want)


def test_gdpo_tells_sums_apart_that_grpo_does_not():
    """The paper's example: of two rewards, earning one of (0, 1) and both of (0, 2) are alike to
    GRPO; and to it (1, 0) beside (0, 1) is nothing, which weights tell apart."""
    ids = torch.tensor([0, 0, 1, 1])
    parts = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    alike = grpo_advantages(parts.sum(0), ids)
    assert alike[1].item() == pytest.approx(alike[3].item(), rel=1e-5)
    found = gdpo_advantages(parts, [1.0, 1.0], ids, batch=True)
    assert found[3].item() == pytest.approx(2 * found[1].item()) and found[0] == -found[1]
    other = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert not grpo_advantages(other.sum(0), torch.zeros(2)).any()
    assert gdpo_advantages(other, [1.0, 0.5], torch.zeros(2), batch=True)[0] > 0.5


def test_gdpo_takes_the_parts_of_the_reward_that_the_file_names(tmp_path):
    parts = {"right": {"type": "exact", "weight": 2}, "form": "format", "short": {"type": "exact"}}
    data = {"path": "rows.jsonl", "reward": {"type": "weighted", "options": {"parts": parts}}}
    tree = {"algorithm": "gdpo", "actor": {"path": "nowhere"}, "train_dataset": data}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    spec = advantages_of(load_config(tmp_path / "run.yaml").actor)
    values = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 3.0]])
    batch = {f"reward_part/{name}": value for name, value in zip(parts, values, strict=True)}
    batch |= {"group_ids": torch.zeros(3), "reward_part/late": torch.ones(3)}
    want = gdpo_advantages(values, [2.0, 1.0, 1.0], batch["group_ids"], batch=True)
    assert torch.equal(spec.per_sample(batch), want)
    lacking = {k: v for k, v in batch.items() if k != "reward_part/form"}  # as another source's
    want = gdpo_advantages(values[::2], [2.0, 1.0], batch["group_ids"], batch=True)
    assert torch.equal(spec.per_sample(lacking), want)
    with pytest.raises(ValueError, match="gdpo: the batch has no 'reward_part/"):
        spec.per_sample({"group_ids": batch["group_ids"]})


@pytest.mark.parametrize(
    "part", ["2", True, {"wieght": 3}, None, {"weight": None}, {"weight": "1"}, [1], math.nan]
)
def test_a_weight_of_gdpo_that_is_no_number_is_refused(part):
    config = PPOActorConfig(path="nowhere")
    config.advantages = SeamConfig(type="gdpo", options={"parts": {"a": 1, "b": part}})
    with pytest.raises(ValueError, match=r"advantages.options.parts.b=.*: use a number"):
        advantages_of(config)


@pytest.mark.parametrize(
    "words, problem",
    [
        (["train_dataset.reward.type=exact"], "needs actor.advantages.options.parts .it is null"),
        (["train_dataset.reward.type=weighted"], "needs actor.advantages.options.parts"),
        (
            ["+train_dataset.reward.options.parts={}"],
            "needs actor.advantages.options.parts .it is {}",
        ),
        (["gconfig.n_samples=1"], "compares the samples of a prompt"),
        (["reward_model.path=x"], "score has no parts"),
    ],
)
def test_what_has_no_parts_to_compare_is_refused_at_the_start(words, problem):
    given = ["algorithm=gdpo", "actor.path=nowhere", *words]
    with pytest.raises(ConfigError, match=rf"actor.advantages=gdpo.* {problem}"):
        check_config(load_config(None, given))


def test_parts_that_a_file_names_are_those_that_are_compared(tmp_path):
    """Also of a run's config.yaml, which a replay reads: its parts are written out."""
    file, parts = tmp_path / "run.yaml", {"form": 0.5, "right": {"type": "exact", "weight": 2}}
    actor = {"path": "nowhere", "advantages": {"options": {"parts": parts}}}
    file.write_text(yaml.safe_dump({"algorithm": "gdpo", "actor": actor}))
    assert load_config(file).actor.advantages.options["parts"] == parts
    words = [
        "algorithm=gdpo",
        f"train_dataset.reward={{type: weighted, options: {{parts: {parts}}}}}",
    ]
    file.write_text(config_yaml(load_config(None, words)))
    assert load_config(file).actor.advantages.options["parts"] == parts


def test_a_part_that_no_reward_has_is_refused_at_the_start():
    given = ["algorithm=gdpo", "actor.path=nowhere", "train_dataset.reward.type=weighted"]
    given.append("train_dataset.reward.options.parts={right: exact, form: format}")
    given.append("actor.advantages.options.parts={rihgt: 1.0, form: 0.5}")
    with pytest.raises(ConfigError, match=r"options.parts.rihgt: .* did you mean right\?"):
        check_config(load_config(None, given))


@pytest.mark.parametrize(
    "parts, problem",
    [
        ("[exact]", r"reward weighted: options.parts=\['exact'\]: not of type dict"),
        ("{form: nosuch}", "train_dataset.reward: unknown reward 'nosuch'"),
        ("{form: {type: exact, weight: .nan}}", "parts.form={'type': 'exact', 'weight': nan}"),
    ],
)
def test_parts_of_a_reward_that_are_none_are_shown_as_they_were_given(parts, problem):
    words = ["train_dataset.reward.type=weighted", f"train_dataset.reward.options.parts={parts}"]
    view = View(load_config(None, ["algorithm=gdpo", "actor.path=nowhere", *words]))
    with pytest.raises(ConfigError, match="no such directory"):
        view.check(check_config)
    with pytest.raises(ConfigError, match=problem):
        view.check(partial(check_code, rows={}, makes=True, in_child=False))


def test_pass_at_1_is_grpo_with_the_population_std():
    rewards, ids = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 0, 1, 1])
    torch.testing.assert_close(
        pass_at_k_advantages(rewards, ids, 1),
        grpo_advantages(rewards, ids, "group", eps=1e-12, std="population"),
    )


def test_a_group_smaller_than_k_is_refused():
    with pytest.raises(ValueError, match=r"k=3, and a group has 2 samples.*gconfig.n_samples"):
        pass_at_k_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.long), 3)


def test_every_name_makes_advantages_of_a_batch():
    options = {"pass_at_k": {"k": 1}, "reinforce_pp": {"baseline": "group"}}
    options["gdpo"] = {"parts": {"right": 1.0}}
    batch = {
        "rewards": torch.tensor([1.0, 0.0, 0.5, 0.5]),
        "group_ids": torch.tensor([0, 0, 1, 1]),
        "trained_tokens": torch.tensor([3.0, 4.0, 2.0, 9.0]),
        "baseline": torch.tensor([0.25, 0.25, 1.0, 1.0]),
        "reward_part/right": torch.tensor([1.0, 0.0, 0.5, 0.5]),
    }
    for name in NAMES["advantages"]:
        config = PPOActorConfig()
        config.advantages.type = name
        config.advantages.options = options.get(name, {})
        numbers = advantages_of(config).per_sample(batch)
        assert numbers.shape == (4,) and numbers.dtype == torch.float32, name
        # a teacher's advantages are those of tokens, in whatever sample (test_distillation.py)
        assert numbers[0] > numbers[1] if name != "teacher" else not numbers.any(), name


OF_A_GROUP = {  # every estimator that compares the samples of a prompt
    "group": ({}, {}),
    "group_mean": ({"adv_norm": "group_mean"}, {}),
    "gdpo": ({}, {"parts": {"right": 1.0}}),
    "levels": ({}, {"mean": "group", "std": "group"}),
    "levels, leave one out": ({}, {"mean": "leave_one_out", "std": "none"}),
    "reinforce_pp": ({}, {"baseline": "group"}),
    **dict.fromkeys(("rloo", "opo", "max_at_k", "gpg", "asymre"), ({}, {})),
    # their std or their threshold is the batch's, so that all groups move by the same constant
    "group_batch": ({"adv_norm": "group_batch"}, {}),
    "levels, of the batch": ({}, {"mean": "batch", "std": "batch"}),
    "pass_at_k": ({}, {"k": 2, "threshold": 0.5}),
}
OF_THE_BATCH = "group_batch", "levels, of the batch", "pass_at_k"
# all of them are exact in float32, and so are their sums
CONSTANTS = st.one_of(st.integers(-(2**17), 2**17), st.sampled_from([20, 1000, -3000, 2**17]))


def advantages_by(name, rewards, ids, lengths, threshold=0.0):
    keys, options = OF_A_GROUP[name]
    config = PPOActorConfig(**keys)
    config.advantages.type = "group" if keys else name.partition(",")[0]
    config.advantages.options = dict(options)
    if "threshold" in options:
        config.advantages.options["threshold"] += threshold
    shaped = shape_rewards(rewards, config)
    samples = {"rewards": shaped, "group_ids": ids, "trained_tokens": lengths.float()}
    return advantages_of(config).per_sample(samples | {"reward_part/right": rewards})


@pytest.mark.parametrize("name", OF_A_GROUP)
@settings(max_examples=40, deadline=None)
@given(drawn=grouped(sizes=(2, 6)), data=st.data())
def test_a_constant_added_to_the_rewards_of_a_group_changes_no_advantage(name, drawn, data):
    """To 1e-5 of the largest: sums are in float64, and advantages end as float32."""
    _, ids, lengths = drawn
    eighths = st.lists(st.integers(-16, 16), min_size=len(ids), max_size=len(ids))
    rewards = torch.tensor(data.draw(eighths)) / 8
    constants = torch.tensor(data.draw(st.lists(CONSTANTS, min_size=4, max_size=4))).float()
    moved = constants[torch.zeros_like(ids) if name in OF_THE_BATCH else ids]
    found = advantages_by(name, rewards + moved, ids, lengths, threshold=float(constants[0]))
    wanted = advantages_by(name, rewards, ids, lengths)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_scores_of_a_hundred_have_the_advantages_of_their_formula():
    scores = torch.tensor([35.0, 80.0, 0.0, 60.0])
    found = advantages_by("group", scores, torch.zeros(4).long(), torch.ones(4))
    assert found.tolist() == pytest.approx([-0.2537, 1.0510, -1.2685, 0.4711], abs=1e-4)


def test_remax_is_the_reward_less_the_greedy_answers():
    config = PPOActorConfig(reward_scaling=2.0, reward_bias=-0.5)
    config.advantages.type = "remax"
    shaped = {"rewards": torch.tensor([1.0, -1.0]), "baseline": torch.tensor([0.75, 0.75])}
    found = advantages_of(config).per_sample(shaped)
    assert found.tolist() == [1.0 - 0.5, -1.0 - 0.5]  # (0.75 - 0.5) * 2
    with pytest.raises(ValueError, match=r"no .baseline.; set rollout\.workflow\.options\.greedy"):
        advantages_of(config).per_sample({"rewards": torch.zeros(2)})
