"""Rank 0's result or failure reaches every rank; so do the rollout client's and the statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megarl.api.records import WeightUpdateMeta
from megarl.config.rollout import RolloutConfig
from megarl.observability.stats_tracker import StatsTracker
from megarl.parallel.groups import waiting_for
from megarl.parallel.rank_zero import RankZero, on_rank_zero
from megarl.rollout.client import RemoteSGLangEngine
from megarl.utils.http import call_json
from megarl.utils.stopping import StopRequested
from megarl.wire.process_group import bounded
from tests.dist.world import World
from tests.unit.rollout_fakes import FakeServer, Scripted, rows


@pytest.fixture(scope="module")
def world(worlds: Any) -> World:
    return worlds(2)


def only_on_zero(zero: RankZero, value: object) -> object:
    assert zero.is_zero, "called on another rank"
    return value


def result(value):
    zero = RankZero(60.0)
    return zero(only_on_zero, zero, value)


def failure():
    def fail():
        raise ValueError("servers are gone")

    zero = RankZero(60.0)
    try:
        zero(fail)
    except (ValueError, RuntimeError) as e:
        return type(e).__name__, str(e)
    return None


def test_result_reaches_every_rank(world):
    batch = {"x": torch.arange(6).view(2, 3)}
    for got in world.run(result, batch):
        assert torch.equal(got["x"], batch["x"])


def test_failure_reaches_every_rank_as_rank_zeros_error(world):
    first, second = world.run(failure)
    assert first == ("ValueError", "servers are gone")
    assert second[0] == "RuntimeError"
    assert "rank 0 failed in" in second[1]
    assert "ValueError: servers are gone" in second[1]


def cannot_travel() -> str:
    try:
        RankZero(60.0)(lambda: lambda: 0)
    except Exception as e:
        return str(e)
    return ""


def test_a_result_that_cannot_travel_is_an_error_on_every_rank(world):
    first, second = world.run(cannot_travel)
    assert "pickle" in first and "rank 0 failed in" in second and first in second


def who_runs_inside() -> list[int]:
    zero = RankZero(60.0)
    return zero(lambda: [zero(lambda: zero.rank), zero.highest(7)])


def test_a_call_within_a_call_is_rank_zeros_alone(world):
    assert world.run(who_runs_inside) == [[0, 7], [0, 7]]


def stopped() -> str:
    def stop() -> None:
        raise StopRequested("a signal")

    try:
        on_rank_zero(stop)
    except StopRequested as e:
        return str(e)
    return ""


def test_a_wish_to_stop_keeps_its_type(world):
    assert world.run(stopped) == ["a signal"] * 2


def closing() -> list[str]:
    """Closes one of two, and returns what both then say."""
    said = []
    groups = len(c10d._world.pg_map)
    for closed in (True, False):
        zero = RankZero(60.0)
        if closed:
            zero.close()
            zero.close()
        try:
            said.append(str(zero(str.upper, "abc")))
        except RuntimeError as e:
            said.append(str(e))
    zero.close()
    return [*said, str(len(c10d._world.pg_map) - groups)]


def test_a_closed_one_leaves_no_group_and_is_refused(world):
    closed = "this RankZero is closed: what belongs to it was destroyed"
    assert world.run(closing) == [[closed, "ABC", "0"]] * 2


def call_of_rank_zero_alone() -> str:
    zero = RankZero(2.0, meets=True)
    if dist.get_rank() == 0:
        with pytest.raises(
            RuntimeError, match="did not call it within collective_timeout = 2 s"
        ) as e:
            zero(len, "abc")
        said = str(e.value)
    dist.barrier()
    return said if dist.get_rank() == 0 else ""


def test_a_rank_that_did_not_make_the_call_is_named(world):
    said, _ = world.run(call_of_rank_zero_alone)
    assert "rank 0 finished len" in said and "Ranks 1 failed to pass monitoredBarrier" in said


def recorded() -> dict[str, float]:
    rank = dist.get_rank()
    tracker = StatsTracker()
    tracker.scalar(loss=float(rank))
    lengths = torch.tensor([1.0, 2.0, 3.0]) + 10 * rank
    tracker.denominator(odd=torch.tensor([True, False, True]))
    tracker.stat(n=lengths, denominator="odd")
    tracker.stat(total=lengths, denominator="odd", reduce_type="sum")
    if rank == 1:
        tracker.scalar(only_here=5.0)
    with tracker.record_timing("train"):
        pass
    stats = tracker.export()
    stats["slowest"] = stats.pop("timing/train_s")
    return stats


def test_statistics_are_reduced_over_ranks(world):
    first, second = world.run(recorded)
    assert first == second and first.pop("slowest") > 0
    assert first == {
        "loss": 0.5, "odd": 4.0, "n/avg": 7.0, "n/min": 1.0, "n/max": 13.0, "total": 28.0,
        "only_here": 5.0,
    }  # fmt: skip


# ---- the rollout client of every rank


def run_client(address: str, mine: list[list[dict]]) -> dict:
    """Runs a batch, an evaluation, an update, and failures. `mine`: each rank's own rows."""
    client = RemoteSGLangEngine(RolloutConfig(setup_timeout=5.0))
    with pytest.raises(RuntimeError, match=r"not open: call initialize\(\) on every rank"):
        client.prepare_batch([], workflow=Scripted())
    client.initialize(address)
    said: dict = {"addresses": client.addresses}
    try:
        batch = client.prepare_batch([rows(2)], workflow=Scripted())
        said["prompts"] = batch["group_ids"].tolist()
        said["held"] = batch.rows.tolist()
        client.pause()
        client.resume()
        future = client.update_weights(WeightUpdateMeta(type="distributed", version=1))
        if client.drives:
            call_json("POST", address, "/set_version", {}, timeout=10)
        future.result()
        said["version"] = client.get_version()
        said["evaluated"] = client.on_driver(
            lambda: len(client.executor.rollout_batch(rows(3), Scripted())["rewards"])
        )
        for what in (
            lambda: client.prepare_batch([mine[dist.get_rank()]], workflow=Scripted()),
            lambda: client.rollout_batch([{"row_id": 0, "error": KeyError("tool")}], Scripted()),
            lambda: client.stats(),
        ):
            try:
                what()
            except Exception as e:
                said.setdefault("errors", []).append(f"{type(e).__name__}: {e}")
    finally:
        client.destroy()
    return said


def test_every_rank_makes_the_client(world):
    server = FakeServer()
    try:
        first, second = world.run(run_client, server.address, [rows(2), rows(3, r0={"x": 1})])
    finally:
        server.close()
    for said in (first, second):
        assert said["addresses"] == [server.address]
        assert said["prompts"] == [0, 1] and said["version"] == 1 and said["evaluated"] == 3
    assert first["held"] == [0, 1] and second["held"] == []  # until an engine places them
    (split, failed), (split_1, failed_1, alone) = first["errors"], second["errors"]
    assert split.startswith("ValueError: prepare_batch: the ranks' dataloaders are not of the same")
    assert "Rank 1 has 1 batches" in split_1 and "no split_dataset_by_node" in split_1
    assert "KeyError" in failed and "rank 0 failed in" in failed_1 and "tool" in failed_1
    assert "generation is driven by rank 0 alone" in alone


def bounds_of_the_world() -> list[float]:
    def now() -> float:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        return backend.options._timeout.total_seconds()

    before = now()
    with bounded(None, 7.0):
        inside = now()
        dist.barrier()
    return [before, inside, now()]


def test_a_bound_on_collectives_is_lifted_again(world):
    for before, inside, after in world.run(bounds_of_the_world):
        assert inside == 7.0 and before == after > 7.0


def said_of(text: str) -> str:
    try:
        with waiting_for(None, "train_batch"):
            raise RuntimeError(text)
    except RuntimeError as e:
        return str(e)


def test_only_gloos_own_report_is_that_of_a_lost_peer(world):
    gloo = "[/src/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"
    for rank, said in enumerate(world.run(said_of, gloo)):
        assert f"rank {rank} gave up waiting for other ranks in train_batch" in said
        assert "collective_timeout=1800 s" in said and gloo in said
    quoted = f"server 127.0.0.1:9: /update answered 400: {gloo}"
    assert world.run(said_of, quoted) == [quoted, quoted]
