"""How rows are drawn: mixtures by weight, curricula by pass rate, both resumable in mid-epoch."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.dataset import DatasetConfig, PartConfig, SourceConfig
from megarl.data.dataset import RowDataset, build_dataloader, build_dataset, go_on
from megarl.data.draws import ByPassRate, Curriculum, InTurn, pass_rate
from megarl.data.rows import Shares


def rows_of(sizes: dict[str, int]) -> RowDataset:
    """Rows that say their part and their number in it."""
    parts, rows = {}, []
    for name, size in sizes.items():
        parts[name] = range(len(rows), len(rows) + size)
        rows += [{"row_id": len(rows) + i, "dataset": name, "number": i} for i in range(size)]
    return RowDataset(rows, parts=parts)


def mixture(weights: dict[str, float], **keys) -> DatasetConfig:
    parts = {name: PartConfig(weight=weight) for name, weight in weights.items()}
    return DatasetConfig(type="mix", parts=parts, **keys)


def stream(loader):
    while True:
        yield from loader


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 300))
def test_every_beginning_of_the_draws_has_the_exact_shares(weights, draws):
    named = {str(i): weight for i, weight in enumerate(weights)}
    shares = Shares(named)
    total = sum(map(Fraction, weights))
    for n in range(1, draws + 1):
        shares.next()
        for name, weight in named.items():
            quota = Fraction(weight) / total * n
            assert int(quota) <= shares.counts[name] <= -int(-quota // 1), (n, name)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_is_seeded_and_each_part_is_used_up_before_it_begins_again(workers):
    data, cfg = rows_of({"a": 6, "b": 14}), mixture({"a": 1, "b": 3}, batch_size=4)
    cfg.num_workers = workers
    loader = build_dataloader(data, cfg, seed=3)
    assert len(loader) == 5
    drawn = [row for batch in islice(stream(loader), 14) for row in batch]  # 56 rows
    assert Counter(row["dataset"] for row in drawn) == {"a": 14, "b": 42}
    for name, size in (("a", 6), ("b", 14)):
        mine = [row["number"] for row in drawn if row["dataset"] == name]
        passes = [mine[i : i + size] for i in range(0, len(mine), size)]
        assert all(len(set(p)) == len(p) for p in passes) and passes[0] != passes[1]
    again = [r for b in islice(stream(build_dataloader(data, cfg, seed=3)), 14) for r in b]
    other = [r for b in islice(stream(build_dataloader(data, cfg, seed=4)), 14) for r in b]
    assert again == drawn != other


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [1, 5, 7])  # in an epoch of 5 batches, at its end, in the next
def test_a_mixture_resumes_where_it_was(done, workers):
    data, cfg = rows_of({"a": 6, "b": 14}), mixture({"a": 1, "b": 3}, batch_size=4)
    cfg.num_workers = workers
    whole = list(islice(stream(build_dataloader(data, cfg, seed=3)), 14))
    first = build_dataloader(data, cfg, seed=3)
    before = stream(first)
    assert list(islice(before, done)) == whole[:done]
    state = first.state_dict()
    second = build_dataloader(data, cfg, seed=3)
    second.load_state_dict(state)
    assert list(islice(stream(second), 14 - done)) == whole[done:]


def test_rows_of_a_mixture_keep_their_part_and_their_own_options(tokenizer):
    parts = {
        "easy": PartConfig(size=5, options={"level": 1}, weight=2),
        "hard": PartConfig(size=7, options={"level": 3, "system": "Think."}, max_length=100),
    }
    cfg = DatasetConfig(type="mix", parts=parts)
    data = build_dataset(cfg, tokenizer, purpose="rl", seed=1)
    assert [r["dataset"] for r in data] == ["easy"] * 5 + ["hard"] * 7
    assert [r["row_id"] for r in data] == list(range(12))
    assert [r["messages"][0]["role"] for r in data] == ["user"] * 5 + ["system"] * 7
    assert data.parts == {"easy": range(5), "hard": range(5, 12)}


# curriculum


def a_curriculum(size: int, **keys) -> ByPassRate:
    config = Curriculum(**({"low": 0.2, "high": 0.8} | keys))
    return ByPassRate(config, size, InTurn(size, lambda number: list(range(size))))


def test_the_band_is_preferred_and_exploration_has_its_exact_share():
    picker = a_curriculum(100, explore=0.25)
    for row in [picker.pick() for _ in range(100)]:  # nothing is known yet: all in turn
        picker.observe(row, 0.5 if row < 10 else float(row % 2))
    assert picker.explored == 100 and picker.in_band == 10
    picked = []
    for _ in range(80):
        picked.append(picker.pick())
        picker.observe(picked[-1], 0.5 if picked[-1] < 10 else float(picked[-1] % 2))
    assert picker.explored == 120
    counts = Counter(picked)
    assert sum(counts[row] for row in range(10)) >= 60
    assert max(counts[r] for r in range(10)) - min(counts[r] for r in range(10)) <= 2  # taken turns


def test_a_row_is_not_picked_again_before_its_answers_are_known():
    picker = a_curriculum(6, explore=0.5)
    assert sorted(picker.pick() for _ in range(6)) == list(range(6))
    picker.observe(3, 0.5)
    assert picker.pick() == 3
    picker.observe(3, None)  # all answers failed: what was known of it stays
    assert picker.rates == {3: 0.5} and picker.pick() == 3
    assert picker.pick() in range(6)  # all are out: no deadlock


def test_the_pass_rate_follows_the_newest_answers():
    picker = a_curriculum(2)
    picker.observe(0, 1.0)
    picker.observe(0, 0.0)
    assert picker.rates[0] == 0.5 and picker.in_band == 1
    picker.observe(0, 0.0)
    picker.observe(0, 0.0)
    assert picker.rates[0] == 0.125 and picker.in_band == 0
    assert pass_rate([1.0, 0.4, 0.5], passes_at=0.5) == pytest.approx(2 / 3)
    assert pass_rate([], passes_at=0.5) is None


@settings(deadline=None, max_examples=15)
@given(
    done=st.integers(0, 11),
    lag=st.integers(0, 3),
    answers=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, None]), min_size=5, max_size=5),
    explore=st.floats(0.05, 1.0),
)
def test_a_curriculum_over_a_mixture_resumes_bitwise(done, lag, answers, explore):
    """Whatever is answered, and however many batches later it is known."""
    data = rows_of({"a": 8, "b": 12})
    cfg = mixture({"a": 2, "b": 3}, batch_size=4)
    cfg.curriculum = {"low": 0.2, "high": 0.8, "explore": explore}

    def rates(rows):
        return [(row, answers[row % 5]) for row in rows]

    def run(loader, source, batches, pending):
        """Draws batches, and tells of each `lag` batches later; returns the rows drawn."""
        drawn = []
        for _ in range(batches):
            drawn.append([row["row_id"] for row in next(source)])
            pending.append(drawn[-1])
            if len(pending) > lag:
                loader.sampler.observe(rates(pending.pop(0)))
        return drawn

    first, pending = build_dataloader(data, cfg, seed=7), []
    source = stream(first)
    run(first, source, done, pending)
    state = json.loads(json.dumps(first.state_dict()))  # it is plain data
    second = build_dataloader(data, cfg, seed=7)
    go_on(second, state)
    if pending:  # told before anything is drawn, as a run with rows in flight does
        told = rates(pending.pop(0))
        first.sampler.observe(told)
        second.sampler.observe(told)
    assert second.sampler.stats() == first.sampler.stats()
    left = [list(pending) for _ in range(2)]
    whole = run(first, source, 12 - done, left[0])
    assert run(second, stream(second), 12 - done, left[1]) == whole
    assert second.sampler.state_dict() == first.sampler.state_dict()


def test_what_draws_need_of_a_dataset():
    cfg = DatasetConfig(curriculum={}, batch_size=1)
    with pytest.raises(ValueError, match="make it with build_dataset"):
        build_dataloader([{"row_id": 0}], cfg, seed=1)


def test_sources_are_configured_alike():
    """A part has every key of where rows come from, and a data set for training, too."""
    names = set(SourceConfig.__dataclass_fields__)
    assert names < set(PartConfig.__dataclass_fields__)
    assert names < set(DatasetConfig.__dataclass_fields__)
