"""The controller's handles over workers that are threads: calls, objects, batches, errors."""

from __future__ import annotations

import difflib
import gc
import re
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from megarl.algos import Actor
from megarl.api.batch import Batch, Home, Tokens
from megarl.api.failures import OtherRankFailed
from megarl.api.records import ServersLost
from megarl.config.algo import PPOActorConfig
from megarl.config.errors import ConfigError
from megarl.config.loader import load_config
from megarl.controller import start
from megarl.controller.batch import RemoteBatch, RemoteTokens
from megarl.controller.group import Pending, Remote, WorkerGroup
from megarl.controller.remote import RolloutController
from megarl.controller.store import shares
from megarl.controller.worker import RAISED
from megarl.rpc.errors import RemoteError, WorkerDied
from megarl.rpc.group import LocalScheduler
from megarl.utils.files import DiskFull
from megarl.utils.stopping import StopRequested
from megarl.utils.user_errors import in_one_line, user_lines
from tests.unit.bigram import BigramEngine, prepared, rollout
from tests.unit.controlled import workers

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LENGTHS = torch.tensor([3, 1, 4, 1, 5])


def made(lengths: torch.Tensor = LENGTHS) -> Batch:
    """A batch as a driver returns it."""
    size, width = len(lengths), int(lengths.max())
    padded = {
        "input_ids": torch.arange(size * width).reshape(size, width),
        "attention_mask": torch.arange(width) < lengths[:, None],
        "logprobs": torch.randn(size, width, generator=torch.Generator().manual_seed(1)),
        "routed_experts": torch.arange(size * width * 2, dtype=torch.int16).reshape(size, width, 2),
        "rewards": torch.arange(size).float(),
    }
    return Batch.from_padded(padded, comm=None)


def sent(driver: WorkerGroup) -> RemoteBatch:
    batch = driver.call(made)
    assert isinstance(batch, RemoteBatch)
    return batch


class Engine:
    """Does to batches what engines do."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def place(self, batch: Batch) -> None:
        """Puts the rows of even numbers on worker 0, of odd ones on worker 1."""
        if not batch.placed and batch.comm is not None:
            after = Home((0, 1), torch.arange(len(batch)) % 2)
            whole = batch.fetch(range(len(batch)))
            mine = after.rows(batch.comm.rank)
            for name in batch.per_token:
                batch.per_token[name] = Tokens.from_padded(whole[name][mine], batch.lengths[mine])
            batch.home = after
        batch.placed = True

    def logp(self, batch: Batch) -> Tokens:
        self.place(batch)
        ids = batch["input_ids"]
        return Tokens(ids.values.float() * self.scale, ids.lengths)

    def advantages(self, batch: Batch) -> dict[str, float]:
        logp = batch["prox_logp"]
        batch["advantages"] = Tokens(logp.values + 1, logp.lengths)
        batch["seen"] = batch["rewards"] * 2
        batch["rewards"] = torch.cat([torch.tensor([100.0]), batch["rewards"][1:]])
        batch.pop("logprobs")
        return {"sum": float(batch.gather(batch["advantages"].lengths.float()).sum())}

    def itself(self) -> Engine:
        return self

    def fail(self, rank: int, batch: Batch) -> None:
        if batch.comm is None or batch.comm.rank == rank:
            raise ValueError(f"no good on {rank}")
        time.sleep(0.1)
        raise OtherRankFailed("rank 0 gave up waiting for other ranks in train_batch")


def test_rows_are_shared_by_tokens() -> None:
    assert shares(torch.tensor([10, 1, 1, 1, 1, 10]), 2).of_row.tolist() == [0, 0, 0, 1, 1, 1]
    assert shares(torch.tensor([1, 1, 1, 97]), 4).of_row.tolist() == [0, 0, 0, 2]


def test_ranks_of_torchrun_start_no_controllers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = load_config(None, ["recipe=grpo", "actor.path=m"])
    with pytest.raises(
        ConfigError, match=r"a controller in 2 processes: .*trainer.mode=controller"
    ):
        start.driver(config, LocalScheduler())


def test_an_object_on_workers_is_called_read_and_written() -> None:
    with workers(trainers=2, driver=1) as (group, driver):
        engine = group.put(Engine(2.0))
        assert isinstance(engine, Remote) and engine.scale == 2.0
        engine.scale = 3.0
        assert engine.later.itself().result() is engine and engine.scale == 3.0
        assert group.each(torch.get_num_threads) == [torch.get_num_threads()] * 2
        with pytest.raises(RemoteError, match=r"worker trainers/0 .here, 0.: AttributeError"):
            _ = engine.unknown
        with pytest.raises(ValueError, match="lives on the workers of trainers"):
            driver.call(str, engine)


def test_a_batch_travels_to_workers_and_edits_come_back() -> None:
    with workers(driver=1, trainers=2) as (driver, group):
        batch = sent(driver)
        assert batch["rewards"].tolist() == [0, 1, 2, 3, 4] and len(batch) == 5
        assert isinstance(batch["input_ids"], RemoteTokens)
        engine = group.put(Engine(2.0))
        batch["prox_logp"] = engine.logp(batch)
        batch["rewards"] = torch.tensor([0.0, 50.0, 2.0, 3.0, 4.0])
        batch["extra"] = torch.ones(5)
        assert engine.advantages(batch) == {"sum": 14.0}
        assert batch["rewards"].tolist() == [100, 50, 2, 3, 4]
        assert batch["seen"].tolist() == [0, 100, 4, 6, 8]
        assert "logprobs" not in batch and batch["advantages"].field.dtype == torch.float32
        found, want = batch.load_data(), made().padded()
        real = want["attention_mask"]
        assert torch.equal(found["attention_mask"], real)
        assert torch.equal(found["input_ids"][real], want["input_ids"][real])
        assert torch.equal(found["routed_experts"][real], want["routed_experts"][real])
        assert torch.equal(found["advantages"][real], want["input_ids"][real] * 2.0 + 1)
        assert group.call(lambda b: b["extra"].tolist(), batch) == [1.0] * 5
        few = batch.fetch([1, 4], ["prox_logp"])
        assert few["prox_logp"].shape == (2, 5) and set(few) == {"prox_logp", "attention_mask"}


def test_advantages_and_returns_of_an_actor_on_workers() -> None:
    _, want = prepared(PPOActorConfig())
    with workers(driver=1, trainers=1) as (driver, group):
        batch = driver.call(lambda: Batch.from_padded(rollout(BigramEngine())))
        actor: Any = group.put(Actor(PPOActorConfig(), BigramEngine(), temperature=1.0))
        made = actor.compute_advantages_and_returns(batch)
        batch["advantages"], batch["returns"] = made["advantages"], made["returns"]
        found = batch.load_data()
        for name in ("advantages", "returns"):
            assert torch.equal(found[name], want["advantages"])


def test_each_worker_pulls_its_share_alone() -> None:
    with workers(driver=1, trainers=2) as (driver, group):
        batch = sent(driver)
        rows = group.each(lambda b: b.rows.tolist(), batch)
        assert rows == [[0, 1, 2], [3, 4]]
        reads = driver.clients[0].reads
        assert len(reads) == 2  # all fields at once
        group.call(len, batch)
        assert len(reads) == 2


def test_a_field_of_another_group_is_pulled_for_the_rows_held() -> None:
    with workers(driver=1, trainers=2, refs=2) as (driver, group, refs):
        batch = sent(driver)
        engine, ref = group.put(Engine(2.0)), refs.put(Engine(-1.0))
        batch["prox_logp"] = engine.logp(batch)
        batch["ref_logp"] = ref.logp(batch)
        assert "prox_logp" in refs.call(lambda b: b.keys(), batch)
        group.call(lambda b: b.keys(), batch)
        ids = group.each(lambda b: (b["input_ids"].values, b["ref_logp"].values), batch)
        for mine, theirs in ids:
            assert torch.equal(theirs, -mine.float())


def test_a_batch_is_sent_anew_after_a_call_that_failed_as_it_came() -> None:
    with workers(driver=1, trainers=2) as (driver, group):
        batch = sent(driver)
        batch["extra"] = torch.ones(5)
        comms = [client.comm for client in group.clients]
        for client in group.clients:
            client.comm = None
        with pytest.raises(RemoteError, match="initialize a model there first"):
            group.call(len, batch)
        for client, comm in zip(group.clients, comms, strict=True):
            client.comm = comm
        assert group.call(lambda b: sorted(b.keys()), batch) == sorted(batch.keys())
        assert group.put(Engine(2.0)).logp(batch).field.dtype == torch.float32


def test_the_last_call_has_the_last_word_in_whatever_order_results_are_asked_for() -> None:
    def write(batch: Batch, number: int) -> int:
        batch["x"] = torch.full((5,), float(number))
        if number == 2:
            raise DiskFull("no room")
        return number

    with workers(driver=1, trainers=2) as (driver, group):
        batch = sent(driver)
        first, second, third = (group.submit(write, (batch, i), {}) for i in (1, 2, 3))
        assert third.result() == 3
        for _ in range(2):
            with pytest.raises(DiskFull):
                second.result()
            assert first.result() == 1
        assert batch["x"].tolist() == group.call(lambda b: b["x"].tolist(), batch) == [3.0] * 5
        first, second = (group.submit(write, (batch, i), {}) for i in (4, 5))
        assert group.submit(write, (batch, 6), {}).future.result(20) and first.result() == 4
        assert group.submit(write, (batch, 7), {}).result() == 7 and second.result() == 5
        assert batch["x"].tolist() == [7.0] * 5


def test_an_edit_that_went_with_a_later_call_outlives_the_result_of_an_earlier_one() -> None:
    def write(batch: Batch) -> None:
        batch["x"], batch["y"] = torch.zeros(5), torch.zeros(5)
        batch.pop("rewards")

    with workers(driver=1, trainers=2) as (driver, group):
        batch = sent(driver)
        earlier = group.submit(write, (batch,), {})
        batch["x"], batch["rewards"] = torch.ones(5), torch.full((5,), 7.0)
        group.call(len, batch)
        earlier.result()
        there = group.call(lambda b: {n: v.tolist() for n, v in b.per_sample.items()}, batch)
        assert there == {n: v.tolist() for n, v in batch.per_sample.items()}
        assert (there["x"], there["y"], there["rewards"]) == ([1.0] * 5, [0.0] * 5, [7.0] * 5)


def test_fields_limit_what_travels() -> None:
    with workers(driver=1, trainers=2) as (driver, group):
        batch = sent(driver)
        names = group.submit(lambda b: list(b.per_token), (batch,), {}, fields=["input_ids"])
        assert names.result() == ["input_ids"]
        assert group.call(lambda b: list(b.per_token), batch) == list(batch.per_token)


def test_workers_select_keep_and_sum() -> None:
    with workers(driver=1, trainers=2) as (driver, group):
        batch, want = sent(driver), made()
        group.put(Engine(1.0)).place(batch)
        part = batch.keep(torch.tensor([True, False, True, True, False]))
        assert isinstance(part, RemoteBatch) and part["rewards"].tolist() == [0, 2, 3]
        assert part.lengths.tolist() == [3, 4, 1]
        rows = torch.tensor([0, 2, 3])
        assert torch.equal(part.load_data()["input_ids"], want.padded(rows)["input_ids"])
        sums = batch.row_sums(lambda row: float(row["input_ids"].sum()), ["input_ids"])
        assert torch.equal(sums, want.row_sums(lambda row: float(row["input_ids"].sum())))
        with pytest.raises(AttributeError, match="load_data"):
            _ = batch["input_ids"].values
        with pytest.raises(RuntimeError, match="load_data"):
            batch.padded()


def test_what_the_controller_drops_is_freed_on_workers() -> None:
    with workers(driver=1, trainers=2) as (driver, group):
        engine = group.put(Engine(2.0))

        def step() -> None:
            batch = sent(driver)
            batch["prox_logp"] = engine.logp(batch)
            engine.advantages(batch)
            batch["prox_logp"] = engine.logp(batch)  # the field before it goes
            batch.keep(batch["rewards"] > 1)

        sizes = []
        for _ in range(3):
            step()
            gc.collect()
            for g in (driver, group):
                g.call(int)
            sizes.append(
                [c.call_async("sizes").result() for g in (driver, group) for c in g.clients]
            )
        assert sizes[0] == sizes[1] == sizes[2]
        assert all(s["batches"] == s["keys"] == 0 for s in sizes[2])


def test_the_error_is_of_the_worker_that_failed_for_a_reason_of_its_own() -> None:
    with workers(driver=1, trainers=2) as (driver, group):
        batch, engine = sent(driver), group.put(Engine(1.0))
        said = r"worker trainers/1 .here, 0.: ValueError: no good on 1"
        with pytest.raises(RemoteError, match=said) as e:
            engine.fail(1, batch)
        assert "fail" in [line.name for line in user_lines(e.value)] and __file__ in in_one_line(
            e.value
        )
        assert group.call(len, batch) == 5  # all have answered, so the group can be used


def test_errors_that_somebody_catches_arrive_as_they_are() -> None:
    def lose(error: Exception) -> None:
        raise error

    with workers(trainers=2) as (group,):
        with pytest.raises(ServersLost, match="n1:1 is silent") as e:
            group.call(lose, ServersLost("n1:1 is silent", {"n1:1": "silent"}))
        assert e.value.servers == {"n1:1": "silent"}
        for error in (DiskFull("no room"), StopRequested()):
            with pytest.raises(type(error)):
                group.call(lose, error)
        assert {*RAISED} == {ServersLost, DiskFull, StopRequested}


def test_a_worker_that_died_is_the_reason_whatever_its_log_says() -> None:
    replies: list[Future[Any]] = [Future(), Future()]
    pending = Pending("train", [], replies, list)
    replies[0].set_exception(RemoteError("trainers/0", "OtherRankFailed", "it gave up"))
    died = "worker trainers/1 (n1, 7) ended with status 137\n--- end of log ---\nNCCL version 2.21"
    replies[1].set_exception(WorkerDied(died))
    with pytest.raises(WorkerDied, match="trainers/1"):
        pending.result(5)


@pytest.mark.parametrize(
    "own",
    [
        RemoteError("trainers/1", "ValueError", "set NCCL_IB_HCA, or leave NCCL out"),
        RemoteError("trainers/1", "RuntimeError", "the judge: Connection closed by peer"),
    ],
    ids=["NCCL", "peer"],
)
def test_an_own_error_is_the_reason_whatever_it_says(own: RemoteError) -> None:
    lost = RemoteError("trainers/0", "OtherRankFailed", "a remote process exited")
    replies: list[Future[Any]] = [Future(), Future()]
    pending = Pending("train", [], replies, list)
    replies[0].set_exception(lost)
    replies[1].set_exception(own)
    with pytest.raises(RemoteError) as caught:
        pending.result(5)
    assert caught.value is own


def test_a_group_of_which_some_hang_after_a_failure_says_so(monkeypatch: Any) -> None:
    monkeypatch.setattr("megarl.controller.group.GRACE", 0.2)
    with workers(trainers=2) as (group,):
        end = threading.Event()

        def hang() -> None:
            if threading.current_thread().name.startswith("trainers/0"):
                raise ValueError("mine")
            end.wait(20)

        _SHARED["hang"] = hang
        with pytest.raises(RemoteError, match="mine"):
            group.call(_shared, "hang")
        with pytest.raises(RuntimeError, match=r"trainers/1 .* still wait"):
            group.call(int)
        end.set()


_SHARED: dict[str, Any] = {}


def _shared(name: str) -> Any:
    return _SHARED[name]()


def test_a_field_that_is_edited_in_place_is_named() -> None:
    with workers(driver=1) as (driver,):
        batch = sent(driver)
        driver.call(len, batch)
        batch["rewards"][1] = 50.0
        with pytest.raises(ValueError, match=r"batch\['rewards'\] was edited in place"):
            driver.call(len, batch)
        batch["rewards"] = batch["rewards"].clone()
        assert driver.call(lambda b: b["rewards"].tolist(), batch)[1] == 50.0


def test_a_call_that_fails_changes_no_field() -> None:
    def fail(batch: Batch) -> None:
        batch["rewards"], batch["more"] = torch.zeros(5), torch.zeros(5)
        batch.pop("input_ids")
        raise ValueError("no good")

    with workers(driver=1, trainers=2) as (driver, group):
        batch = sent(driver)

        def fields(batch: Batch) -> dict[str, torch.Tensor]:
            return batch.per_sample | {n: t.values for n, t in batch.per_token.items()}

        before = group.each(fields, batch)
        with pytest.raises(RemoteError, match="no good"):
            group.call(fail, batch)
        for one, other in zip(before, group.each(fields, batch), strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@dataclass(frozen=True)
class _Note:
    text: str


def test_plain_data_comes_and_objects_stay() -> None:
    with workers(trainers=1) as (group,):
        assert group.call(lambda: {"a": (1, torch.ones(2)), "b": _Note("x")})["b"] == _Note("x")
        assert isinstance(group.call(threading.Lock), Remote)
        view = group.call(lambda: torch.zeros(1 << 16)[:2])
        assert view.untyped_storage().nbytes() == 8


def test_a_dataloader_that_was_read_from_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = StatefulDataLoader([1, 2], batch_size=1)
    next(iter(loader))
    with workers(rollout=1) as (driver,):
        monkeypatch.setattr("megarl.controller.remote.driver", lambda *_: driver)
        rollout: Any = RolloutController(Engine(1.0), None, None)
        with pytest.raises(TypeError, match="this StatefulDataLoader cannot be sent to the driver"):
            rollout.prepare_batch(loader)
        assert rollout.scale == 1.0


LOOP = re.compile(r"    for global_step in .*?\n\n", re.DOTALL)


def test_the_two_scripts_differ_only_in_what_makes_things() -> None:
    spmd, controller = (
        (EXAMPLES / f"gsm8k_grpo_{mode}.py").read_text() for mode in ("spmd", "controller")
    )
    (loop,), (same,) = LOOP.findall(spmd), LOOP.findall(controller)
    assert loop == same and "actor.ppo_update(batch)" in loop
    assert spmd.split(loop)[1] == controller.split(loop)[1]
    made = difflib.ndiff(*(_body(text).splitlines() for text in (spmd, controller)))
    for line in (line for line in made if line[0] in "+-"):
        assert re.search(
            r"= megarl\.(make_scheduler|\w+Controller|RemoteSGLangEngine\.for_run|Megatron\w+)\(",
            line,
        ), line


def _body(script: str) -> str:
    return script[script.index("import sys") :]
