"""pass@k and maj@k, against counting every choice of answers."""

from __future__ import annotations

from itertools import combinations

import pytest

from megarl.trainer.scores import (
    figures,
    final_answers,
    majority_reward,
    pass_at_k,
    steps_of_k,
)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(n: int) -> None:
    for right in range(n + 1):
        outcomes = [True] * right + [False] * (n - right)
        for k in range(1, n + 1):
            chosen = list(combinations(outcomes, k))
            share = sum(map(any, chosen)) / len(chosen)
            assert pass_at_k(right, n, k) == pytest.approx(share, abs=1e-12)
    with pytest.raises(ValueError, match="k must be from 1 to n"):
        pass_at_k(0, n, n + 1)


def test_majority_is_the_reward_of_what_most_samples_say() -> None:
    assert majority_reward(["4", "5", "4"], [1.0, 0.0, 1.0]) == 1.0
    assert majority_reward(["4", "5", "5"], [1.0, 0.0, 0.0]) == 0.0
    assert majority_reward(["4", "5"], [1.0, 0.0]) == 0.5  # a tie
    assert majority_reward(["4", "4"], [1.0, 0.5]) == 0.75  # of one answer, judged by its text


def test_final_answers_are_read_as_the_reward_reads_them() -> None:
    texts = [
        r"so \boxed{3} or \boxed{\frac{1}{2}}.",
        "that is 0.5",
        "thus 3 #### 1,200 \n",
        "1200",
        "12 apples and 1,500 pears.",
        "  yes ",
        "I would say that the answer is 5, for 3 are gone.",
    ]
    half, decimal, thousand, plain, pears, word, named = final_answers(texts)
    assert half == decimal and thousand == plain
    assert (pears, word, named) == ("1500", "yes", "5")


def test_an_answer_that_nobody_could_compute_is_its_own() -> None:
    tower = r"\boxed{9^{9^{9^{9}}}}"
    assert final_answers([tower, "7"]) == [tower, "7"]


def test_steps_of_k() -> None:
    assert [steps_of_k(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_scores_of_a_data_set() -> None:
    prompts, rewards = [0, 0, 0, 1, 1], [1.0, 1.0, 0.0, 0.0, 0.5]
    bounds = {"failed": 0, "max_failed": 0.1, "seed": 1, "name": "sums"}
    found = figures(prompts, rewards, ["1", "1", "2", "3", "4"], **bounds)
    assert found["accuracy"] == pytest.approx(0.4) and found["reward"] == pytest.approx(0.5)
    assert found["some_credit"] == pytest.approx(0.6) and found["samples"] == 5
    assert found["pass@1"] == pytest.approx((2 / 3 + 0) / 2)
    assert found["pass@2"] == pytest.approx((1 + 0) / 2)
    assert found["pass@3"] == 1.0  # of the one prompt that has three answers
    assert found["maj@3"] == pytest.approx((1 + 0.25) / 2)
    assert found["accuracy_lo"] <= 0.4 <= found["accuracy_hi"]
    assert "maj@3" not in figures(prompts, rewards, [], **bounds)  # none was read
    alone = figures([0, 1], [1.0, 0.0], [], **bounds)
    assert alone["accuracy"] == 0.5 and not [name for name in alone if "@" in name]
