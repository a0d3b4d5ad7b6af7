"""PreferencePolicy and RewardLearner over a small engine: they learn what is preferred, and what
they learn does not depend on how a batch is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megarl.algos import Ref, RewardModel
from megarl.algos.checks import row_losses
from megarl.algos.preferences import (
    DPO,
    PreferencePolicy,
    RewardLearner,
    one_token_longer,
    pair_weight,
)
from megarl.algos.roles import Role
from megarl.api.batch import Batch
from megarl.config.algo import PREFERENCE_LOSSES, PreferenceConfig, RewardModelConfig
from megarl.config.engine import TrainEngineConfig
from megarl.data.dataset import collate_pairs
from tests.unit.bigram import VOCAB, BigramEngine

Rows = list[dict[str, Any]]


def pairs(n: int, seed: int) -> Rows:
    """Returns pairs whose chosen answers are of tokens 0 to 4 and rejected ones of 5 to 9; one time
    in four only the last token tells."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=g).tolist()

    rows = []
    for i in range(n):
        prompt, length = draw(0, VOCAB, 2), 1 + i % 3
        begin = draw(0, VOCAB, length) if i % 4 == 0 else None
        row: dict[str, Any] = {"margin": 0.5 * (i % 2)}
        for side, (low, high) in (("chosen", (0, 5)), ("rejected", (5, 10))):
            answer = (draw(low, high, length) if begin is None else begin) + draw(low, high, 1)
            row[f"{side}_ids"] = prompt + answer
            row[f"{side}_mask"] = [False, False] + [True] * len(answer)
        rows.append(row)
    return rows


def policy(loss: str, engine: Any = None, **over: Any) -> tuple[PreferencePolicy, Ref]:
    preference = PreferenceConfig(loss=loss, options=over)
    role = PreferencePolicy(TrainEngineConfig(), preference, engine or BigramEngine())
    return role, Ref(TrainEngineConfig(), BigramEngine(), temperature=1.0)


@pytest.mark.parametrize("loss", PREFERENCE_LOSSES)
def test_a_policy_learns_what_is_preferred(loss: str) -> None:
    # squared gaps have gradients of another size
    role, ref = policy(loss, BigramEngine(lr={"ipo": 0.05}.get(loss, 2.0)))
    held_out = collate_pairs(pairs(32, seed=9))

    def look() -> dict[str, float]:
        if role.preference.needs_reference:
            role.compare(held_out, ref)
        return role.evaluate(held_out)

    before = look()
    if role.preference.needs_reference:  # nothing is preferred yet
        assert (before["accuracy"], before["margin"]) == (0.5, 0.0)
    for step in range(20):
        batch = collate_pairs(pairs(16, seed=step))
        if role.preference.needs_reference:
            role.compare(batch, ref)
        stats = role.train(batch)
        assert stats["update_successful"] == 1 and stats["skipped_updates"] == 0
    after = look()
    assert after["accuracy"] > before["accuracy"] + 0.2
    assert after["margin"] > before["margin"] + 0.05
    assert after["logp_chosen"] - after["logp_rejected"] > 0.2 + (
        before["logp_chosen"] - before["logp_rejected"]
    )


@pytest.mark.parametrize("loss", PREFERENCE_LOSSES)
def test_an_update_does_not_depend_on_the_order_of_pairs(loss: str) -> None:
    """The engine makes micro-batches of two rows: other orders, other micro-batches."""
    rows, tables = pairs(8, seed=3), []
    for order in (range(8), [3, 1, 4, 0, 5, 7, 2, 6]):
        role, ref = policy(loss)
        batch = collate_pairs([rows[i] for i in order])
        if role.preference.needs_reference:
            role.engine.table.data += torch.linspace(-1, 1, VOCAB)  # away from the reference
            role.compare(batch, ref)
        role.train(batch)
        tables.append(role.engine.table.detach())
    assert torch.allclose(*tables, rtol=0, atol=1e-6)


def test_a_batch_without_what_the_loss_reads_is_named() -> None:
    role, _ = policy("dpo")
    with pytest.raises(ValueError, match="train: the batch has no 'ref_logp'; it has"):
        role.train(collate_pairs(pairs(2, seed=1)))


class ScoreEngine(BigramEngine):
    """A value of x_t is a number of a table chosen by x_{t-1}: what a state scores."""

    def __init__(self, lr: float = 2.0) -> None:
        super().__init__(lr)
        self.table = torch.zeros(VOCAB, requires_grad=True)

    def _outputs(self, batch, outputs, temperature):
        return {"values": F.pad(self.table[batch["input_ids"][:, :-1]], (1, 0))}


def test_a_reward_model_learns_to_score_the_last_token() -> None:
    """Pairs in which that one alone differs could not be told from the state before it."""
    learner = RewardLearner(RewardModelConfig(), ScoreEngine(), center=0.01)
    rows = pairs(32, seed=9)
    held_out = collate_pairs(rows)
    assert learner.evaluate(held_out)["accuracy"] == 0.5
    for step in range(10):
        stats = learner.train(collate_pairs(pairs(16, seed=step), margin=True))
    found = learner.evaluate(held_out)
    assert found["accuracy"] == 1.0 and found["margin"] > 0.5 and stats["grad_norm"] > 0
    # what a run with a reward model asks of the same engine
    plain = {k: held_out[k] for k in ("input_ids", "attention_mask")}
    scores = RewardModel(RewardModelConfig(), learner.engine).compute_rewards(
        Batch.from_padded(plain)
    )
    assert scores.tolist() == pytest.approx(
        [float(learner.engine.table[ids[-1]]) for row in rows for ids in sides(row)]
    )
    assert found["reward_chosen"] == pytest.approx(float(scores[::2].mean()), rel=1e-5)


def sides(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    return row["chosen_ids"], row["rejected_ids"]


def test_a_margin_asks_for_more() -> None:
    gaps = {}
    for wanted in (False, True):
        learner = RewardLearner(RewardModelConfig(), ScoreEngine())
        for step in range(10):
            rows = [row | {"margin": 3.0} for row in pairs(16, seed=step)]
            learner.train(collate_pairs(rows, margin=wanted))
        gaps[wanted] = learner.evaluate(collate_pairs(pairs(32, seed=9)))["margin"]
    assert gaps[True] > gaps[False] + 0.2


def test_a_role_passes_evaluation_on_to_its_engine() -> None:
    rows = collate_pairs(pairs(3, seed=1))
    rows["ref_logp"] = torch.zeros(rows["input_ids"].shape)
    role = Role(BigramEngine())
    assert role.device == role.engine.device and role.eval() is role
    got = role.eval_batch(rows, DPO(), pair_weight)
    assert got == role.engine.eval_batch(rows, DPO(), pair_weight)


def test_the_added_token_is_behind_every_row() -> None:
    batch = collate_pairs(pairs(3, seed=1))
    longer = one_token_longer(batch)
    lengths = batch["attention_mask"].sum(1)
    assert torch.equal(longer["attention_mask"].sum(1), lengths + 1)
    for before, after, n in zip(batch["input_ids"], longer["input_ids"], lengths, strict=True):
        assert after[:n].tolist() == before[:n].tolist() and not after[n:].any()
    assert torch.equal(longer["loss_mask"].sum(1), batch["loss_mask"].sum(1))


def test_a_failed_update_tells_the_loss_of_pairs() -> None:
    """A loss over pairs has no loss of one row: both rows of a pair get the pair's."""
    rows = collate_pairs(pairs(3, seed=1))
    rows["ref_logp"] = torch.zeros(rows["input_ids"].shape)
    engine, loss = BigramEngine(), DPO()
    single = row_losses(engine, rows, loss, pair_weight, whole_groups=True)
    assert torch.equal(single[::2], single[1::2])
    total = engine.eval_batch(rows, loss, pair_weight)["loss"]
    assert float(single.sum() / 2) == pytest.approx(float(total) * 3, rel=1e-6)
    assert pair_weight(rows) == 3
