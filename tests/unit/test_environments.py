"""Environments without verifiers: a worker plays a recorded episode (tests/environments/record.py)
through a real gateway, and breaks in the ways that workers break."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from megarl.api.records import ModelRequest, ModelResponse
from megarl.config.dataset import DatasetConfig
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.rollout.environments import client
from megarl.rollout.environments.client import (
    EnvironmentConfig,
    Worker,
    WorkerError,
    shared_workers,
)
from megarl.rollout.environments.verifiers import (
    NotRecorded,
    VerifiersWorkflow,
    tasks,
    trained_part,
)
from megarl.rollout.episode import run_episode
from megarl.rollout.episode_context import EpisodeContext, current_episode
from megarl.rollout.episodes import Episode
from megarl.rollout.gateway.gateway import Gateway
from megarl.rollout.gateway.messages import GatewayConfig, TokenRequest
from megarl.rollout.gateway.session import Session
from megarl.rollout.loop_thread import PauseClock
from megarl.rollout.trajectory import Trajectory
from tests.tiny_tokenizer import save_tokenizer
from tests.unit.test_gateway import StubEngine

ENVIRONMENTS = Path(__file__).parent.parent / "environments"
WIRE = ENVIRONMENTS / "wire.json"
GCONFIG = GenerationHyperparameters(n_samples=1, max_new_tokens=16, stop_token_ids=[7])


class GatewayEngine(StubEngine):
    """Samples like StubEngine, behind a gateway of its own."""

    async def __aenter__(self) -> GatewayEngine:
        async def context() -> int | None:
            return 256

        self.gateway = Gateway(self, GatewayConfig())  # type: ignore[arg-type]
        await self.gateway.start(context)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.gateway.close()

    @contextlib.asynccontextmanager
    async def session(self, *args: Any, **named: Any) -> AsyncIterator[Session]:
        with self.gateway.session(*args, **named) as session:
            yield session


class Replay(GatewayEngine):
    """Gives the recorded answers to the recorded prompts."""

    def _answer(self, request: ModelRequest) -> ModelResponse:
        calls = json.loads(WIRE.read_text())["calls"]
        (call,) = [c for c in calls if c["body"]["token_ids"] == request.input_ids]
        (choice,) = call["answer"]["choices"]
        self.wrote.append(
            ModelResponse(
                input_tokens=list(request.input_ids),
                output_tokens=choice["token_ids"],
                output_logprobs=[e["logprob"] for e in choice["logprobs"]["content"]],
                output_versions=[3] * len(choice["token_ids"]),
                stop_reason=choice["finish_reason"],
            )
        )
        return self.wrote[-1]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer")
    found = save_tokenizer(path)
    found.name_or_path = str(path)
    return found


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of an environment whose worker is the real one, apart from verifiers."""
    shutil.copy(client.SCRIPT, tmp_path / "main.py")
    replay = ENVIRONMENTS / "replay" / "episodes.py"
    (tmp_path / "replay").mkdir()
    shutil.move(tmp_path / "main.py", tmp_path / "replay" / "main.py")
    shutil.copy(replay, tmp_path / "replay")
    shutil.copy(WIRE, tmp_path)
    monkeypatch.setattr(client, "SCRIPT", tmp_path / "replay" / "main.py")
    return {"python": sys.executable, "id": "any", "args": {"marker": str(tmp_path / "marker")}}


def rollouts(
    tokenizer: Any, options: dict[str, Any], *, n: int = 1, retries: int = 0, **args: Any
) -> tuple[Episode, Replay]:
    """One row's episodes, and the engine."""
    options = options | {"args": options["args"] | args}
    row = tasks(DatasetConfig(size=1), seed=0, **options)[0]

    async def run() -> tuple[Episode, Replay]:
        async with Replay(tokenizer) as engine:
            workflow = VerifiersWorkflow(None, GCONFIG.new(n_samples=n), tokenizer)  # type: ignore[arg-type]
            episode = Episode(number=0, row=row, workflow=workflow)
            try:
                config = RolloutConfig(episode_timeout=60, failure_retries=retries)
                await run_episode(episode, engine, config)  # type: ignore[arg-type]
                return episode, engine
            finally:
                await shared_workers(EnvironmentConfig.read(options)).close()

    return asyncio.run(run())


def test_the_recorded_exchange_trains_what_was_sampled(
    tokenizer: Any, options: dict[str, Any]
) -> None:
    episode, engine = rollouts(tokenizer, options)
    batch = episode.batch
    assert batch is not None
    (trace,) = json.loads(WIRE.read_text())["episode"]["traces"]
    (sample,) = trace["samples"]
    n = len(sample["token_ids"])
    assert len(engine.wrote) == 3 and batch["input_ids"].tolist() == [sample["token_ids"]]
    assert batch["loss_mask"].tolist() == [[bool(m) for m in sample["mask"]]]
    assert batch["logprobs"].equal(torch.tensor([sample["logprobs"]]))
    assert batch["versions"].tolist() == [[3 if m else -1 for m in sample["mask"]]]
    assert batch["rewards"].tolist() == [trace["reward"]] and batch["attention_mask"].sum() == n
    assert {r.gconfig.max_new_tokens for r in engine.asked} == {16}
    assert {tuple(r.gconfig.stop_token_ids) for r in engine.asked} == {(7, 1)}


def test_a_worker_that_dies_is_started_again(tokenizer: Any, options: dict[str, Any]) -> None:
    episode, engine = rollouts(tokenizer, options, retries=1, die=True)
    assert episode.batch is not None and episode.retried == 1
    trained = int(episode.batch["loss_mask"].sum())
    assert trained == sum(w.output_len for w in engine.wrote)


def test_a_failed_episode_is_no_reward_of_zero(tokenizer: Any, options: dict[str, Any]) -> None:
    episode, engine = rollouts(tokenizer, options, retries=1, fail=True)
    assert episode.batch is None and [kind for kind, _ in episode.failed] == ["environment"] * 2
    assert len(engine.wrote) == 6  # it was begun again once


def test_only_a_failed_episode_runs_again_and_all_its_traces_count(
    tokenizer: Any, options: dict[str, Any]
) -> None:
    """Four episodes of two agents, one of which fails once."""
    episode, engine = rollouts(tokenizer, options, n=4, retries=1, agents=True, once=True)
    assert episode.batch is not None
    assert (episode.good, episode.retried, len(episode.failed)) == (8, 2, 2)
    assert len(episode.batch["input_ids"]) == 8
    assert len(engine.wrote) == 3 * 5  # three answers of each episode


def test_tokens_that_were_not_sampled_stop_the_run(tokenizer: Any, options: dict[str, Any]) -> None:
    episode, _ = rollouts(tokenizer, options, wrong=True)
    assert isinstance(episode.error, NotRecorded)


def test_an_environment_that_cannot_start_says_why(options: dict[str, Any]) -> None:
    broken = options | {"args": {"broken": True}}
    with pytest.raises(ValueError, match=r"(?s)environment any: .*no such taskset"):
        tasks(DatasetConfig(size=1), seed=0, **broken)
    with pytest.raises(ValueError, match=r"options.python='/no/python'"):
        tasks(DatasetConfig(size=1), seed=0, **(options | {"python": "/no/python"}))
    with pytest.raises(ValueError, match=r"options.arg=.* has no such option"):
        tasks(DatasetConfig(size=1), seed=0, arg={}, **options)


def test_a_late_answer_is_an_error_and_the_process_ends_with_its_pipe(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGARL_JOB_TOKEN", "secret")
    args = options["args"] | {"hang": True}

    async def run() -> None:
        worker = Worker(EnvironmentConfig.read(options | {"args": args}))
        task = json.loads(WIRE.read_text())["tasks"][0]
        ids = {"base_url": "", "renderer": {}, "renderer_model_name": ""}
        asked = {"max_tokens": 1, "session": "", "temperature": 1.0}
        run = dict(task=task, client=ids, sampling=asked, model="policy", key="k")
        with pytest.raises(WorkerError, match=r"environment any: no answer to run within 0.5 s"):
            await worker.ask("run", timeout=0.5, **run)
        pid = worker.pid
        assert pid is not None and "secret" not in Path(f"/proc/{pid}/environ").read_text()
        waits = asyncio.create_task(worker.ask("run", timeout=60, **run))
        while worker.load == 0:
            await asyncio.sleep(0.01)
        os.kill(pid, 9)
        with pytest.raises(WorkerError, match=r"ended with status -9"):
            await waits
        assert len((await worker.ask("tasks", timeout=60, count=2))["tasks"]) == 2
        second = worker.pid
        assert second is not None
        await worker.close()
        assert worker.pid is None and not Path(f"/proc/{second}").exists()

    asyncio.run(run())


def test_a_time_out_does_not_count_the_turn_that_a_request_waits_for(
    options: dict[str, Any],
) -> None:
    async def run() -> None:
        config = EnvironmentConfig.read(
            options | {"args": options["args"] | {"hang": True}, "concurrent": 1}
        )
        worker = Worker(config)
        task = json.loads(WIRE.read_text())["tasks"][0]
        ids = {"base_url": "", "renderer": {}, "renderer_model_name": ""}
        asked = {"max_tokens": 1, "session": "", "temperature": 1.0}
        request = dict(task=task, client=ids, sampling=asked, model="policy", key="k")
        first = asyncio.create_task(worker.ask("run", timeout=1.0, **request))
        await asyncio.sleep(0)
        begun = asyncio.get_running_loop().time()
        second = asyncio.create_task(worker.ask("tasks", timeout=0.5, count=2))
        with pytest.raises(WorkerError, match="within 1 s"):
            await first
        assert len((await second)["tasks"]) == 2
        assert asyncio.get_running_loop().time() - begun > 0.9  # more than its own time-out
        await worker.close()

    asyncio.run(run())


def test_a_time_out_does_not_count_pauses_of_generation(options: dict[str, Any]) -> None:
    async def run() -> None:
        hangs = options | {"args": options["args"] | {"hang": True}}
        worker = Worker(EnvironmentConfig.read(hangs))
        task = json.loads(WIRE.read_text())["tasks"][0]
        await worker.ask("tasks", timeout=60, count=1)  # it serves
        clock = PauseClock()
        current_episode.set(EpisodeContext(clock=clock))
        asked = worker.ask(
            "run",
            timeout=0.5,
            task=task,
            client={"base_url": "", "renderer": {}, "renderer_model_name": ""},
            sampling={"max_tokens": 1, "session": "", "temperature": 1.0},
            model="policy",
            key="k",
        )
        waiting = asyncio.create_task(asked)
        await asyncio.sleep(0.1)
        clock.hold()
        await asyncio.sleep(1.0)
        assert not waiting.done()
        clock.release()
        with pytest.raises(WorkerError, match=r"within 0\.5 s"):
            await waiting
        await worker.close()

    asyncio.run(run())


# -- the gateway's route


def test_what_generate_refuses(tokenizer: Any) -> None:
    async def run() -> None:
        async with (
            GatewayEngine(tokenizer) as engine,
            engine.session(GCONFIG, tokenizer) as session,
            httpx.AsyncClient(base_url=engine.gateway.address, timeout=20) as http,
        ):
            key = {"Authorization": f"Bearer {session.worker_key}"}

            async def ask(ids: Any, headers: Any = key, **params: Any) -> httpx.Response:
                body = {"token_ids": ids, "sampling_params": params, "cache_salt": "v1"}
                return await http.post("/inference/v1/generate", json=body, headers=headers)

            mine = {"session": session.id}
            for answer, status, words in (
                (await ask([3], {}, **mine), 401, "not known"),
                (await ask([3]), 401, "no open session"),
                (await ask([], **mine), 400, "token_ids must be"),
                (await ask([3, True], **mine), 400, "token_ids must be"),
                (await ask([3, 130], **mine), 400, "130"),
                (await ask([3], stop_token_ids=[1 << 30], **mine), 400, "1073741824"),
                (await ask([3] * 256, **mine), 400, "maximum context length is 256"),
                (await ask([3], max_tokens=0, **mine), 400, "max_tokens=0"),
            ):
                assert answer.status_code == status and words in answer.text
            assert (await http.get("/v1/models")).status_code == 401
            large = await http.post("/inference/v1/generate", content=b" " * (9 << 20))
            assert large.status_code == 401  # no body of a stranger is read
            assert (await ask([3] * 250, max_tokens=99, **mine)).status_code == 200
            assert engine.asked[-1].gconfig.max_new_tokens == 6  # the room that is left
            assert engine.asked[-1].gconfig.temperature == GCONFIG.temperature
            engine.fails = 1
            assert (await ask([3], **mine)).status_code == 502
            assert session.failures == ["RuntimeError: no server is left"]

    asyncio.run(run())


def test_routes_go_to_clients_that_are_no_workers() -> None:
    response = answer([1, 2], [3], -0.5)
    asked = TokenRequest.read({"token_ids": [1, 2], "sampling_params": {}}, trace="")
    assert "routed_experts" not in asked.answer("a", response)["choices"][0]
    response.routed_experts = torch.tensor([[[0, 2]], [[1, 3]]], dtype=torch.int16)
    found = asked.answer("a", response)["choices"][0]["routed_experts"]
    assert next(iter(found)) == "data" and base64.b64decode(found["data"]) == bytes([0, 2, 1, 3])
    assert (found["shape"], found["dtype"], found["start"]) == ([2, 1, 2], "uint8", 0)
    body = {"token_ids": [1, 2], "sampling_params": {"routed_experts_prompt_start": 1}}
    later = TokenRequest.read(body, trace="").answer("a", response)["choices"][0]
    assert base64.b64decode(later["routed_experts"]["data"]) == bytes([1, 3])
    response.routes_from = 1
    assert "routed_experts" not in asked.answer("a", response)["choices"][0]
    response.routes_from = 0
    body["sampling_params"] = {"session": "s"}
    ours = TokenRequest.read(body, trace="").answer("a", response)["choices"][0]
    response.routed_experts[0] = -1
    assert "routed_experts" not in ours
    assert "routed_experts" not in asked.answer("a", response)["choices"][0]


# -- traces against what was recorded


def answer(prompt: list[int], ids: list[int], logprob: float) -> ModelResponse:
    return ModelResponse(
        input_tokens=prompt,
        output_tokens=ids,
        output_logprobs=[logprob] * len(ids),
        output_versions=[3] * len(ids),
        stop_reason="stop",
    )


def sample(ids: list[int], mask: list[int], *logprobs: float) -> dict[str, Any]:
    values = iter(logprobs)
    return {"token_ids": ids, "mask": mask, "logprobs": [next(values) if m else 0.0 for m in mask]}


def test_branches_share_turns_and_what_is_not_trained_is_left_out() -> None:
    recorded = Trajectory()
    asked = recorded.read([1, 2])
    first = recorded.wrote(answer([1, 2], [3, 4], -0.5), after=asked)
    recorded.wrote(answer([1, 2], [3, 4], -0.75), after=asked)  # an attempt that got lost
    left = recorded.read([5], after=first)
    recorded.wrote(answer([1, 2, 3, 4, 5], [6], -1.0), after=left)
    right = recorded.read([7], after=first)
    recorded.wrote(answer([1, 2, 3, 4, 7], [6], -2.0), after=right)
    trace = {
        "id": "t",
        "samples": [
            sample([1, 2, 3, 4, 5, 6, 9], [0, 0, 1, 1, 0, 1, 0], -0.5, -0.5, -1.0),
            sample([1, 2, 3, 4, 7, 6], [0, 0, 0, 0, 0, 1], -2.0),
        ],
    }
    kept, dropped = trained_part(recorded, trace)
    rows = [[(t.tokens, trained) for t, trained in row[1:]] for row in kept.rows()]
    assert rows == [
        [([1, 2], False), ([3, 4], True), ([5], False), ([6], True)],
        [([1, 2], False), ([3, 4], False), ([7], False), ([6], True)],
    ]
    assert dropped == 1


@pytest.mark.parametrize(
    "wrong",
    [
        sample([1, 2, 3, 4], [0, 0, 1, 1], -0.5, -0.25),  # another logprob
        sample([1, 2, 3, 8], [0, 0, 1, 1], -0.5, -0.5),  # another token
        sample([1, 9, 3, 4], [0, 0, 1, 1], -0.5, -0.5),  # another prompt
        sample([1, 2, 3, 4], [0, 0, 0, 1], -0.5),  # half of an answer
        sample([1, 2, 3, 4], [0, 1, 1, 1], 0.0, -0.5, -0.5),  # the prompt
        sample([1, 2, 3, 4, 5], [0, 0, 1, 1, 1], -0.5, -0.5, 0.0),  # what came after
    ],
)
def test_a_sample_that_differs_is_refused(wrong: dict[str, Any]) -> None:
    recorded = Trajectory()
    recorded.read([1, 2])
    recorded.wrote(answer([1, 2], [3, 4], -0.5))
    with pytest.raises(NotRecorded, match="trace t: sample 0"):
        trained_part(recorded, {"id": "t", "samples": [wrong]})
