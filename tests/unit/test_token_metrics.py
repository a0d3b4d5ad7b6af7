"""Metrics of trained tokens, beside loops over tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch

from megarl.algos import derived_policy_stats, policy_stats
from megarl.algos.metrics import OLDEST, advantage_spread, gap_by_age, staleness
from megarl.api.batch import Batch, Padded
from megarl.config.dataset import DatasetConfig
from megarl.rollout.episodes import Outcome
from megarl.trainer import session

VERSION = 12


def tokens(rows: int = 6, width: int = 9) -> Padded:
    """Ragged rows, one of them without a trained token; what is not trained is garbage."""
    g = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, width + 1, (rows, 1), generator=g)
    mask = (torch.arange(width) < lengths) & (torch.arange(width) > 1)
    mask[2] = False
    server, trainer, advantages = torch.randn(3, rows, width, generator=g)
    return {
        "input_ids": torch.ones(rows, width).long(),
        "attention_mask": torch.arange(width) < lengths,
        "loss_mask": mask,
        "versions": torch.where(mask, torch.randint(1, 13, mask.shape, generator=g), -1).int(),
        "logprobs": torch.where(mask, server, math.nan),
        "prox_logp": torch.where(mask, server + 0.1 * trainer, math.inf),
        "advantages": torch.where(mask, advantages, math.nan),
    }


def trained(b: Padded) -> list[tuple[int, float, float]]:
    """(age, |gap|, k3) of every trained token."""
    found = []
    for i, t in b["loss_mask"].nonzero().tolist():
        log_ratio = float(b["prox_logp"][i, t].double() - b["logprobs"][i, t].double())
        age = min(VERSION - int(b["versions"][i, t]), OLDEST)
        found.append((age, abs(log_ratio), math.expm1(log_ratio) - log_ratio))
    return found


def named(age: int) -> str:
    return f"age_{age}" + "_up" * (age == OLDEST)


def test_the_histogram_of_staleness() -> None:
    b = tokens()
    ages = [age for age, _, _ in trained(b)]
    found = staleness(Batch.from_padded(b), version=VERSION)
    for k in range(OLDEST + 1):
        assert found[f"staleness/{named(k)}"] == pytest.approx(ages.count(k) / len(ages))
    shares = [v for name, v in found.items() if "age_" in name]
    assert sum(shares) == pytest.approx(1.0) and ages.count(OLDEST) > 1
    assert found["staleness/max"] == max(VERSION - b["versions"][b["loss_mask"]]) > OLDEST
    assert staleness(Batch.from_padded(b | {"loss_mask": torch.zeros_like(b["loss_mask"])}),
                     version=VERSION) == {}  # fmt: skip


def test_the_gap_by_age() -> None:
    b = tokens()
    found = gap_by_age(Batch.from_padded(b), version=VERSION)
    for k in {age for age, _, _ in trained(b)}:
        gaps = [gap for age, gap, _ in trained(b) if age == k]
        k3 = [value for age, _, value in trained(b) if age == k]
        assert found.pop(f"mismatch/{named(k)}/mean") == pytest.approx(statistics.fmean(gaps))
        assert found.pop(f"mismatch/{named(k)}/max") == pytest.approx(max(gaps))
        assert found.pop(f"mismatch/{named(k)}/k3") == pytest.approx(statistics.fmean(k3))
    assert found == {}
    # of one age there is nothing to tell apart, whichever it is
    for version in (3, VERSION):
        alike = b | {"versions": torch.where(b["loss_mask"], version, -1)}
        assert gap_by_age(Batch.from_padded(alike), version=VERSION) == {}
    assert gap_by_age(Batch.from_padded({k: v for k, v in b.items() if k != "prox_logp"}),
                      version=VERSION) == {}  # fmt: skip


def test_the_spread_of_advantages() -> None:
    b = tokens()
    values = b["advantages"][b["loss_mask"]].double()
    assert advantage_spread(Batch.from_padded(b)) == {
        "advantage_std": pytest.approx(float(values.std(unbiased=False))),
        "advantage_min": float(values.min()),
        "advantage_max": float(values.max()),
    }


def test_numbers_do_not_depend_on_how_the_batch_is_held() -> None:
    """Padded wider, and in rows that come one by one."""
    b = tokens()
    wide = {k: torch.nn.functional.pad(v, (0, 4)) for k, v in b.items()}
    rows = [{k: v[i : i + 1] for k, v in b.items()} for i in range(len(b["input_ids"]))]

    def all_of(batch: Batch) -> dict[str, float]:
        kw = {"version": VERSION}
        return advantage_spread(batch) | staleness(batch, **kw) | gap_by_age(batch, **kw)

    want = all_of(Batch.from_padded(b))
    assert len(want) > 20
    assert all_of(Batch.from_padded(wide)) == all_of(Batch.from_local(rows)) == want


def test_the_figures_of_an_update_add_up_over_micro_batches() -> None:
    """They equal loops over tokens, whatever stands where nothing is trained."""
    b, g = tokens(), torch.Generator().manual_seed(7)
    shape, mask = b["loss_mask"].shape, b["loss_mask"]
    logp = torch.where(mask, b["prox_logp"] + 0.3 * torch.randn(shape, generator=g), math.nan)
    outputs = {"logprobs": logp, "entropy": torch.rand(shape, generator=g)}
    b["ref_logp"] = torch.where(mask, b["logprobs"] - 0.2, math.nan)
    dropped = mask & (torch.rand(shape, generator=g) < 0.3)

    def figures(*cuts: int) -> dict[str, tuple[float, float]]:
        sums: dict[str, tuple[float, float]] = {}
        for rows in torch.arange(len(mask)).tensor_split(list(cuts)):
            made = policy_stats(
                {k: v[rows] for k, v in outputs.items()},
                {k: v[rows] for k, v in b.items()},
                "prox_logp",
                surrogate=None,
                dropped=dropped[rows],
            )
            for name, (value, weight) in made.items():
                s, w = sums.get(name, (0.0, 0.0))
                sums[name] = s + float(value), w + float(weight)
        return sums

    whole = figures()
    for parts in (figures(1, 2, 3, 4, 5), figures(3)):
        assert parts == {k: (pytest.approx(v, rel=1e-6), w) for k, (v, w) in whole.items()}
    places = mask.nonzero().tolist()

    def mean(of: Callable[[float, float, float], float]) -> object:
        values = [
            of(*(float(x[i, t]) for x in (logp, b["prox_logp"], b["logprobs"]))) for i, t in places
        ]
        return pytest.approx(statistics.fmean(values), rel=1e-5)

    means = {name: value / weight for name, (value, weight) in whole.items()}
    assert means["ratio"] == mean(lambda new, old, _: math.exp(new - old))
    assert means["ratio_abs_dev"] == mean(lambda new, old, _: abs(math.exp(new - old) - 1))
    assert means["approx_kl"] == mean(lambda new, _, behav: math.expm1(new - behav) - new + behav)
    assert means["approx_kl_k1"] == mean(lambda new, _, behav: behav - new)
    ref = [float(b["ref_logp"][i, t] - logp[i, t]) for i, t in places]
    assert means["kl_ref"] == pytest.approx(statistics.fmean(math.expm1(x) - x for x in ref))
    assert means["behav_dropped_frac"] == pytest.approx(int(dropped.sum()) / len(places))
    assert means["entropy"] == pytest.approx(float(outputs["entropy"][mask].mean()))
    weights = [math.exp(float(b["prox_logp"][i, t] - b["logprobs"][i, t])) for i, t in places]
    kish = sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)
    derived = derived_policy_stats(means, means)
    assert derived["behav_ess"] == pytest.approx(kish, rel=1e-5)
    assert derived["ratio_rms_dev"] ** 2 == mean(lambda new, old, _: math.expm1(new - old) ** 2)


def test_pass_rates_by_difficulty() -> None:
    found = session.Results(DatasetConfig(), sampler=None)
    found.take([
        Outcome({"difficulty": 2}, [1.0, 0.0]),
        Outcome({"difficulty": 2.0}, [1.0, 1.0]),
        Outcome({"difficulty": "a/b"}, [0.5]),
        Outcome({"difficulty": 0.25}, []),
        Outcome({}, [1.0]),
    ])  # fmt: skip
    assert found.figures == {
        "difficulty/2/prompts": 2.0, "difficulty/2/pass_rate": 0.75,
        "difficulty/a_b/prompts": 1.0, "difficulty/a_b/pass_rate": 0.0,
        "difficulty/0.2/prompts": 1.0,
    }  # fmt: skip
    # a column of nearly as many values as rows does not become as many metrics
    found.take([Outcome({"difficulty": i}, [1.0]) for i in range(100)])
    names = {key.split("/")[1] for key in found.figures}
    assert len(names) == session.MOST - 1 and found.figures["difficulty/other/prompts"] > 80
