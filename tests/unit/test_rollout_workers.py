"""rollout.workers: episodes in other processes give the same samples, to the bit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import pickle
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch

from megarl.api.inference import RolloutFailed, RolloutWorkflow
from megarl.api.records import ModelRequest, WeightUpdateMeta
from megarl.api.tokens import concat_padded
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.rollout import client as client_module
from megarl.rollout.chat import MixedWorkflow
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.episode_context import AnswerLog, attempt_key, pause_clock
from megarl.rollout.generation import Sample
from megarl.rollout.rewards import RewardPool, get_reward_fn
from megarl.rollout.rewards.judge import JudgeReward
from megarl.rollout.rewards.pool import close_copies, share
from megarl.rollout.worker import HEAR, EpisodeWorker, pickled_workflow
from megarl.rollout.workers import MOST_DEATHS, WorkerPool, WorkersLost
from megarl.rollout.workflows.agent import AgentWorkflow
from megarl.rollout.workflows.env import EnvWorkflow
from megarl.rollout.workflows.rlvr import RLVRWorkflow
from megarl.rollout.workflows.tool import ToolWorkflow
from megarl.rpc.errors import RpcError
from megarl.rpc.link import pack
from megarl.utils.user_errors import user_lines
from tests.unit.rollout_fakes import FakeServer, trajectory
from tests.unit.scripted import tool_tokenizer
from tests.unit.test_judge import Judge

G = GenerationHyperparameters(max_new_tokens=3, seed=5, n_samples=2)


class SeededServer(FakeServer):
    """Writes tokens and logprobs that tell the request's seed."""

    def answer(self, rid: str, ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        answer = super().answer(rid, ids, params)
        seed = params["sampling_seed"]
        for entry in answer["meta_info"].get("output_token_logprobs", ()):
            entry[0], entry[1] = -(seed % 9973) / 8.0, entry[1] + seed % 31
        answer["output_ids"] = [e[1] for e in answer["meta_info"].get("output_token_logprobs", ())]
        return answer


class Varied(RolloutWorkflow):
    """Asks once or twice, by the row; some rows are rejected, some rollouts fail the first time."""

    gconfig = G

    async def arun_episode(self, engine, data):
        row, first = data["row_id"], not attempt_key()
        prompts = [[9, row + 1, i] for i in range(data.get("samples_missing", G.n_samples))]
        for _ in range(1 + row % 2):
            requests = [ModelRequest(rid="r", input_ids=ids, gconfig=G) for ids in prompts]
            answers = await engine.agenerate_many(requests)
            prompts = [p + a.output_tokens for p, a in zip(prompts, answers)]
        if row % 7 == 3 and first:
            raise RolloutFailed("environment", "the first time")
        if row % 11 == 4:
            return None
        made = [trajectory(p, version=engine.get_version()) for p in prompts]
        batch = concat_padded(made) | {
            "rewards": torch.tensor([float(sum(p) % 3) for p in prompts])
        }
        batch["logprobs"][:, 1] = torch.tensor([sum(a.output_logprobs) for a in answers])
        if row % 5 == 2 and first:
            batch["valid"] = torch.tensor([False, True])
        return batch


class Loader:
    """Gives batches of 4 rows, of 32."""

    batch_size = 4

    def __iter__(self):
        numbers = itertools.cycle(range(32))
        while True:
            yield [{"row_id": next(numbers)} for _ in range(4)]


def sent(payload: Any) -> Any:
    """What arrives of what is sent over a link."""
    body, *raw = pack(payload).parts
    return pickle.loads(body, buffers=raw)


class OneProcess:
    """An EpisodeWorker in this process. What goes in and out is pickled; `dead` ends it as a death
    does."""

    def __init__(self, index: int) -> None:
        self.worker, self.dead = EpisodeWorker(), asyncio.Event()
        self.verbs: list[str] = []
        made.append(self)

    async def call(self, verb: str, payload: Any = None) -> Any:
        self.verbs.append(verb)
        payload = sent(payload)
        answer = asyncio.ensure_future(self.answer(verb, payload))
        death = asyncio.ensure_future(self.dead.wait())
        await asyncio.wait([answer, death], return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if self.dead.is_set():
            answer.cancel()
            raise RpcError("worker of the test: it died")
        return sent(answer.result())

    async def answer(self, verb: str, payload: Any) -> Any:
        answer = await asyncio.to_thread(self.worker.handle, verb, payload)
        return await asyncio.wrap_future(answer) if isinstance(answer, Future) else answer

    def stop(self) -> None:
        self.worker.close()


made: list[OneProcess] = []


def until(holds: Callable[[], bool]) -> None:
    """Waits until something holds, 20 s at most."""
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert holds()


@pytest.fixture
def server():
    it = SeededServer()
    yield it
    it.close()


@pytest.fixture
def connect(server, monkeypatch):
    """Makes open clients; here=True has their workers run in this process."""
    clients = []
    made.clear()

    def open_client(workers=0, *, here=True, **config):
        if here:
            pool = lambda client: WorkerPool(client, OneProcess)  # noqa: E731
            monkeypatch.setattr(client_module, "WorkerPool", pool)
        else:
            monkeypatch.setattr(client_module, "WorkerPool", WorkerPool)
        config = {"min_rollouts": 1, "max_failure_rate": 1.0} | config
        client = RemoteSGLangEngine(
            RolloutConfig(**{"addresses": [server.address]} | config, workers=workers), seed=3
        )
        clients.append(client)
        client.initialize()
        return client

    yield open_client
    with ThreadPoolExecutor() as threads:  # their processes end together
        list(threads.map(lambda client: client.destroy(), clients))
    close_copies()


def train(client, flow, *, steps=3, meanwhile=None, versions=0):
    """Runs steps with dynamic sampling; returns batches, outcomes, books, and an evaluation."""
    seen = []

    def wanted(batch):
        seen.append(batch["rewards"].tolist())
        return bool(batch["rewards"].min() != batch["rewards"].max())

    loader, found = Loader(), []
    for step in range(steps):
        parts = client.executor.prepare_parts(
            loader, flow, should_accept=wanted, meanwhile=meanwhile
        )
        batch = concat_padded(parts)
        client.executor.trained(batch["episode_ids"])
        told = [(o.row["row_id"], list(o.rewards)) for o in client.executor.outcomes]
        found.append((batch, told))
        client.pause()
        client.set_version(versions + step + 1)
        client.resume()
    state = client.executor.state_dict()
    held_out = client.executor.rollout_batch([{"row_id": i} for i in (0, 1, 4, 8)], flow)
    return found, state, held_out, sorted(seen)


def same(a, b) -> bool:
    """Compares nested data with tensors, to the bit."""
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class Killed(Varied):
    """Kills the process that runs it, between requests, once `file` is there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    async def arun_episode(self, engine, data):
        await engine.agenerate_many([ModelRequest(rid="r", input_ids=[1], gconfig=G)])
        with contextlib.suppress(FileNotFoundError):
            self.file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().arun_episode(engine, data)


def test_samples_are_the_same_however_many_processes_run_episodes(
    connect, server, caplog, tmp_path
):
    flow, killed = Killed(tmp_path / "kill"), []
    alone = train(connect(), flow)
    with ThreadPoolExecutor() as threads:  # the processes start together
        one, two = threads.map(lambda k: connect(k, here=False), (1, 2))

    def kill():  # in the middle of a step
        if not killed:
            flow.file.touch()
            killed.append(True)
        elif two.stats()["worker_deaths"]:
            server.delay = 0.0

    server.delay = 0.1
    with_two = train(two, flow, meanwhile=kill)
    assert alone[0][0][0]["input_ids"].unique().numel() > 10
    assert alone[1]["failed_samples"]["samples"] and alone[1]["counters"]["rejected"]
    assert same(train(one, flow), alone)
    assert same(with_two, alone)
    assert two.stats()["worker_deaths"] == 1
    assert re.search(r"rollout_worker_[01]/0 .* run again", caplog.text)


def test_a_run_goes_on_in_the_middle_of_an_answer(connect, server, monkeypatch):
    monkeypatch.setattr("megarl.rollout.generation.ABORT_DELAY", 60.0)
    monkeypatch.setattr("megarl.rollout.executor.LOOK_AROUND", 0.05)

    def interrupted(workers):
        client = connect(workers)
        client.executor.episodes.keeps_answers = True
        before = len(server.requests)
        server.abort_after = [1] * 8  # one token of every sample

        def stop():
            if len(server.requests) - before >= 4:
                client.pause()
                client.resume()
                raise InterruptedError

        with pytest.raises(InterruptedError):
            client.executor.prepare_parts(Loader(), Varied(), meanwhile=stop)
        state, answers = client.executor.state_dict(), client.executor.episodes.answers()
        client.destroy()
        return state, answers

    def resumed(state, workers):
        client = connect(workers)
        client.executor.episodes.keeps_answers = True
        client.executor.load_state_dict(state)
        return concat_padded(client.executor.prepare_parts(Loader(), Varied()))

    state, answers = interrupted(0)
    again, told = interrupted(2)
    assert sum(len(a["tokens"]) for _, kept in answers for a in kept) == 8
    assert same(again, state) and same(told, answers)
    asked = len(server.requests)
    assert same(resumed(again, 2), resumed(state, 0))
    lengths = [len(ids) for r in server.requests[asked:] for ids in r["input_ids"]]
    assert lengths.count(4) == 2 * 8  # prompts with the token of before


def test_answers_of_workers_that_died_are_gone_on_with(connect, server, monkeypatch):
    monkeypatch.setattr("megarl.rollout.generation.ABORT_DELAY", 60.0)
    monkeypatch.setattr("megarl.rollout.executor.LOOK_AROUND", 0.05)
    client = connect(2)
    client.executor.episodes.keeps_answers = True
    server.abort_after = [2] * 8
    seen = []

    def die():
        if len(server.requests) == 4 and not seen:
            client.pause()
            client.resume()
            seen.append(client.executor.episodes.answers())
            for process in made[:2]:
                client.opened().loop.call_soon(process.dead.set)

    done = concat_padded(client.executor.prepare_parts(Loader(), Varied(), meanwhile=die))
    client.destroy()
    assert sum(len(a["tokens"]) for _, kept in seen[0] for a in kept) == 16
    alone = connect()
    server.abort_after = []
    assert same(done, concat_padded(alone.executor.prepare_parts(Loader(), Varied())))


def test_an_episode_whose_first_worker_died_keeps_the_version_of_its_begin(
    connect, server, monkeypatch
):
    monkeypatch.setattr("megarl.rollout.generation.ABORT_DELAY", 60.0)
    monkeypatch.setattr("megarl.rollout.executor.LOOK_AROUND", 0.05)
    client = connect(2)
    client.executor.episodes.keeps_answers = True
    client.set_version(5)
    server.abort_after = [2] * 8
    answers = []

    def look():
        if len(server.requests) == 4 and len(made) == 2:
            for process in made[:2]:
                client.opened().loop.call_soon(process.dead.set)
        elif len(server.requests) >= 8 and not answers:
            client.pause()
            client.resume()
            answers.extend(client.executor.episodes.answers())

    client.executor.prepare_parts(Loader(), Varied(), meanwhile=look)
    assert {a["admitted"] for _, kept in answers for a in kept} == {5}


class Deadly(RolloutWorkflow):
    """Ends the worker that runs it."""

    async def arun_episode(self, engine, data):
        made[data["row_id"] % len(made)].dead.set()
        for process in made:
            process.dead.set()
        await asyncio.sleep(60)


def test_workers_that_die_again_and_again_end_the_run(connect):
    client = connect(1)
    client.submit({"row_id": 0}, Deadly())
    with pytest.raises(WorkersLost, match=f"{MOST_DEATHS} workers of rollout.workers died"):
        client.wait(1, timeout=30)


@pytest.mark.parametrize("error", [RpcError, OSError])
def test_workers_that_cannot_start_again_end_the_run(connect, monkeypatch, error):
    client = connect(2)
    running.clear()
    client.submit({"row_id": 0}, Asleep())
    until(lambda: 0 in running)

    async def refuses(self, verb, payload=None):
        raise error("no memory")

    monkeypatch.setattr(OneProcess, "call", refuses)
    for process in list(made):
        client.opened().loop.call_soon(process.dead.set)
    with pytest.raises(WorkersLost, match=f"{MOST_DEATHS} workers .* in a row.*(no memory|died)"):
        client.wait(1, timeout=30)
    with pytest.raises(WorkersLost):
        client.executor.rollout_batch([{"row_id": 0}], Varied())


def test_workers_that_die_at_the_same_time_cost_no_prompt_in_an_asynchronous_run(connect, server):
    client = connect(3, max_head_offpolicyness=1)

    def die():
        if len(server.requests) >= 4 and len(made) == 3:
            for process in made[:3]:
                client.opened().loop.call_soon(process.dead.set)

    loader, trained, server.delay = Loader(), [], 0.05
    for version in range(3):
        batch = concat_padded(client.executor.prepare_parts(loader, Varied(), meanwhile=die))
        client.executor.trained(batch["episode_ids"])
        trained += batch["input_ids"][:, 2].unique().sub(1).tolist()
        assert batch["versions"][batch["loss_mask"]].min() >= version - 1
        client.set_version(version + 1)
    assert trained == [row for row in range(13) if row % 11 != 4]
    assert client.stats()["worker_deaths"] == 3 and len(made) == 6


def test_a_worker_that_stands_still_is_replaced(connect, monkeypatch, caplog):
    monkeypatch.setattr("megarl.rollout.worker.HEAR_TIMEOUT", 0.1)
    monkeypatch.setattr("megarl.rollout.workers.HEAR_TIMEOUT", 0.1)
    monkeypatch.setattr("megarl.rollout.workers.STANDSTILL", 0.4)
    call = OneProcess.call

    async def stuck(self, verb, payload=None):
        if self is made[0] and verb == HEAR:
            await asyncio.Event().wait()
        return await call(self, verb, payload)

    monkeypatch.setattr(OneProcess, "call", stuck)
    client = connect(1)
    batch = client.executor.rollout_batch([{"row_id": 1}], Varied())
    assert len(batch["input_ids"]) == G.n_samples and client.stats()["worker_deaths"] >= 1
    assert (
        "worker 0 of rollout.workers stands still: its event loop has not turned for 0.4"
        in caplog.text
    )


class Asleep(RolloutWorkflow):
    """Waits for longer than a test; its row is in `running` meanwhile."""

    async def arun_episode(self, engine, data):
        running.add(data["row_id"])
        try:
            await asyncio.sleep(60)
        finally:
            running.discard(data["row_id"])


running: set[int] = set()


def test_what_a_workflow_raises_arrives_with_its_traceback(connect):
    class Own(Exception):
        def __init__(self, code, text):
            super().__init__(text)

    class Fails(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            errors = KeyError("absent"), MemoryError("no room"), Own(7, "no such thing")
            raise errors[data["row_id"]]

    client = connect(1)
    for row, expected in ((0, KeyError), (1, MemoryError), (2, RuntimeError)):
        client.submit({"row_id": row}, Fails())
        with pytest.raises(expected) as error:
            client.wait(1, timeout=30)
        told = "".join(error.value.__notes__)
        assert f"in the episode of row {row}" in told
        assert user_lines(error.value)[0].name == "arun_episode"
    assert "Own: no such thing" in str(error.value)


def load_once():
    if loaded_once:
        raise ModuleNotFoundError("a module that the workflow alone finds")
    loaded_once.append(True)
    return LoadsOnce("of the workflow")


loaded_once = []


class LoadsOnce(Exception):
    def __reduce__(self):
        return load_once, ()


def test_an_error_that_cannot_be_loaded_here_ends_its_episode_alone(connect):
    class Fails(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            if data["row_id"]:
                raise KeyError("another")
            raise LoadsOnce

    client = connect(1)
    client.submit({"row_id": 0}, Fails())
    with pytest.raises(ModuleNotFoundError) as error:
        client.wait(1, timeout=30)
    assert "as the error of row 0" in "".join(error.value.__notes__)
    client.submit({"row_id": 1}, Fails())
    with pytest.raises(KeyError):
        client.wait(1, timeout=30)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_no_exception_is_an_episodes_error(connect, workers):
    class Failed(BaseException):
        pass

    class Fails(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            raise Failed("as pytest.fail")

    client = connect(workers)
    client.submit({"row_id": 0}, Fails())
    with pytest.raises(RuntimeError, match="Fails ended with Failed"):
        client.wait(1, timeout=30)


class AllButOneAsleep(Asleep):
    """Row 0 raises once the four others sleep."""

    async def arun_episode(self, engine, data):
        if data["row_id"]:
            return await super().arun_episode(engine, data)
        while len(running) < 4:
            await asyncio.sleep(0.01)
        raise ValueError("enough")


def test_an_error_cancels_the_other_episodes_where_they_run(connect, server):
    client, once = connect(2), [AllButOneAsleep()]
    flow = weakref.ref(once[0])
    running.clear()
    with pytest.raises(ValueError, match="enough"):
        client.executor.rollout_batch([{"row_id": i} for i in range(5)], once.pop())
    until(lambda: not running)
    until(lambda: not (gc.collect(), flow())[1])  # the coordinator has forgotten them, too


class AtAWord(Varied):
    """Is in `running`, and asks for nothing before `go` is set."""

    async def arun_episode(self, engine, data):
        running.add(data["row_id"])
        while not go.is_set():
            await asyncio.sleep(0.01)
        return await super().arun_episode(engine, data)


go = threading.Event()


def test_workers_hold_their_requests_over_an_update(connect, server):
    client = connect(2)
    running.clear()
    go.clear()
    for row in range(2):  # one for each
        client.submit({"row_id": row}, AtAWord())
    until(lambda: running == {0, 1})
    client.pause()
    go.set()
    time.sleep(0.2)
    assert not server.requests
    client.set_version(4)
    server.weight_version = "4"
    client.resume()
    batch = client.wait(2, timeout=30)
    assert batch["versions"][batch["loss_mask"]].unique().tolist() == [4]
    assert len(server.requests) == 3  # each worker knew the version: neither row was run again


class Sleeping(RolloutWorkflow):
    """Takes longer than the time that it has, and gives itself, unless some of it is a pause."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def __reduce__(self):
        return _the_sleeping, ()

    async def arun_episode(self, engine, data):
        self.begun.set()
        async with pause_clock().timeout(2.0):
            await asyncio.sleep(3.0)
        return await Varied().arun_episode(engine, data)


sleeping = Sleeping()


def _the_sleeping() -> Sleeping:
    return sleeping


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pause_is_not_the_episodes_time_wherever_they_run(connect, workers):
    client = connect(workers, episode_timeout=2.0)
    sleeping.begun.clear()
    client.submit({"row_id": 0}, sleeping)
    assert sleeping.begun.wait(30)
    client.pause()
    time.sleep(2.0)
    client.resume()
    assert client.wait(1, timeout=30)["group_ids"].unique().tolist() == [0]


def test_workers_go_by_the_servers_that_the_coordinator_knows(connect, server, tmp_path):
    other, file = SeededServer(), tmp_path / "servers"
    try:
        file.write_text(server.address)
        client = connect(2, addresses_file=str(file), addresses=[])
        file.write_text(f"{server.address}\n{other.address}")
        client.pause()
        server.weight_version = other.weight_version = "1"
        client.update_weights(WeightUpdateMeta(type="distributed", version=1)).result(60)
        client.resume()
        client.executor.rollout_batch([{"row_id": i} for i in range(8)], Varied())
        assert server.requests and other.requests
        client.drop_servers({server.address: "gone"})
        server.requests.clear()
        client.executor.rollout_batch([{"row_id": i} for i in range(8)], Varied())
        assert not server.requests
    finally:
        other.close()


def test_all_processes_share_what_servers_have_cached(connect, server):
    client = connect(2)

    def keys():
        server.requests.clear()
        client.executor.rollout_batch([{"row_id": i} for i in range(8)], Varied())
        asyncio.run(client.agenerate(ModelRequest(rid="r", input_ids=[1], gconfig=G)))
        return {request["extra_key"] for request in server.requests}

    (first,) = keys()
    client.pause()
    client.set_version(1)
    client.set_version(0)  # other weights of the same number follow
    client.resume()
    made[0].dead.set()
    until(lambda: len(made) == 3)
    (second,) = keys()
    assert second != first


class Loaded(Varied):
    """Is in `loaded` for as long as a copy of it, that a worker has loaded, is there."""

    def __getstate__(self):
        return {"copy": True}

    def __setstate__(self, state):
        vars(self).update(state)
        loads.append(1)
        loaded.add(self)


loads: list[int] = []
loaded: weakref.WeakSet[Loaded] = weakref.WeakSet()


def test_a_workflow_goes_to_a_worker_once_and_leaves_it_with_the_last_reference(connect):
    client, flow = connect(1), Loaded()
    for _ in range(3):
        client.executor.rollout_batch([{"row_id": 0}], flow)
    assert len(loads) == len(loaded) == 1
    del flow
    client.executor.rollout_batch([{"row_id": 0}], Loaded())
    until(lambda: not (gc.collect(), len(loaded))[1])
    assert len(loads) == 2


def test_many_episodes_share_a_message(connect, server):
    client = connect(1, max_concurrent_rollouts=64)
    before = len(made[0].verbs)
    client.executor.rollout_batch([{"row_id": 0} for _ in range(64)], Varied())
    assert len(made[0].verbs) - before < 32


def test_what_cannot_be_pickled_is_named(connect):
    flow = Varied()
    flow.tools = [SimpleNamespace(lock=threading.Lock())]
    client = connect(1)
    with pytest.raises(
        TypeError, match=r"rollout.workers=1: Varied .*Varied\.tools\[0\]\.lock, a lock"
    ):
        client.executor.rollout_batch([{"row_id": 0}], flow)


def test_copies_share_the_reward_workers():
    flow = Varied()
    with RewardPool(5, timeout=3.0, on_error="reject") as pool:
        flow.pool = flow.same = pool
        pickled = [pickled_workflow(flow, 2) for _ in range(2)]
        first, second = map(cloudpickle.loads, pickled)
        assert first.pool is first.same is second.pool and first.pool is not pool
        assert first.pool.workers == 3 and first.pool.on_error == "reject"
        close_copies()
    assert share(5) == 5


def test_a_judge_asks_no_more_at_once_than_one_would():
    flow, judge = Varied(), Judge()
    flow.reward_fn = JudgeReward(base_url=judge.url, concurrency=8)
    copy = cloudpickle.loads(pickled_workflow(flow, 4))

    async def peak(fn):
        judge.peak = 0
        await asyncio.gather(*(fn("", "It is 4.", [], []) for _ in range(16)))
        return judge.peak

    try:
        assert asyncio.run(peak(copy.reward_fn)) == 2 and asyncio.run(peak(flow.reward_fn)) > 2
    finally:
        judge.close()


def test_workflows_with_tools_partners_and_agents_can_be_sent(tmp_path):
    tokenizer, reward = tool_tokenizer(tmp_path), get_reward_fn("arithmetic")
    mcp = {"mcp": {"command": ["true"]}}
    flows = {
        "rlvr": RLVRWorkflow(reward, G, tokenizer),
        "tools": ToolWorkflow(reward, G, tokenizer, tools=["tests.unit.test_tools:add", mcp]),
        "env": EnvWorkflow(reward, G, tokenizer, env="tests.unit.test_turn_workflows:Countdown"),
        "agent": AgentWorkflow(reward, G, tokenizer, agent=lambda data, url, key: 1.0),
    }
    mixed = cloudpickle.loads(pickled_workflow(MixedWorkflow(flows, G), 2))
    assert {k: type(v) for k, v in mixed.workflows.items()} == {
        k: type(v) for k, v in flows.items()
    }
    pools = {id(flow.reward_pool) for flow in mixed.workflows.values()}
    assert len(pools) == 1
    close_copies()


def sample(tokens):
    return Sample(ModelRequest(rid="r", input_ids=tokens, gconfig=G), seed=None)


def grow(one, *tokens, reason=""):
    one.response.output_tokens += tokens
    one.response.output_logprobs += [-float(t) for t in tokens]
    one.response.output_versions += [2] * len(tokens)
    one.response.stop_reason = reason


def test_a_log_in_another_process_is_as_complete():
    first = AnswerLog()
    first.begin(one := sample([1]))
    grow(one, 5, 6)
    first.cut()
    kept = [*first.state(), *first.state()]

    there, here = AnswerLog(kept), AnswerLog(kept)
    here.hear(there.news())
    there.begin(again := sample([1]))
    there.begin(other := sample([2]))
    there.begin(sample([3]))
    for step in range(3):
        if step == 1:
            grow(other, 7)
        if step == 2:
            grow(again, 8, reason="stop")
            there.end()
        for log in (there, here):
            if log is here:
                here.hear(there.news())
            log.cut()
        assert same(here.state(), there.state())
    assert [a["tokens"].tolist() for a in here.state()] == [[5, 6], [5, 6, 8], [7]]


def test_what_has_not_changed_is_told_once():
    before = AnswerLog()
    before.begin(one := sample([1]))
    grow(one, 5)
    before.cut()
    there, here = AnswerLog(before.state()), AnswerLog(before.state())

    def told():
        here.hear(news := there.news())
        here.cut(), there.cut()
        assert same(here.state(), there.state())
        return [a["tokens"].tolist() for a in news if isinstance(a, dict)]

    assert told() == []  # both have what was kept
    there.begin(again := sample([1]))
    there.begin(first := sample([2]))
    there.begin(second := sample([3]))
    assert told() == []  # a request begins with it
    grow(second, 8)
    assert told() == [[8]]
    grow(first, 6, 7)  # its answer takes a place before the others
    assert told() == [[6, 7]]
    assert told() == []
    grow(again, 9, reason="length")
    first.response.stop_reason = "stop"
    assert told() == [[5, 9], [6, 7]]
    there.end()
    assert told() == []
