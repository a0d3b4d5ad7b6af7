"""Marks the tests of this folder for `make test-system`, and shares a run among launchers."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.utils.env import JOB_TOKEN as JOB_TOKEN
from tests.system.cluster_run import COMMAND, ClusterRun, local_run
from tests.tiny import save_tiny
from tests.tiny_tokenizer import save_tokenizer

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.system)


@pytest.fixture(autouse=True, scope="module")
def environment_as_it_was() -> Iterator[None]:
    """Takes back the job's token that schedulers of a module's tests put into the environment:
    servers of the next module would ask for it."""
    before = os.environ.get(JOB_TOKEN)
    yield
    os.environ.pop(JOB_TOKEN, None)
    if before is not None:
        os.environ[JOB_TOKEN] = before


@pytest.fixture
def seed() -> int:
    """What the order and the moments of faults are drawn from: CHAOS_SEED, else a new one."""
    found = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(10**6))
    print(f"CHAOS_SEED={found}")
    return found


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    path = save_tiny(tmp_path_factory.mktemp("model"), "qwen3", layers=2)
    save_tokenizer(path)
    return (*COMMAND, f"actor.path={path}")


@pytest.fixture(scope="session")
def local(command: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    """The run of `command` by the local launcher, undisturbed."""
    return local_run(tmp_path_factory.mktemp("local"), command)


@pytest.fixture(scope="package", autouse=True)
def starts_are_warm(warm: None) -> None:
    """Jobs start in a tenth of the time."""
