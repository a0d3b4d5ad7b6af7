"""Agents of unmodified frameworks and clients through the gateway to a real embedded server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import agents
import openai
import pytest
import torch

from examples.tiny_model import make_model
from megarl.api.inference import InferenceEngine
from megarl.api.records import ModelRequest, ModelResponse
from megarl.config.rollout import (
    GenerationHyperparameters,
    RolloutConfig,
    ServerConfig,
)
from megarl.rollout.local import SGLangEngine
from megarl.rollout.workflows.agent import AgentWorkflow
from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer
from tests.unit.test_gateway import TEMPLATE

HERE = str(Path(__file__).resolve())
ROOT = Path(__file__).parents[2]
# one token in three ends an answer: a framework takes one that a bound cut short for an error
GCONFIG = GenerationHyperparameters(
    n_samples=3, max_new_tokens=60, stop_token_ids=list(range(3, 130, 3))
)


def often_calls(text: str, tools: Any) -> tuple[str, list[tuple[str, str]]]:
    """Reads a call of the tool out of three answers in four, in a form the template changes."""
    if len(text) % 4 == 0:
        return text, []
    return f" {text[:4]} ", [("look", json.dumps({"what": text[4:8]}, indent=1))]


@agents.function_tool
def look(what: str) -> str:
    """Looks."""
    return f"saw {len(what)}"


class Recorded(SGLangEngine):
    """Keeps all that the server wrote."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.wrote: list[ModelResponse] = []

    async def agenerate_many(self, reqs: Sequence[ModelRequest]) -> list[ModelResponse]:
        answers = await super().agenerate_many(reqs)
        self.wrote += answers
        return answers


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "qwen3", layers=2, seed=0, max_position_embeddings=1024)
    found = save_tokenizer(path)
    found.name_or_path = str(path)
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="module")
def engine(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    rollout = RolloutConfig(
        request_timeout=60,
        setup_timeout=30,
        episode_timeout=120,
        gateway={"call_format": f"{HERE}:often_calls"},
    )
    server = ServerConfig(context_length=1024, max_running_requests=16, threads=1)
    client = Recorded(
        rollout,
        server,
        model_path=tokenizer.name_or_path,
        dtype="float32",
        log_dir=tmp_path_factory.mktemp("logs"),
    )
    client.initialize()
    yield client
    client.destroy()


def framework_agent(api: str) -> Any:
    """An agent of the openai-agents package, as its users write them."""

    async def run(data: dict[str, Any], base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            kind = agents.OpenAIChatCompletionsModel
            if api == "responses":
                kind = agents.OpenAIResponsesModel  # type: ignore[assignment]
            agent = agents.Agent(
                name="looker",
                instructions="Look around.",
                tools=[look],
                model=kind(model="policy", openai_client=client),
            )
            try:
                await agents.Runner.run(agent, data["prompt"], max_turns=5)
            except agents.MaxTurnsExceeded:
                return 0.5
            return 1.0

    return run


def rows(batch: Any) -> list[dict[str, torch.Tensor]]:
    n = len(batch["input_ids"])
    return [{k: batch[k][i] for k in ("input_ids", "loss_mask", "logprobs")} for i in range(n)]


@contextmanager
def pauses(engine: Recorded) -> Iterator[None]:
    """Pauses generation and resumes it, again and again."""
    ended = threading.Event()

    def pause() -> None:
        while not ended.wait(0.05):
            engine.pause()
            engine.resume()

    pausing = threading.Thread(target=pause)
    pausing.start()
    try:
        yield
    finally:
        ended.set()
        pausing.join(60)


def check_exact(batch: Any, wrote: Sequence[ModelResponse]) -> None:
    """Every sampled token is trained once, after its own prompt, with its own logprob."""
    assert int(batch["loss_mask"].sum()) == sum(w.output_len for w in wrote)
    for answer in wrote:
        whole = [*answer.input_tokens, *answer.output_tokens]
        part = slice(answer.input_len, len(whole))
        logprobs = torch.tensor(answer.output_logprobs)
        assert any(
            row["input_ids"][: len(whole)].tolist() == whole
            and bool(row["loss_mask"][part].all())
            and row["logprobs"][part].equal(logprobs)
            for row in rows(batch)
        )


def episodes(engine: Recorded, tokenizer: Any, agent: Any, n: int = 3) -> Any:
    engine.wrote.clear()
    agents.set_tracing_disabled(True)
    workflow = AgentWorkflow(never, GCONFIG, tokenizer, agent=agent)
    return engine.executor.rollout_batch([{"prompt": f"go {i}"} for i in range(n)], workflow)


def never(*args: Any, **kw: Any) -> float:
    raise AssertionError("the agent gives the reward")


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_framework_trains_on_what_was_sampled(engine: Recorded, tokenizer: Any, api: str) -> None:
    batch = episodes(engine, tokenizer, framework_agent(api))
    assert len(engine.wrote) > 9 and len(batch["input_ids"]) == 9  # one row for each rollout
    check_exact(batch, engine.wrote)
    assert set(batch["rewards"].tolist()) <= {0.5, 1.0}


def test_turns_that_a_pause_cuts_short_go_on(engine: Recorded, tokenizer: Any) -> None:
    with pauses(engine):
        batch = episodes(engine, tokenizer, framework_agent("chat"))
    assert len(batch["input_ids"]) == 9
    check_exact(batch, engine.wrote)


def test_an_agent_that_fails_is_not_trained_and_the_others_are(
    engine: Recorded, tokenizer: Any
) -> None:
    tries: list[str] = []

    def blocking_agent(data: dict[str, Any], base_url: str, api_key: str) -> float:
        """Uses the synchronous client, in a thread; on the second row the second run fails, and the
        fourth, in its place."""
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            messages: list[Any] = [{"role": "user", "content": data["prompt"]}]
            client.chat.completions.create(model="policy", messages=messages)
            tries.append(data["prompt"])
            if data["prompt"] == "go 1" and tries.count("go 1") in (2, 4):
                raise RuntimeError("the environment broke")
        return 1.0

    batch = episodes(engine, tokenizer, blocking_agent)
    assert len(tries) == 10  # one was made anew
    assert batch["group_ids"].tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert batch["rewards"].tolist() == [1.0] * 8
    trained = sum(len(row["loss_mask"].nonzero()) for row in rows(batch))
    assert trained < sum(w.output_len for w in engine.wrote)


def test_a_session_is_three_lines_of_a_workflow(engine: Recorded, tokenizer: Any) -> None:
    async def run(engine: InferenceEngine) -> Any:
        async with engine.session(GCONFIG, tokenizer) as s:
            await framework_agent("chat")({"prompt": "go"}, s.base_url, s.api_key)
        return s.trajectory

    trajectory = asyncio.run(run(engine))
    assert trajectory.answers and trajectory.forks == 0


def test_grpo_trains_an_agent_of_the_openai_client(tmp_path: Path) -> None:
    make_model(tmp_path / "model", hidden=64, layers=2)
    command = [sys.executable, "-m", "megarl.launcher.local"]
    command += ["--config", "configs/quickstart_grpo.yaml", f"actor.path={tmp_path / 'model'}"]
    command += [f"fileroot={tmp_path}", "experiment_name=e", "total_train_steps=2"]
    command += ["train_dataset.batch_size=4", "train_dataset.size=16", "gconfig.n_samples=4"]
    command += ["rollout.workflow=megarl.rollout.workflows.agent:AgentWorkflow"]
    command += ["rollout.workflow.options.agent=examples.openai_agent:solve"]
    command += ["valid_dataset.size=4", "recover.mode=disabled", "actor.parallel.tp=1"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout
    run = tmp_path / "e" / "grpo"
    stats = [json.loads(line) for line in (run / "stats.jsonl").read_text().splitlines()]
    trained = [s for s in stats if s["step"] > 0]
    assert len(trained) == 2
    for step in trained:  # what the gateway recorded is what the trainer computes
        assert step["train_rollout_logprob_abs_diff/max"] < 1e-4
    summary = json.loads((run / "summary.json").read_text())
    assert summary["samples_trained"] == 32
