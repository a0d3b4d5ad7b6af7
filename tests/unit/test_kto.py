"""KTO against a loop written from its paper, value and gradient, and its reference point."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.algos.kto import KTO, answer_weight, mismatched, reference_point

WIDTH = 9


def answers(seed: int = 0, rows: int = 6) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns logprobs with gradient, and a batch of prompts of 2 or 3 tokens with answers."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, WIDTH + 1, (rows,), generator=g)
    attention = torch.arange(WIDTH) < lengths[:, None]
    prompts = 2 + torch.arange(rows) % 2
    batch = {
        "input_ids": torch.randint(3, 90, (rows, WIDTH), generator=g) * attention,
        "attention_mask": attention,
        "loss_mask": attention & (torch.arange(WIDTH) >= prompts[:, None]),
        "ref_logp": -3 * torch.rand(rows, WIDTH, generator=g, dtype=torch.float64),
        "desirable": torch.arange(rows) % 3 > 0,
        "reference_point": torch.full((rows,), 0.7, dtype=torch.float64),
    }
    logp = -3 * torch.rand(rows, WIDTH, generator=g, dtype=torch.float64)
    return logp.requires_grad_(), batch


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def loop(loss: KTO, logp: torch.Tensor, batch: dict[str, torch.Tensor]) -> float:
    """Adds lambda - v(x, y), L_KTO of arXiv 2402.01306, over the answers."""
    total = 0.0
    for i in range(len(logp)):
        r = 0.0
        for t in batch["loss_mask"][i].nonzero().flatten().tolist():
            r += float(logp[i, t]) - float(batch["ref_logp"][i, t])
        z = float(batch["reference_point"][i])
        if batch["desirable"][i]:
            total += loss.desirable_weight * (1 - sigmoid(loss.beta * (r - z)))
        else:
            total += loss.undesirable_weight * (1 - sigmoid(loss.beta * (z - r)))
    return total


@pytest.mark.parametrize(
    "loss", [KTO(), KTO(beta=0.4, desirable_weight=1.33, undesirable_weight=0.5)], ids=str
)
def test_value_and_gradient_equal_the_loop(loss: KTO) -> None:
    logp, batch = answers()
    found, stats = loss({"logprobs": logp}, batch)
    assert found.item() == pytest.approx(loop(loss, logp, batch), abs=1e-9)
    assert torch.autograd.gradcheck(lambda x: loss({"logprobs": x}, batch)[0], logp, atol=1e-6)
    grad = torch.autograd.grad(found, logp)[0]
    assert (grad[~batch["loss_mask"]] == 0).all()
    good = batch["desirable"][:, None] & batch["loss_mask"]
    assert (grad[good] < 0).all() and (grad[~good & batch["loss_mask"]] > 0).all()
    assert stats["accuracy"][1] == 6 and stats["reward_chosen"][1] == 4


def test_cutting_the_batch_anywhere_changes_nothing() -> None:
    loss, (logp, batch) = KTO(), answers()
    whole = loss({"logprobs": logp}, batch)[0] / answer_weight(batch)
    (gradient,) = torch.autograd.grad(whole, logp)
    for cuts in ([1, 2, 3], [2, 4], [5, 1]):
        parts = list(torch.arange(6).split(cuts))
        sums = [loss({"logprobs": logp[p]}, {k: v[p] for k, v in batch.items()})[0] for p in parts]
        weights = [answer_weight({k: v[p] for k, v in batch.items()}) for p in parts]
        cut = sum(sums) / sum(weights)
        assert cut.item() == pytest.approx(whole.item(), abs=1e-12)
        assert torch.allclose(torch.autograd.grad(cut, logp)[0], gradient, rtol=0, atol=1e-15)


def test_the_reference_point_is_a_mean_over_mismatched_rows_and_never_negative() -> None:
    _, batch = answers()
    made = mismatched(batch)
    log_ratio = torch.linspace(-0.5, 1.5, made["loss_mask"].numel()).view(made["loss_mask"].shape)
    rows = [
        sum(log_ratio[i, t].item() for t in made["loss_mask"][i].nonzero().flatten().tolist())
        for i in range(6)
    ]
    want = sum(rows) / 6
    assert want > 0
    assert reference_point(log_ratio, made).item() == pytest.approx(want, rel=1e-6)
    assert reference_point(-log_ratio, made).item() == 0


def test_every_prompt_gets_the_next_answer_to_another_prompt() -> None:
    def row(prompt: list[int], answer: list[int]) -> tuple[list[int], list[bool]]:
        return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)

    # two answers to the prompt 5 6 stand side by side, as the two of a pair may
    rows = [row([5, 6], [10]), row([5, 6], [11, 12]), row([7], [13, 14, 15]), row([8, 8, 8], [16])]
    batch = padded(rows)
    made = mismatched(batch)
    got = [
        (ids[real].tolist(), ids[trained].tolist())
        for ids, real, trained in zip(*made.values(), strict=True)
    ]
    assert got == [
        ([5, 6, 13, 14, 15], [13, 14, 15]),
        ([5, 6, 13, 14, 15], [13, 14, 15]),
        ([7, 16], [16]),
        ([8, 8, 8, 10], [10]),
    ]
    alike = mismatched(padded([row([5], [10]), row([5], [11])]))
    assert alike["input_ids"].tolist() == [[5, 11], [5, 10]]


def padded(rows: list[tuple[list[int], list[bool]]]) -> dict[str, torch.Tensor]:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([i + [0] * (width - len(i)) for i, _ in rows])
    mask = torch.tensor([m + [False] * (width - len(m)) for _, m in rows])
    return {"input_ids": ids, "attention_mask": ids > 0, "loss_mask": mask}
