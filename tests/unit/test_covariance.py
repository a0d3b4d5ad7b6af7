"""Clip-Cov and KL-Cov: which tokens are picked of a whole batch, and what becomes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algos import Actor, PolicyLoss
from megarl.algos.covariance import covariances, largest, shuffled
from megarl.algos.surrogates import ClipCov, KLCov
from megarl.api.batch import Batch, Home, Tokens
from megarl.config.algo import PPOActorConfig
from megarl.config.base import SeamConfig
from tests.unit.bigram import BigramEngine, rollout
from tests.unit.test_losses import make_batch

Fields = dict[str, torch.Tensor]


class Threads:
    """A rank among others, each a thread."""

    def __init__(self, rank: int, barrier: Barrier, said: list[Any]) -> None:
        self.rank, self.size, self._barrier, self._said = rank, barrier.parties, barrier, said

    def all_gather(self, data: torch.Tensor, sizes: Sequence[int] | None = None) -> Any:
        self._said[self.rank] = data
        self._barrier.wait(timeout=60)
        found = list(self._said)
        self._barrier.wait(timeout=60)
        return found


def on_ranks(padded: Fields, of_row: list[int], fn: Any) -> list[list[bool]]:
    """The rows of `fn(batch)`, Tokens, where index i of 3 holds the rows with of_row = i; the last
    two of four ranks hold the same."""
    barrier, said = Barrier(4), [None] * 4
    whole = Batch.from_padded(padded)
    home = Home((0, 1, 2, 2), torch.tensor(of_row))

    def of_rank(rank: int) -> list[tuple[int, list[bool]]]:
        rows = home.rows(rank)
        tokens = {name: values.take(rows) for name, values in whole.per_token.items()}
        comm = Threads(rank, barrier, said)
        batch = Batch(whole.lengths, whole.per_sample, tokens, home=home, comm=comm)
        return list(zip(rows.tolist(), split(fn(batch)), strict=True))

    with ThreadPoolExecutor(4) as pool:
        found = [dict(part) for part in pool.map(of_rank, range(4))]
    assert found[2] == found[3]
    merged = found[0] | found[1] | found[2]
    return [merged[row] for row in range(len(of_row))]


def split(tokens: Tokens) -> list[list[bool]]:
    return [part.tolist() for part in tokens.values.split(tokens.lengths.tolist())]


@settings(max_examples=40, deadline=None)
@given(
    scores=st.lists(
        st.lists(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1e-300, 3.0, 3.5]), max_size=5),
        min_size=1, max_size=5,
    ).filter(any),
    count=st.integers(0, 12),
)  # fmt: skip
def test_the_largest_are_those_of_a_sort_and_of_equal_ones_the_first(scores, count):
    lengths = torch.tensor([len(row) for row in scores])
    width = int(lengths.max())
    mask = torch.arange(width) < lengths[:, None]
    batch = Batch.from_padded({"input_ids": mask.long(), "attention_mask": mask})
    flat = [x for row in scores for x in row]
    found = largest(batch, Tokens(torch.tensor(flat, dtype=torch.float64), lengths), count)
    order = sorted(range(len(flat)), key=lambda i: -flat[i])[:count]  # sorted is stable
    assert found.values.nonzero().flatten().tolist() == sorted(
        i for i in order if flat[i] > -math.inf
    )
    assert list(batch) == ["input_ids"]


def by_hand(batch: Fields) -> dict[tuple[int, int], float]:
    at = [tuple(x) for x in batch["loss_mask"].nonzero().tolist()]
    logp, adv = ([float(batch[n][i, t]) for i, t in at] for n in ("prox_logp", "advantages"))
    x, a = sum(logp) / len(at), sum(adv) / len(at)
    return {key: (p - x) * (v - a) for key, p, v in zip(at, logp, adv, strict=True)}


def right_padded(seed: int = 0) -> Fields:
    """A batch of more than 100 trained tokens."""
    _, batch = make_batch(seed, s=72)
    return batch


def test_covariances_are_those_of_the_papers_definition():
    batch = right_padded()
    found, want = covariances(Batch.from_padded(batch), "prox_logp"), by_hand(batch)
    width = batch["input_ids"].shape[1]
    for (i, t), value in want.items():
        assert found.padded(width=width)[i, t].item() == pytest.approx(value, rel=1e-12)
    assert (found.values > -math.inf).sum() == len(want)


@pytest.mark.parametrize(
    "surrogate", [KLCov(share=0.1), ClipCov(share=0.1, low=0.0, high=9.0)], ids=["kl", "clip"]
)
def test_ranks_rows_and_mini_batches_change_nothing_of_what_is_picked(surrogate):
    batch = right_padded()
    n = int(0.1 * int(batch["loss_mask"].sum()))
    want = split(surrogate.pick(Batch.from_padded(batch), 7, "prox_logp"))
    assert sum(map(sum, want)) == n > 5
    for of_row in ([0, 1, 2, 0, 1, 2], [2, 2, 0, 0, 0, 1]):
        assert on_ranks(batch, of_row, lambda b: surrogate.pick(b, 7, "prox_logp")) == want
    cov = sorted(by_hand(batch).items(), key=lambda kv: -kv[1])
    at = {(i, t) for i, row in enumerate(want) for t, x in enumerate(row) if x}
    if isinstance(surrogate, KLCov):
        assert at == {key for key, _ in cov[:n]}
        return
    assert all(0.0 <= value <= 9.0 for key, value in cov if key in at)
    assert at != {key for key, _ in cov[:n]}
    assert split(surrogate.pick(Batch.from_padded(batch), 8, "prox_logp")) != want


def test_every_candidate_is_as_likely():
    batch = right_padded()
    whole = Batch.from_padded(batch)
    among = Tokens(whole["loss_mask"].values.bool(), whole.lengths)
    hits = torch.zeros(len(among.values))
    for seed in range(100):
        hits += largest(whole, shuffled(whole, among, seed), 10).values
    tokens = int(among.values.sum())
    assert hits[~among.values].sum() == 0 and hits.sum() == 1000
    mean = 1000 / tokens
    assert (hits[among.values] - mean).abs().max() < 5 * math.sqrt(mean)


def actor_with(surrogate: str, parts: int = 1, **options: Any) -> tuple[Any, Fields]:
    config = PPOActorConfig(
        path="nowhere", surrogate=SeamConfig(type=surrogate, options=options),
        ppo_n_minibatches=parts,
    )  # fmt: skip
    actor: Any = Actor(config, BigramEngine(), temperature=1.0)
    batch = rollout(actor.engine)
    actor.compute_prox_logp(batch)
    actor.compute_advantages(batch)
    return actor, batch


@pytest.mark.parametrize("surrogate", ["clip_cov", "kl_cov"])
def test_an_update_picks_once_for_all_its_mini_batches(surrogate):
    options = dict(share=0.1) | (dict(low=0.0) if surrogate == "clip_cov" else {})
    picked = []
    for parts in (1, 4):
        actor, batch = actor_with(surrogate, parts, **options)
        stats = actor.ppo_update(batch)
        picked.append(batch["picked"])
        assert stats["picked_frac"] == pytest.approx(9 / 96)  # of 16 rows of 6 tokens
    assert torch.equal(*picked) and picked[0].sum() == 9


def penalties(name: str, logp: Any, batch: Fields, picked: Any) -> tuple[float, dict[Any, float]]:
    """The sum over tokens, and its derivative by every token's logp."""
    total, slopes = 0.0, {}
    for i, t in batch["loss_mask"].nonzero().tolist():
        a = float(batch["advantages"][i, t])
        d = float(logp[i, t] - batch["prox_logp"][i, t])
        u, held = math.exp(d), bool(picked[i, t])
        if name == "kl":
            value = -u * a + (0.5 * abs(d) if held else 0.0)
            slope = -u * a + (0.5 * math.copysign(1, d) if held else 0.0)
        else:
            inside = u * a <= min(max(u, 0.8), 1.3) * a
            value = 0.0 if held else -min(u * a, min(max(u, 0.8), 1.3) * a)
            slope = -u * a if inside and not held else 0.0
        total, slopes[i, t] = total + value, slope
    return total, slopes


@pytest.mark.parametrize("name", ["clip", "kl"])
def test_value_and_gradient_equal_the_loop(name):
    from megarl.algos.surrogates import Clip

    logp, batch = make_batch(s=72)
    surrogate: Any = KLCov(share=0.1, coef=0.5)
    if name == "clip":
        surrogate = ClipCov(clip=Clip(eps_low=0.2, eps_high=0.3), share=0.1, low=-1.0, high=1.0)
    width = logp.shape[1]
    picked = surrogate.pick(Batch.from_padded(batch), 3, "prox_logp").padded(width=width)
    batch["picked"] = picked
    total, slopes = penalties(name, logp, batch, picked)
    logp.requires_grad_()
    loss, stats = PolicyLoss(surrogate=surrogate)({"logprobs": logp}, batch)
    loss.backward()
    assert loss.item() == pytest.approx(total, abs=1e-9)
    for (i, t), slope in slopes.items():
        assert logp.grad[i, t].item() == pytest.approx(slope, abs=1e-9)
    assert stats["picked_frac"][0] == picked.sum() > 5
