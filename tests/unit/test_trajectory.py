"""A rollout is a tree of turns: every sampled token is trained in one row, as it was sampled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.api.inference import FAILURES
from megarl.api.records import ModelResponse
from megarl.rollout.episode import check_episode, without_failed
from megarl.rollout.trajectory import Trajectory, Turn, to_batch

# one turn of a random tree: (written, tokens, which of the turns so far it follows on)
STEPS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 10**6)), min_size=1, max_size=14
)


def answer(at: Turn, tokens: list[int], **kw: Any) -> ModelResponse:
    """An answer whose logprobs and versions tell which token they belong to."""
    return ModelResponse(
        input_tokens=at.path_tokens(),
        output_tokens=tokens,
        output_logprobs=[-t / 1024 for t in tokens],
        output_versions=list(tokens),
        **kw,
    )


def grow(steps: list[tuple[bool, int, int]], *, line: bool = False, index: int = 0) -> Trajectory:
    """A tree after a prompt, in which no token comes twice."""
    tree = Trajectory(index=index)
    tree.read([1])
    count = 2
    for written, n, place in steps:
        at = tree.head if line else tree.turns[place % len(tree.turns)]
        tokens = list(range(count, count + n))
        count += n
        if written and at.end:
            tree.wrote(answer(at, tokens), after=at)
        else:
            tree.read(tokens, after=at)
    return tree


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_every_sampled_token_is_trained_in_one_row_as_it_was_sampled(steps):
    tree = grow(steps)
    batch, sampled = to_batch([tree], [1.0]), Counter()
    for turn in tree.turns:
        if turn.response is not None:
            sampled.update(turn.tokens)
    assert Counter(batch["input_ids"][batch["loss_mask"]].tolist()) == sampled
    written = torch.isin(batch["input_ids"], torch.tensor(sorted(sampled), dtype=torch.long))
    where = written & batch["attention_mask"]  # also in rows that do not train them
    ids = batch["input_ids"]
    assert torch.equal(batch["logprobs"], torch.where(where, -ids / 1024, 0.0))
    assert torch.equal(batch["versions"], torch.where(where, ids, -1).int())
    paths = {tuple(turn.path_tokens()) for turn in tree.turns}
    rows = [tuple(i[m].tolist()) for i, m in zip(ids, batch["attention_mask"], strict=True)]
    assert len(set(rows)) == len(rows) and set(rows) <= paths
    if len(rows) > 1:  # no row without a token of its own
        assert batch["loss_mask"].any(1).all()
    assert tree.forks == len(rows) - 1
    assert batch["rewards"].tolist() == [1.0] * len(rows)
    again = to_batch([grow(steps)], [1.0])
    assert all(torch.equal(again[k], v) for k, v in batch.items())


@settings(max_examples=50, deadline=None)
@given(lines=st.lists(STEPS, min_size=1, max_size=4))
def test_a_line_is_one_row_with_all_its_turns(lines):
    rollouts = [grow(steps, line=True, index=i) for i, steps in enumerate(lines)]
    batch = to_batch(rollouts, list(map(float, range(len(lines)))))
    assert batch["rollout_ids"].tolist() == batch["rewards"].tolist() == [*range(len(lines))]
    for i, rollout in enumerate(rollouts):
        real = batch["attention_mask"][i]
        assert batch["input_ids"][i][real].tolist() == rollout.tokens
        assert int(batch["loss_mask"][i].sum()) == sum(a.output_len for a in rollout.answers)
        assert rollout.forks == 0


def test_a_shared_turn_is_trained_in_the_first_row_and_an_unanswered_branch_is_none():
    tree = Trajectory()
    asked = tree.read([1, 2])
    first = tree.wrote(answer(asked, [3, 4], stop_reason="length"))
    tree.read([5])  # asked, but the server was lost
    tree.read([5], after=first)
    tree.wrote(answer(tree.head, [6], stop_reason="stop"))
    tree.branch(first)
    tree.read([7])
    tree.wrote(answer(tree.head, [8], stop_reason="stop"))
    tree.branch(tree.root)  # a shortened history
    tree.read([9])
    tree.wrote(answer(tree.head, [10], stop_reason="length"))
    tree.read([11])
    batch = to_batch([tree], [0.5])
    assert batch["input_ids"].tolist() == [
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 4, 7, 8],
        [9, 10, 11, 0, 0, 0],
    ]
    assert batch["loss_mask"].int().tolist() == [
        [0, 0, 1, 1, 0, 1],
        [0, 0, 0, 0, 0, 1],
        [0, 1, 0, 0, 0, 0],
    ]
    assert batch["truncated"].tolist() == [False, False, True]
    check_episode(batch, version=100)


def test_find_goes_as_far_as_the_recorded_tokens_do():
    tree = Trajectory()
    assert tree.find([1, 2]) is tree.root
    asked = tree.read([1, 2])
    one = tree.wrote(answer(asked, [3]))
    other = tree.wrote(answer(asked, [3]), after=asked)  # the same words, sampled again
    assert tree.find([1, 2, 3, 4]) is one
    longer = tree.read([4], after=one)
    assert tree.find([1, 2, 3, 4, 5]) is longer
    assert tree.find([1, 2, 3, 9]) is other and tree.find([1, 2, 9]) is asked
    assert tree.find([1]) is tree.root  # half of a turn is not one
    assert tree.read([], after=one) is one and tree.turns[longer.number] is longer


def test_rewards_of_turns_are_discounted_and_stand_at_their_last_tokens():
    tree = Trajectory()
    first = tree.wrote(answer(tree.read([1]), [2, 3]))
    tree.read([4])
    second = tree.wrote(answer(tree.head, [5]))
    with pytest.raises(ValueError, match=r"has no reward: call score\(\)"):
        to_batch([tree])
    first.reward, second.reward = 1.0, 2.0
    tree.score(4.0, discount=0.5)
    assert tree.reward == 1.0 + 0.5 * (2.0 + 4.0)
    batch = to_batch([tree], turn_rewards=True)
    assert batch["rewards"].tolist() == [4.0]
    assert batch["token_rewards"].tolist() == [[0.0, 0.0, 1.0, 0.0, 1.0]]
    second.parent.reward = 1.0
    with pytest.raises(ValueError, match="turn 3 was read, so it earns nothing"):
        to_batch([tree])


def test_a_rollout_that_failed_is_one_row_that_leaves():
    good, bad = grow([(True, 2, 1)]), grow([(True, 2, 1), (True, 2, 1)])
    assert bad.forks == 1
    bad.fail("tool")
    batch = to_batch([bad, good, bad], [1.0, 2.0, 3.0])
    assert batch["valid"].tolist() == [False, True, False]
    assert batch["failure"].tolist() == [FAILURES.index("tool"), 0, FAILURES.index("tool")]
    kept, failed = without_failed(batch)
    assert kept["rewards"].tolist() == [2.0] and failed == [("tool", 3), ("tool", 3)]
    with pytest.raises(ValueError, match="failure 'weather': use one of other, environment"):
        bad.fail("weather")


def test_routes_are_those_of_the_first_response_that_knows_them():
    def routes(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int16).reshape(-1, 1, 1)

    tree = Trajectory()
    tree.read([1, 2])
    first = tree.wrote(answer(tree.head, [3], routed_experts=routes(4, 5)))
    tree.read([6])
    tree.wrote(answer(tree.head, [7], routed_experts=routes(-1, -1, 8, 9)))
    tree.wrote(answer(first, [8]), after=first)
    batch = to_batch([tree], [0.0])
    assert batch["routed_experts"][..., 0, 0].tolist() == [[4, 5, 8, 9, -1], [4, 5, -1, -1, -1]]
    assert batch["routed_experts"].dtype == torch.int16


def test_answers_bring_the_routes_that_earlier_ones_lack():
    def routes(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int8).reshape(-1, 1, 1)

    tree = Trajectory()
    tree.read([1, 2])
    assert tree.head.routed() == 0
    first = tree.wrote(answer(tree.head, [3], routed_experts=routes(4, 5)))
    assert first.routed() == 2
    asked = tree.read([6])
    assert asked.routed() == 2
    last = tree.wrote(answer(asked, [7], routed_experts=routes(8, 9), routes_from=2))
    assert last.routed() == 4
    # a gap: positions 4 and 5 were never told, so they are asked for again
    gap = tree.wrote(answer(last, [8, 9], routed_experts=routes(1), routes_from=6))
    assert gap.routed() == 4
    routes_ = to_batch([tree], [0.0])["routed_experts"]
    assert routes_[0, :, 0, 0].tolist() == [4, 5, 8, 9, -1, -1, 1]


def test_what_the_server_did_not_see_is_refused():
    tree = Trajectory()
    tree.read([1, 2])
    with pytest.raises(ValueError, match="an answer to 1 tokens cannot follow on turn 1"):
        tree.wrote(ModelResponse(input_tokens=[1]))
    with pytest.raises(ValueError, match="2 tokens has 1 logprobs and 2 versions"):
        tree.wrote(
            ModelResponse(
                input_tokens=[1, 2],
                output_tokens=[3, 4],
                output_logprobs=[0.0],
                output_versions=[0, 0],
            )
        )
    with pytest.raises(ValueError, match="turn 0 is one of another trajectory"):
        tree.read([1], after=Trajectory().root)
