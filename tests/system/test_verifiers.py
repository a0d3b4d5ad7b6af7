"""Environments of the verifiers package, unchanged and in their own interpreter (`make test-all`):
what is trained is what the server sampled, to the bit, and failures are no rewards."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.dataset import DatasetConfig
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig, ServerConfig
from megarl.rollout.environments.verifiers import VerifiersWorkflow, tasks
from tests.system.test_agents import Recorded, check_exact, never, pauses
from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.full
TASKSETS = Path(__file__).parent.parent / "environments"
HOT = GenerationHyperparameters(n_samples=2, max_new_tokens=6, temperature=8.0)
DEFAULT = {"name": "default"}


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("MEGARL_VERIFIERS_PYTHON", "")
    if not found:
        pytest.fail("MEGARL_VERIFIERS_PYTHON names no interpreter: run by `make test-all`")
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path, "qwen3", layers=2, seed=0, max_position_embeddings=4096)
    found = save_tokenizer(path)
    found.name_or_path = str(path)
    return found


@pytest.fixture(scope="module")
def engine(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    server = ServerConfig(context_length=4096, max_running_requests=16, threads=1)
    client = Recorded(
        RolloutConfig(request_timeout=60, setup_timeout=30, episode_timeout=300),
        server,
        model_path=tokenizer.name_or_path,
        dtype="float32",
        log_dir=tmp_path_factory.mktemp("logs"),
    )
    client.initialize()
    yield client
    client.destroy()


def episodes(
    engine: Recorded, tokenizer: Any, *, n: int = 4, gconfig: Any = HOT, **options: Any
) -> Any:
    rows = tasks(DatasetConfig(size=n), seed=0, **options)
    engine.wrote.clear()
    numbered = [{"row_id": i} | row for i, row in enumerate(rows)]
    return engine.executor.rollout_batch(numbered, VerifiersWorkflow(never, gconfig, tokenizer))


def chain(python: str, **options: Any) -> dict[str, Any]:
    return {"python": python, "id": "sum_chain", "path": [str(TASKSETS)]} | options


def test_a_line_of_turns_is_one_row_of_what_was_sampled(
    engine: Recorded, tokenizer: Any, python: str
) -> None:
    batch = episodes(engine, tokenizer, n=8, **chain(python))
    assert len(batch["input_ids"]) == 16 and len(engine.wrote) == 48
    check_exact(batch, engine.wrote)
    assert (batch["versions"][batch["loss_mask"]] == 0).all()
    assert all(w.stop_reason == "length" or w.output_tokens[-1] == 1 for w in engine.wrote)


def test_a_renderer_that_writes_history_anew_forks_and_stays_exact(
    engine: Recorded, tokenizer: Any, python: str
) -> None:
    batch = episodes(engine, tokenizer, n=8, **chain(python, renderer=DEFAULT))
    assert len(batch["input_ids"]) > 16 and len(batch["rollout_ids"].unique()) == 16
    check_exact(batch, engine.wrote)


def test_the_chat_program_of_verifiers_itself(
    engine: Recorded, tokenizer: Any, python: str
) -> None:
    batch = episodes(engine, tokenizer, n=2, **chain(python, harness="null"))
    assert len(engine.wrote) == 12
    check_exact(batch, engine.wrote)


def test_answers_that_a_pause_cuts_short_go_on(
    engine: Recorded, tokenizer: Any, python: str
) -> None:
    long = HOT.new(max_new_tokens=60, ignore_eos=True)
    with pauses(engine):
        batch = episodes(engine, tokenizer, n=2, gconfig=long, **chain(python))
    assert len(engine.wrote) == 12
    check_exact(batch, engine.wrote)


def test_an_environment_that_breaks_down_is_not_trained_and_the_others_are(
    engine: Recorded, tokenizer: Any, python: str
) -> None:
    batch = episodes(engine, tokenizer, n=3, **chain(python, env={"fail": [1]}))
    assert len(batch["input_ids"]) == 4
    assert int(batch["loss_mask"].sum()) > 0 and torch.isfinite(batch["rewards"]).all()


def test_a_worker_that_ends_amid_episodes_costs_none(
    engine: Recorded, tokenizer: Any, python: str, tmp_path: Path
) -> None:
    batch = episodes(engine, tokenizer, n=3, **chain(python, env={"die": str(tmp_path / "once")}))
    assert (tmp_path / "once").exists() and len(batch["input_ids"]) == 6


def test_a_game_of_textarena(
    engine: Recorded, tokenizer: Any, python: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Wordle, as verifiers brings it, with a word list of ours in place of a download."""
    subprocess.run([python, str(TASKSETS / "nltk_stub.py"), str(tmp_path)], check=True)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    batch = episodes(
        engine, tokenizer, n=2, python=python, id="textarena", args={"game": "Wordle-v0"}
    )
    assert len(batch["input_ids"]) == 4
    check_exact(batch, engine.wrote)
