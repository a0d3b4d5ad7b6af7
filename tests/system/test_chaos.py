"""A run that is hit again and again, by faults of every kind, ends as if nothing had been.

CHAOS_SEED in the environment gives the order and the moments of the faults; without it they are new
each time, and the seed is printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.cli.status import status
from tests.system.chaos import Chaos
from tests.system.test_recover import GRPO, Run
from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer

BATCH = 4
COMMON = [
    "experiment_name=e", "trial_name=t", "total_train_epochs=1000", "train_dataset.size=12",
    f"train_dataset.batch_size={BATCH}", "train_dataset.options.level=1", "valid_dataset=null",
    "recover.freq_steps=1", "recover.restarts=1000", "server.restarts=1000", "server.count=2",
    "recover.answers_secs=0.5", "recover.grace=20", "stats_logger.table=false",
    "stats_logger.report=false", "collective_timeout=30", "rollout.request_timeout=10",
    "weight_sync.server_timeout=5", "rollout.reward_workers=2", "actor.parallel.tp=2",
    # a rank 0 that is stopped is waited for as long as all of these
    "weight_sync.timeout=15", "rollout.episode_timeout=30", "rollout.setup_timeout=30",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny(tmp_path_factory.mktemp("model"), "qwen3", layers=2)
    save_tokenizer(path)
    return path


@pytest.fixture
def chaos(tmp_path: Path, model: Path, seed: int) -> Iterator[Any]:
    made: list[Chaos] = []

    def make(steps: int, *keys: str) -> Chaos:
        command = (*GRPO, *COMMON, f"actor.path={model}", *keys)
        made.append(Chaos(tmp_path, command, steps=steps, seed=seed))
        return made[-1]

    yield make
    for one in made:
        one.close()
        print(list(zip(one.struck, one.states, strict=True)))


def check_books(run: Chaos) -> None:
    """Every step was made, every episode was trained once, and `megarl status` knows."""
    rows, steps = run.stats(), run.steps
    assert [r["step"] for r in rows if r["step"]] == list(range(1, steps + 1))
    last = rows[-1]
    ended = ("running", "accepted", "rejected", "failed", "dropped")
    assert last["rollout/submitted"] == sum(last[f"rollout/{name}"] for name in ended)
    assert last["rollout/trained"] == last["rollout/handed_out"] == BATCH * steps
    assert last["rollout/trained_samples"] == 4 * BATCH * steps
    batches = run.batches()
    assert sorted(batches) == list(range(steps))
    trained = [e for step in range(steps) for e in dict.fromkeys(batches[step])]
    assert len(set(trained)) == len(trained) == BATCH * steps
    found = status(run.run_dir)
    assert (found["state"], found["step"], found["last_error"]) == ("finished", steps, None)
    assert "finished" not in run.states


# in CI each test has its share; SIGTERM and a trainer that stops for good have tests of their own
HALF = {
    "sync": [
        "kill trainer 0", "kill the launcher", "kill a server", "stop a server for long",
        "kill a reward worker", "stop a trainer for a moment", "a slow disk",
    ],
    "async": [
        "kill trainer 1", "kill everything", "stop a server for a moment",
        "stop the launcher for a moment",
    ],
}  # fmt: skip
SECONDS = [
    pytest.param(0.0, marks=pytest.mark.timeout(900)),
    pytest.param(300.0, marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
]


@pytest.mark.parametrize("seconds", SECONDS)
def test_a_synchronous_run_ends_bitwise_as_if_nothing_had_been(
    chaos: Any, tmp_path: Path, seconds: float
) -> None:
    run = chaos(24 if not seconds else 300)
    run.survive(list(run.faults) if seconds else HALF["sync"], seconds=seconds)
    check_books(run)
    whole = Run(tmp_path / "whole", run.command)
    whole.root.mkdir()
    whole.finish()
    ended = Run(run.root, ())
    after, expected = ended.weights(), whole.weights()
    assert after.keys() == expected.keys()
    assert all(torch.equal(after[k], expected[k]) for k in expected)
    assert ended.figures() == whole.figures()
    assert not ended.leftovers()


@pytest.mark.parametrize("seconds", SECONDS)
def test_an_asynchronous_run_keeps_exact_books(chaos: Any, seconds: float) -> None:
    run = chaos(24 if not seconds else 300, "rollout.max_head_offpolicyness=2")
    run.survive(list(run.faults) if seconds else HALF["async"], seconds=seconds)
    check_books(run)
    assert max(r["staleness/max"] for r in run.stats() if r["step"]) <= 2
