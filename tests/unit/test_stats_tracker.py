"""StatsTracker: reductions, scopes, timings; ranks are merged in real processes."""

from __future__ import annotations

import math
import multiprocessing as mp
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.observability.stats_tracker import StatsTracker


def test_scalars_average_over_calls_and_export_resets():
    t = StatsTracker()
    t.scalar(lr=1.0, reward=2.0)
    t.scalar(lr=3.0)
    assert t.export() == {"lr": 2.0, "reward": 2.0}
    assert t.export() == {}


def test_every_reduction_of_a_scalar():
    t = StatsTracker()
    for v in (1.0, 5.0, 3.0):
        t.scalar(reduce=("avg", "min", "max", "sum"), x=v)
    assert t.export() == {"x/avg": 3.0, "x/min": 1.0, "x/max": 5.0, "x/sum": 9.0}


def test_masked_tensors_weigh_by_count_over_calls():
    t = StatsTracker()
    t.denominator(tokens=torch.tensor([[True, True], [True, False]]))
    t.stat("tokens", reduce=("avg", "max"), x=torch.tensor([[1.0, 2.0], [3.0, 100.0]]))
    t.denominator(tokens=torch.tensor([[True]]))
    t.stat("tokens", reduce=("avg", "max"), x=torch.tensor([[10.0]]))
    assert t.export() == {"tokens": 4.0, "x/avg": 4.0, "x/max": 10.0}


def test_empty_mask_leaves_averages_out_but_not_sums():
    t = StatsTracker()
    t.denominator(none=torch.zeros(3).bool())
    t.stat("none", reduce=("avg", "min", "sum"), x=torch.ones(3))
    assert t.export() == {"none": 0.0, "x/sum": 0.0}


def test_infinities_and_nan_are_not_hidden():
    t = StatsTracker()
    t.denominator(n=torch.tensor([True, False]))
    t.stat("n", reduce=("min", "max"), a=torch.tensor([-math.inf, 0.0]))
    t.scalar(reduce="max", b=1.0)
    t.scalar(reduce="max", b=math.nan)
    t.scalar(reduce="max", b=2.0)
    t.scalar(reduce="min", c=1.0)
    t.scalar(reduce="min", c=math.nan)
    t.scalar(reduce="min", c=0.0)
    out = t.export()
    assert out["a/min"] == out["a/max"] == -math.inf
    assert math.isnan(out["b"]) and math.isnan(out["c"])


def test_scopes_nest_and_close_after_an_error():
    t = StatsTracker()
    with t.scope("actor"), t.scope("mb"):
        t.denominator(n=torch.tensor([True]))
        t.stat("n", x=torch.tensor([4.0]))
    with pytest.raises(RuntimeError), t.scope("broken"):
        raise RuntimeError
    t.scalar(y=1.0)
    assert t.export() == {"actor/mb/n": 1.0, "actor/mb/x": 4.0, "y": 1.0}


def test_timings_add_up_within_a_step():
    ticks = iter([0.0, 3.0, 10.0, 14.0, 20.0, 20.5])
    t = StatsTracker(clock=lambda: next(ticks))
    with t.scope("actor"):
        for _ in range(2):
            with t.record_timing("train"):
                pass
    with pytest.raises(RuntimeError), t.record_timing("broken"):
        raise RuntimeError
    assert t.export() == {"timing/actor/train_s": 7.0, "timing/broken_s": 0.5}


def test_export_without_reset_keeps_going():
    t = StatsTracker()
    t.scalar(reduce="sum", n=1.0)
    assert t.export(reset=False) == {"n": 1.0}
    t.scalar(reduce="sum", n=1.0)
    assert t.export() == {"n": 2.0}


def test_misuse_is_named():
    t = StatsTracker()
    with pytest.raises(ValueError, match="no denominator 'tokens'"):
        t.stat("tokens", x=torch.ones(1))
    t.denominator(tokens=torch.ones(2).bool())
    with pytest.raises(ValueError, match=r"'x' has shape \(3,\)"):
        t.stat("tokens", x=torch.ones(3))
    with pytest.raises(ValueError, match="reduce='mean'"):
        t.scalar(reduce="mean", x=1.0)
    t.scalar(y=1.0)
    with pytest.raises(ValueError, match=r"'y' was recorded with reduce=\('avg',\)"):
        t.scalar(reduce="sum", y=1.0)


def _rank(rank: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ticks = iter([0.0, 2.0 + rank])
    t = StatsTracker(clock=lambda: next(ticks))
    t.denominator(tokens=torch.tensor([True, True, rank == 1]))
    x = torch.tensor([1.0, 2.0, 3.0]) + 10 * rank  # rank 0: 1 2; rank 1: 11 12 13
    t.stat("tokens", reduce=("avg", "min", "max", "sum"), x=x)
    t.scalar(y=float(rank))
    if rank == 0:
        t.scalar(only_here=7.0)
    with t.record_timing("a"):
        pass
    group_of_one = dist.new_group([0])  # every rank must call it
    alone = t.export(group_of_one, reset=False) if rank == 0 else {}
    results.put((rank, t.export(dist.group.WORLD), alone))
    dist.destroy_process_group()


def test_ranks_merge_by_count(tmp_path: Path):
    """avg is over all five elements, not the mean of two means; timings are the slowest rank's."""
    ctx = mp.get_context("spawn")
    queue = ctx.Queue()
    procs = [ctx.Process(target=_rank, args=(r, str(tmp_path / "store"), queue)) for r in (0, 1)]
    for p in procs:
        p.start()
    out = {rank: (both, alone) for rank, both, alone in (queue.get(timeout=120) for _ in procs)}
    for p in procs:
        p.join(60)
        assert p.exitcode == 0
    want = {
        "tokens": 5.0,
        "x/avg": 39 / 5,
        "x/min": 1.0,
        "x/max": 13.0,
        "x/sum": 39.0,
        "y": 0.5,
        "only_here": 7.0,
        "timing/a_s": 3.0,
    }
    assert out[0][0] == want and out[1][0] == want
    assert out[0][1]["x/sum"] == 3.0  # a group of one: no communication
