"""stats_tracker in one process; over ranks: tests/dist/test_ranks.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import megarl.parallel.mcore  # noqa: F401  before megatron
from megarl.observability.stats_tracker import StatsTracker, joined
from tests.waits import pretend_device


def test_scalars_are_averaged_under_their_scopes() -> None:
    tracker = StatsTracker()
    tracker.scalar(c=1.0)
    tracker.scalar(c=2)
    with tracker.scope("A"):
        tracker.scalar(c=123)
        with tracker.scope("B"):
            tracker.scalar(c=234)
    assert tracker.export() == {"c": 1.5, "A/c": 123.0, "A/B/c": 234.0}
    assert tracker.export() == {}


def test_tensors_are_reduced_where_their_denominator_holds() -> None:
    """The design document's example: lengths of right and of wrong answers."""
    tracker = StatsTracker()
    rewards = torch.tensor([1.0, 0.0, 1.0, -1.0])
    seqlens = torch.tensor([10.0, 20.0, 40.0, 5.0])
    tracker.denominator(right=rewards > 0, wrong=rewards <= 0, never=rewards > 9)
    tracker.stat(right_len=seqlens, denominator="right")
    for how in ("sum", "avg", "min", "max"):
        tracker.stat(denominator="wrong", reduce_type=how, **{f"wrong_{how}": seqlens})
    tracker.stat(nothing=seqlens, denominator="never", reduce_type="avg")
    tracker.stat(least=seqlens, denominator="never", reduce_type="min")
    stats = tracker.export()
    assert math.isnan(stats.pop("nothing")) and math.isnan(stats.pop("least"))
    assert stats == {
        "right": 2.0, "wrong": 2.0, "never": 0.0,
        "right_len/avg": 25.0, "right_len/min": 10.0, "right_len/max": 40.0,
        "wrong_sum": 25.0, "wrong_avg": 12.5, "wrong_min": 5.0, "wrong_max": 20.0,
    }  # fmt: skip


def test_a_gpu_is_waited_for_once_a_mask_and_once_a_value() -> None:
    tracker = StatsTracker()
    with pretend_device() as device:
        mask, values = torch.tensor([True, False]).cuda(), torch.tensor([3.0, 5.0]).cuda()
        device.take()
        tracker.denominator(some=mask)
        tracker.stat(denominator="some", x=values, y=2 * values)
        waits = device.take()
        assert tracker.export()["y/max"] == 6.0 and not device.take()
    assert [place.kind for place in waits.elements()] == ["cpu"] * 3


def test_the_largest_of_what_was_recorded() -> None:
    tracker = StatsTracker()
    for gib in (1.5, 4.0, 2.0):
        tracker.peak(gib=gib)
    assert tracker.export() == {"gib": 4.0}


def test_what_several_processes_took_is_joined() -> None:
    trackers = [StatsTracker() for _ in range(2)]
    for tracker, values in zip(trackers, ([1.0, 2.0], [6.0])):
        for value in values:
            tracker.scalar(c=value)
            tracker.peak(gib=value)
    trackers[1].scalar(d=4.0)
    assert joined(*(t.take() for t in trackers)) == {"c": 3.0, "d": 4.0, "gib": 6.0}
    assert joined(*(t.take() for t in trackers)) == {}


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    """Rows are cut anywhere, among them parts that the mask leaves nothing of."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(9, 5, generator=generator) < 0.6
    mask[3:5] = False
    values = torch.randint(-50, 50, (9, 5), generator=generator)

    def recorded(*cuts: int) -> dict[str, float]:
        tracker = StatsTracker()
        for rows in torch.arange(9).tensor_split(list(cuts)):
            tracker.denominator(tokens=mask[rows])
            tracker.stat(value=values[rows], denominator="tokens")
            tracker.stat(total=values[rows], denominator="tokens", reduce_type="sum")
        return tracker.export()

    whole = recorded()
    assert whole["tokens"] == mask.sum() and whole["value/avg"] == values[mask].double().mean()
    assert recorded(1, 3, 5, 6) == recorded(4) == recorded(3, 5) == whole


def test_what_is_muted_is_checked_and_left_out() -> None:
    tracker, mask = StatsTracker(), torch.tensor([True, False])
    with tracker.muted():
        tracker.denominator(n=mask)
        tracker.stat(x=torch.ones(2), denominator="n")
        with pytest.raises(ValueError, match="denominator 'm' is not known"):
            tracker.stat(x=torch.ones(2), denominator="m")
        with tracker.muted(False):  # a part of what is muted is muted
            tracker.scalar(y=1.0)
    tracker.scalar(z=2.0)
    assert tracker.export() == {"z": 2.0}


def test_wrong_use_is_named() -> None:
    tracker, mask = StatsTracker(), torch.tensor([True, False])
    with pytest.raises(ValueError, match=r"denominator\(n=\): torch.float32, not bool"):
        tracker.denominator(n=mask.float())
    tracker.denominator(n=mask)
    with pytest.raises(ValueError, match="denominator 'm' is not known"):
        tracker.stat(x=torch.ones(2), denominator="m")
    with pytest.raises(ValueError, match=r"shape \(3,\), but denominator 'n' has \(2,\)"):
        tracker.stat(x=torch.ones(3), denominator="n")
    with pytest.raises(ValueError, match="reduce_type='mean': one of avg, sum, min, max"):
        tracker.stat(x=torch.ones(2), denominator="n", reduce_type="mean")


def test_timings_add_up_until_the_export() -> None:
    tracker = StatsTracker()
    for _ in range(2):
        with tracker.record_timing("train"):
            pass
    seconds = tracker.seconds("train")
    assert seconds > 0 and tracker.export() == {"timing/train_s": seconds}
    assert tracker.seconds("train") == 0


def test_seconds_add_up_nest_and_start_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 10.0, 20.0, 25.0, 30.0, 31.0])
    clock = SimpleNamespace(perf_counter=lambda: next(now))
    monkeypatch.setattr("megarl.observability.stats_tracker.time", clock)
    tracker, entered = StatsTracker(), []

    @contextmanager
    def around(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    tracker.watch(around)
    with tracker.record_timing("step"), tracker.scope("a"), tracker.record_timing("train"):
        pass  # 0 .. 10 around 1 .. 3
    with tracker.record_timing("a/train"):  # 20 .. 25
        pass
    assert (tracker.seconds("step"), tracker.seconds("a/train")) == (10.0, 7.0)
    assert tracker.export() == {"timing/a/train_s": 7.0, "timing/step_s": 10.0}
    with pytest.raises(RuntimeError), tracker.record_timing("broken"):
        raise RuntimeError
    assert tracker.export() == {"timing/broken_s": 1.0}
    assert entered == ["step", "a/train", "a/train", "broken"]
