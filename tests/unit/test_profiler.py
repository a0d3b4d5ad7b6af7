"""Traces of a window of steps, and the arithmetic of MFU."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from megarl.config.run import ProfilerConfig
from megarl.controlled import ProfiledWorkers
from megarl.models.hf_config import read_hf_config
from megarl.observability.stats_tracker import StatsTracker
from megarl.observability.timeline import Profiler
from megarl.trainer import rollout_metrics
from megarl.trainer.rollout_metrics import peak_tflops, this_device_peak, utilization
from tests.tiny import save_tiny
from tests.unit.controlled import workers


def traces(tmp_path, config, first, last, rank=0):
    """What a run of steps first..last leaves behind: {file name: names of its events}."""
    profiler, tracker = Profiler(config, run_dir=tmp_path, rank=rank), StatsTracker()
    for n in range(first, last + 1):
        with profiler.step(n), tracker.record_timing(f"phase_{n}"):
            torch.ones(4, 4) @ torch.ones(4, 4)
    profiler.close()
    found = {}
    for path in (tmp_path / "profile").glob("*"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        found[path.name] = {e["name"] for e in events}
    return found


def test_the_steps_of_the_window_are_traced_with_their_phases(tmp_path):
    found = traces(tmp_path, ProfilerConfig(start_step=2, steps=2, ranks=[0, 3]), 1, 5, rank=3)
    (names,) = found.values()
    assert list(found) == ["steps_2-3.rank3.json.gz"]
    assert {"phase_2", "phase_3", "aten::mm"} <= names and not {"phase_1", "phase_4"} & names


@pytest.mark.parametrize(
    ("config", "first", "last", "file"),
    [
        (ProfilerConfig(), 1, 3, None),
        (ProfilerConfig(start_step=1, ranks=[1]), 1, 3, None),
        (ProfilerConfig(start_step=9), 1, 3, None),
        (ProfilerConfig(start_step=3, steps=5), 1, 4, "steps_3-4.rank0.json.gz"),  # cut short
        (
            ProfilerConfig(start_step=3, options={"profile_memory": True}),
            7,
            9,
            "steps_7-7.rank0.json.gz",
        ),  # resumed
    ],
)
def test_what_is_not_asked_for_is_not_traced(config, first, last, file, tmp_path):
    assert list(traces(tmp_path, config, first, last)) == ([file] if file else [])


def test_phases_are_traced_by_themselves(tmp_path):
    config = ProfilerConfig(start_step=2, steps=2, phases=["train", "ref"])
    profiler, tracker = Profiler(config, run_dir=tmp_path, rank=0), StatsTracker()
    tracker.watch(profiler.phase)
    for n in range(1, 5):
        with profiler.step(n):
            for phase in ("rollout", "train"):
                with tracker.record_timing(phase):
                    torch.ones(4, 4) @ torch.ones(4, 4)
    with tracker.record_timing("train"):  # between the steps
        pass
    profiler.close()
    found = sorted((tmp_path / "profile").iterdir())
    assert [p.name for p in found] == ["step_2.train.rank0.json.gz", "step_3.train.rank0.json.gz"]
    for path in found:
        names = {e["name"] for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        assert {"train", "aten::mm"} <= names and "rollout" not in names


class Work:
    def multiply(self) -> None:
        torch.ones(4, 4) @ torch.ones(4, 4)


@pytest.mark.parametrize(("phases", "file"), [([], "steps_2-2"), (["train"], "step_2.train")])
def test_under_a_controller_the_trainers_are_traced(phases, file, tmp_path):
    """In the steps and phases of the controller's loop, with the calls that it made."""
    with workers(trainers=1) as (group,):
        config = ProfilerConfig(start_step=2, phases=phases)
        ctx = group.put(SimpleNamespace(profiler=Profiler(config, run_dir=tmp_path, rank=0)))
        profiler = ProfiledWorkers(SimpleNamespace(ctx=ctx, run=group.call), phases)
        work, tracker = group.put(Work()), StatsTracker()
        tracker.watch(profiler.phase)
        for n in range(1, 4):
            with profiler.step(n), tracker.record_timing("train"):
                work.multiply()
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == f"{file}.rank0.json.gz"
    names = {e["name"] for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert {"Work.multiply", "aten::mm"} <= names


def test_a_step_that_fails_leaves_the_whole_ones_before_it(tmp_path):
    profiler = Profiler(ProfilerConfig(start_step=1, steps=9), run_dir=tmp_path, rank=0)
    with profiler.step(1):
        pass
    with pytest.raises(ZeroDivisionError), profiler.step(2):
        1 / 0  # noqa: B018
    profiler.close()
    assert [p.name for p in (tmp_path / "profile").iterdir()] == ["steps_1-1.rank0.json.gz"]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.0),
        ("Tesla V100-PCIE-32GB", 112.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_known_peaks(name, peak):
    assert peak_tflops(name) == peak


def test_wide_numbers_have_no_known_peak():
    assert this_device_peak(torch.float32) is None


def test_utilization():
    assert utilization(6e12, seconds=2.0, devices=3, peak=None) == {"perf/tflops_per_gpu": 1.0}
    assert utilization(6e12, seconds=2.0, devices=3, peak=4.0)["perf/mfu"] == 0.25


def test_update_speed_counts_real_tokens_of_all_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_metrics.dist, "get_world_size", lambda: 2)
    model = read_hf_config(save_tiny(tmp_path / "m", "llama", layers=1))
    engine = SimpleNamespace(model_config=model, dtype=torch.float32)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    got = rollout_metrics.update_speed(
        SimpleNamespace(engine=engine),
        {"attention_mask": mask, "input_ids": mask.long()},
        seconds=0.5,
        peak_tflops=1e-6,
    )
    # forward: 2 operations a multiply-add; queries and output 64x64, keys and values 64x32, three
    # matrices 64x96, the vocabulary 64x130; attention meets (n + 1) / 2 keys and as many values
    matrices = 64 * (2 * 64 + 2 * 32 + 3 * 96 + 130)
    forward = 2 * (4 * matrices + 64 * (3 * 4 + 1 * 2))
    assert got["perf/tflops_per_gpu"] == pytest.approx(3 * forward / 0.5 / 2 / 1e12)
    assert got["perf/mfu"] == pytest.approx(got["perf/tflops_per_gpu"] / 1e-6)
