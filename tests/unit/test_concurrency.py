"""Episodes in flight adapt to the servers' queues, and nothing else does."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.api.inference import RolloutWorkflow
from megarl.api.records import ModelRequest
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.concurrency import adapt, adapted, waiting
from megarl.rollout.generation import Generator
from megarl.rollout.pipeline import Pipeline
from megarl.rollout.servers import ServerPool
from megarl.utils.http import HttpError
from tests.unit.rollout_fakes import FakeServer, trajectory

BATCH = 8
COUNTS = st.integers(0, 500)


@given(st.integers(1, 500), COUNTS, st.lists(COUNTS, min_size=1, max_size=8), COUNTS)
def test_the_bound_grows_while_no_queue_is_long_and_shrinks_where_one_is(b, running, queues, most):
    new = adapted(b, running, {str(i): n for i, n in enumerate(queues)}, most)
    assert new >= 1
    if max(queues) > most:
        assert new <= max(len(queues), 0.75 * b)
    elif max(queues) == 0 and running >= b:
        assert new > b
    else:
        assert new == b


@pytest.mark.parametrize("most", (0, 4, 32))
def test_it_settles_where_servers_are_full_and_their_queues_are_not_long(most):
    """Three servers with 40 places each and episodes without end."""
    bound, seen = 8, []
    for _ in range(400):
        queue = max(0, -(-bound // 3) - 40)
        bound = adapted(bound, bound, {str(i): queue for i in range(3)}, most)
        seen.append((bound, queue))
    assert all(0.7 * 120 <= b <= 1.1 * 120 + 3 * most for b, _ in seen[-100:])
    assert sum(queue > most for _, queue in seen[-100:]) < 30


def test_the_longest_queue_of_replicas_counts_and_silence_does_not():
    loads = [{"num_waiting_reqs": 3}, {"num_waiting_reqs": 5}]
    answers = {"a": {"loads": loads}, "b": HttpError("b", "/v1/loads", "gone"), "c": "?", "d": {}}
    assert waiting(answers) == {"a": 5}


def test_a_look_that_fails_is_logged_and_the_bound_stays(caplog: pytest.LogCaptureFixture) -> None:
    async def answers(*_: object, **__: object) -> dict[str, object]:
        return {"a": {"loads": [{"num_waiting_reqs": "many"}]}}

    now = SimpleNamespace(max_concurrent=8, running=8)
    pipeline = SimpleNamespace(staleness=now, changed=threading.Condition())
    looking = adapt(
        cast(ServerPool, SimpleNamespace(everywhere=answers)),
        cast(Generator, SimpleNamespace(held=False)),
        cast(Pipeline, pipeline),
        4,
    )
    asyncio.run(looking)
    assert "rollout.max_queue=4: the bound is adapted no more" in caplog.text
    assert "TypeError" in caplog.text and now.max_concurrent == 8


class OneAnswer(RolloutWorkflow):
    def __init__(self) -> None:
        self.running = self.peak = 0

    async def arun_episode(self, engine, data):
        self.running += 1
        self.peak = max(self.peak, self.running)
        request = ModelRequest(
            rid="r", input_ids=[9] * (data["row_id"] % 5 + 1),
            gconfig=GenerationHyperparameters(max_new_tokens=4),
        )  # fmt: skip
        r = await engine.agenerate(request)
        self.running -= 1
        return trajectory(r.output_tokens, version=r.output_versions[0])


class Rows(list):
    batch_size = BATCH


@pytest.fixture
def server():
    made = FakeServer()
    yield made
    made.close()


def three_batches(server, flow, *, eta=0, **config):
    client = RemoteSGLangEngine(
        RolloutConfig(
            addresses=[server.address], max_head_offpolicyness=eta, setup_timeout=10, **config
        )
    )
    client.initialize()
    server.weight_version = "default"
    rows = Rows([[{"row_id": BATCH * i + j} for j in range(BATCH)] for i in range(20)])
    try:
        batches = []
        for step in range(1, 4):
            batches.append(client.prepare_batch(rows, flow))
            server.weight_version = str(step)
            client.set_version(step)
        return batches, client.stats()
    finally:
        client.destroy()


def test_more_are_in_flight_than_a_batch_where_queues_are_empty(server, monkeypatch):
    monkeypatch.setattr("megarl.rollout.concurrency.LOOK_EVERY", 0.01)
    server.delay = 0.3
    flow = OneAnswer()
    _, stats = three_batches(server, flow, eta=4, max_queue=2)
    assert BATCH < flow.peak <= 5 * BATCH and stats["max_concurrent"] > BATCH


def test_fewer_are_in_flight_where_queues_are_long_and_the_samples_are_the_same(
    server, monkeypatch
):
    """In a synchronous run, whatever the queues do."""
    monkeypatch.setattr("megarl.rollout.concurrency.LOOK_EVERY", 0.01)
    want, _ = three_batches(server, OneAnswer())
    server.delay, server.queue = 0.02, lambda: random.choice((0, 50))
    found, _ = three_batches(server, OneAnswer(), max_queue=2)
    for a, b in zip(want, found, strict=True):
        assert torch.equal(a["episode_ids"], b["episode_ids"])
        assert torch.equal(a["input_ids"].values, b["input_ids"].values)
    server.queue = lambda: 50
    _, stats = three_batches(server, OneAnswer(), max_queue=2)
    assert 1 <= stats["max_concurrent"] < BATCH


def test_servers_that_do_not_report_queues_are_named_once(server, monkeypatch, capsys):
    monkeypatch.setattr("megarl.rollout.concurrency.LOOK_EVERY", 0.01)
    server.queue, server.delay = None, 0.1
    _, stats = three_batches(server, OneAnswer(), max_queue=2)
    deadline = time.monotonic() + 10
    while "do not report" not in (said := capsys.readouterr().err):
        assert time.monotonic() < deadline
    assert said.count("rollout.max_queue=2") == 1 and stats["max_concurrent"] == BATCH
