"""Rank 0's result or failure reaches every rank; so do the rollout client's and the statistics."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d as c10d

from megarl.api.batch import Batch
from megarl.api.records import WeightUpdateMeta
from megarl.config.rollout import RolloutConfig
from megarl.observability import stats_tracker
from megarl.observability.stats_tracker import StatsTracker
from megarl.parallel import ranks as module
from megarl.parallel.ranks import Ranks, on_rank_zero
from megarl.parallel.worlds import World as World_
from megarl.parallel.worlds import init_distributed, waiting_for
from megarl.rollout.client import RemoteSGLangEngine
from megarl.trainer.context import RunContext
from megarl.utils.http import call_json
from megarl.utils.stopping import StopRequested
from megarl.wire.process_group import bounded
from tests.dist.world import World, free_port
from tests.unit.rollout_fakes import FakeServer, Scripted, rows


@pytest.fixture(scope="module")
def world(worlds: Any) -> World:
    return worlds(2)


def only_on_zero(ranks: Ranks, value: object) -> object:
    assert ranks.is_zero, "called on another rank"
    return value


def result(value):
    ranks = Ranks.of()
    return ranks.from_zero(only_on_zero, ranks, value)


def failure():
    def fail():
        raise ValueError("servers are gone")

    try:
        Ranks.of().from_zero(fail)
    except (ValueError, RuntimeError) as e:
        return type(e).__name__, str(e)
    return None


def test_result_reaches_every_rank(world):
    for batch in ({"x": torch.arange(6).view(2, 3)}, {"x": torch.arange(100_000)}):
        for got in world.run(result, batch):
            assert torch.equal(got["x"], batch["x"])


def test_failure_reaches_every_rank_as_rank_zeros_error(world):
    first, second = world.run(failure)
    assert first == ("ValueError", "servers are gone")
    assert second[0] == "OtherRankFailed"
    assert "rank 0" in second[1] and "ValueError: servers are gone" in second[1]


def cannot_travel() -> str:
    try:
        Ranks.of().from_zero(lambda: lambda: 0)
    except Exception as e:
        return str(e)
    return ""


def test_a_result_that_cannot_travel_is_an_error_on_every_rank(world):
    first, second = world.run(cannot_travel)
    assert "pickle" in first and "rank 0" in second and first in second


def who_runs_inside() -> list[int]:
    ranks = Ranks.of()
    return ranks.from_zero(lambda: [ranks.from_zero(lambda: ranks.rank), *ranks.gather(7)])


def test_a_call_within_a_call_is_rank_zeros_alone(world):
    assert world.run(who_runs_inside) == [[0, 7], [0, 7]]


def stopped(on_all: bool) -> str:
    def stop() -> None:
        if on_all or dist.get_rank() == 0:
            raise StopRequested("a signal")

    try:
        Ranks.of().together(stop) if on_all else on_rank_zero(stop)
    except StopRequested as e:
        return str(e)
    return ""


def test_a_wish_to_stop_keeps_its_type(world):
    for on_all in (False, True):
        assert world.run(stopped, on_all) == ["a signal"] * 2


def wishes(run_dirs: list[Path]) -> tuple[bool, bool]:
    context = object.__new__(RunContext)
    context.ranks, context.run_dir = Ranks.of(), run_dirs[dist.get_rank()]
    return context.wishes()


def test_every_rank_hears_of_the_file_that_rank_zero_sees(world, tmp_path):
    """Another rank may see a file on a shared disk earlier or later."""
    there, not_there = tmp_path / "a", tmp_path / "b"
    there.mkdir()
    (there / "SAVE").touch()
    assert world.run(wishes, [there, not_there]) == [(False, True)] * 2
    assert world.run(wishes, [not_there, there]) == [(False, False)] * 2


def closing() -> list[str]:
    """Closes one of two, and returns what both then say."""
    said = []
    groups = len(c10d._world.pg_map)
    for closed in (True, False):
        ranks = Ranks()
        if closed:
            ranks.close()
            ranks.close()
        try:
            said.append(str(ranks.from_zero(str.upper, "abc")))
        except RuntimeError as e:
            said.append(type(e).__name__)
    ranks.close()
    return [*said, str(len(c10d._world.pg_map) - groups)]


def test_a_closed_one_leaves_no_group_and_is_refused(world):
    assert world.run(closing) == [["RuntimeError", "ABC", "0"]] * 2


KEY = "collective_timeout"


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What is warned of inside, where a wait is worth a line at once."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    patience, module.PATIENCE = module.PATIENCE, 0.2
    module.log.addHandler(handler)
    try:
        yield lines
    finally:
        module.log.removeHandler(handler)
        module.PATIENCE = patience


def error_of(fn: Callable[[], object]) -> str:
    try:
        fn()
    except RuntimeError as e:
        return str(e)
    return ""


def call_of(caller: int) -> tuple[str, list[str]]:
    """One rank alone makes a second call."""
    ranks, said = Ranks(timeout=(1.5, KEY)), ""
    ranks.from_zero(str.upper, "abc")
    with log_lines() as lines:
        if dist.get_rank() == caller:
            said = error_of(lambda: ranks.from_zero(len, "abc"))
    dist.barrier()
    return said, lines


@pytest.mark.parametrize("caller", [0, 1])
def test_a_rank_that_did_not_make_the_call_is_named(world, caller):
    """By whoever waits for it: first in a line of the log, then in the error."""
    said, lines = world.run(call_of, caller)[caller]
    assert len(lines) == 1
    for text in (said, lines[0]):
        assert f"rank {caller}" in text and " len " in text
        assert f"rank {1 - caller} (after str.upper)" in text
    assert f"{KEY} = 1.5 s" in said


def calls_that_differ() -> str:
    ranks = Ranks()
    fn = [str.upper, str.lower][ranks.rank]
    said = error_of(
        lambda: ranks.from_zero(fn, "abc") if ranks.is_zero else ranks.gather(1, "lower")
    )
    ranks.close()
    return said


def test_ranks_in_different_calls_hear_of_it_at_once(world):
    first, second = world.run(calls_that_differ)
    assert first == second and "rank 0 in str.upper" in first and "rank 1 in lower" in first


def other_threads_call() -> str:
    """Rank 0 calls from a thread while its main thread leads a call."""
    ranks = Ranks()
    said: list[str] = []

    def lead() -> None:
        thread = threading.Thread(target=lambda: said.append(error_of(lambda: ranks.gather(1))))
        thread.start()
        thread.join()

    ranks.from_zero(lead)
    ranks.close()
    return "".join(said)


def test_a_second_thread_in_a_call_is_an_error_that_names_both(world):
    first, second = world.run(other_threads_call)
    assert "gather in thread" in first and "MainThread" in first and second == ""


def long_work() -> tuple[int, list[str]]:
    """Rank 0 works longer than ranks may take to come, and than a wait without a line."""
    ranks = Ranks(timeout=(0.5, KEY), work_timeout=(60.0, KEY))
    with log_lines() as lines:
        return ranks.from_zero(lambda: time.sleep(1.5) or 7), lines


def test_what_rank_zero_does_takes_its_own_time(world):
    assert world.run(long_work) == [(7, []), (7, [])]


def of_a_part(ranks: list[int]) -> list[str] | None:
    """Ranks of a world of some ranks, made and used while another is in scope."""
    mesh = World_(ranks)
    out = None
    if mesh.member:
        here = Ranks.of(mesh.group)
        out = here.from_zero(lambda: [f"{here.rank} of {here.size}"])
        assert out == here.gather(out)[0]
        with mesh.scope():
            assert Ranks.of() is here
    mesh.destroy()
    return out


def test_ranks_of_a_mesh_are_its_own(worlds):
    said = worlds(3).run(of_a_part, [1, 2])
    assert said == [None, ["0 of 2"], ["0 of 2"]]


def recorded() -> dict[str, float]:
    rank = dist.get_rank()
    tracker = StatsTracker()
    tracker.scalar(loss=float(rank))
    lengths = torch.tensor([1.0, 2.0, 3.0]) + 10 * rank
    tracker.denominator(odd=torch.tensor([True, False, True]))
    tracker.stat(n=lengths, denominator="odd")
    tracker.stat(total=lengths, denominator="odd", reduce_type="sum")
    with tracker.muted(False):  # rows of this rank
        tracker.denominator(own=torch.tensor([True, False, True]))
        tracker.stat(own_total=lengths, denominator="own", reduce_type="sum")
    if rank == 1:
        tracker.scalar(only_here=5.0)
        tracker.denominator(one_rank=torch.ones(3, dtype=torch.bool))
    with tracker.record_timing("train"):
        pass
    stats = tracker.export()
    stats["slowest"] = stats.pop("timing/train_s")
    return stats


def test_statistics_are_reduced_over_ranks(world):
    first, second = world.run(recorded)
    assert first == second and first.pop("slowest") > 0
    assert first == {
        "loss": 0.5, "odd": 2.0, "n/avg": 7.0, "n/min": 1.0, "n/max": 13.0, "total": 14.0,
        "own": 4.0, "own_total": 28.0, "only_here": 5.0, "one_rank": 3.0,
    }  # fmt: skip


def recorded_of_a_batch() -> dict[str, float]:
    """The lines of document 002, of a batch of 8 that two ranks share, and a loss's own rows."""
    lengths = torch.tensor([2, 3])
    padded = {
        "input_ids": torch.zeros(4, 3, dtype=torch.long),
        "attention_mask": torch.arange(3) < lengths.repeat(2)[:, None],
        "rewards": torch.tensor([1.0, 0.0, 1.0, 1.0]),
    }
    batch = Batch.from_local(padded)
    assert len(batch) == 8 and len(batch.rows) == 4
    right = (batch["rewards"] > 0).bool()
    stats_tracker.denominator(correct_n_seqs=right, n_seqs=torch.ones_like(right))
    stats_tracker.stat(correct_seq_len=batch.lengths.float(), denominator="correct_n_seqs")
    stats_tracker.stat(tokens=batch.lengths, denominator="n_seqs", reduce_type="sum")
    return stats_tracker.export()


def test_fields_of_a_batch_count_once(world):
    first, second = world.run(recorded_of_a_batch)
    assert first == second == {
        "n_seqs": 8.0, "correct_n_seqs": 6.0, "tokens": 20.0, "correct_seq_len/avg": 14 / 6,
        "correct_seq_len/min": 2.0, "correct_seq_len/max": 3.0,
    }  # fmt: skip


# ---- the rollout client of every rank


def run_client(address: str, mine: list[list[dict]]) -> dict:
    """Runs a batch, an evaluation, an update, and failures. `mine`: each rank's own rows."""
    client = RemoteSGLangEngine(RolloutConfig(setup_timeout=60.0))
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
            call_json("POST", address, "/set_version", {}, timeout=60)
        future.result()
        said["version"] = client.get_version()
        said["evaluated"] = client.on_driver(
            lambda: len(client.executor.rollout_batch(rows(3), Scripted())["rewards"])
        )
        for what in (
            lambda: client.prepare_batch([mine[dist.get_rank()]], workflow=Scripted()),
            lambda: client.rollout_batch([{"row_id": 0, "error": KeyError("tool")}], Scripted()),
            lambda: client.rollout_batch(mine[dist.get_rank()], Scripted()),
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
    (split, failed, apart), (split_1, failed_1, apart_1, alone) = first["errors"], second["errors"]
    for said in (apart, apart_1):  # each brought its own part of the data
        assert said.startswith("ValueError") and "Batch.from_local" in said and "2" in said
    assert split.startswith("ValueError: prepare_batch:")
    assert all("Rank 1 has 1 batches" in said for said in (split, split_1))  # on rank 0, too
    assert "no split_dataset_by_node" in split_1
    assert "KeyError" in failed and "rank 0" in failed_1 and "tool" in failed_1
    assert "generation is driven by rank 0 alone" in alone


def guarded(address: str) -> str:
    """What other systems' scripts say: rank 0 alone waits for an update, or has the rows."""
    client = RemoteSGLangEngine(RolloutConfig(setup_timeout=60.0))
    client.initialize(address)
    try:
        future = client.update_weights(WeightUpdateMeta(type="distributed", version=1))
        if dist.get_rank() == 0:
            call_json("POST", address, "/set_version", {}, timeout=60)
            return error_of(future.result)
        return error_of(lambda: client.rollout_batch(rows(2), Scripted()))
    finally:
        client.destroy()


def test_a_guard_for_rank_zero_is_an_error_that_names_both_calls(world):
    server = FakeServer()
    try:
        first, second = world.run(guarded, server.address)
    finally:
        server.close()
    for said in (first, second):
        assert "rank 0 in Future.result" in said and "rank 1 in rollout_batch" in said


def bounds_of_the_world() -> list[float]:
    def now() -> float:
        gloo = torch.device("cpu")
        return dist.group.WORLD._get_backend(gloo).options._timeout.total_seconds()

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


def stands_still(rank: int, port: int, pids: Any, errors: Any) -> None:
    """Rank 0, which serves the store, tells its pid and stops; rank 1 calls it twice."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    init_distributed(timeout=20)
    ranks = Ranks.of()
    ranks.gather(rank)
    if rank == 0:
        pids.put(os.getpid())
        time.sleep(300)  # it is stopped in this
        return
    os.kill(pids.get(timeout=300), signal.SIGSTOP)
    for call in ("first", "second"):
        try:
            ranks.gather(rank, call)
        except RuntimeError as e:
            errors.put(f"{type(e).__name__}: {e}")
    errors.close()
    errors.join_thread()
    os._exit(0)  # torch waits for rank 0 at the end


def test_a_rank_that_stands_still_holds_up_no_later_call() -> None:
    spawn = mp.get_context("spawn")
    pids, errors, port = spawn.Queue(), spawn.Queue(), free_port()
    both = [
        spawn.Process(target=stands_still, args=(rank, port, pids, errors), daemon=True)
        for rank in range(2)
    ]
    for process in both:
        process.start()
    try:
        for call in ("first", "second"):
            assert f"OtherRankFailed: rank 1 waited in {call}" in errors.get(timeout=300)
    finally:
        for process in both:
            process.kill()
            process.join(30)
