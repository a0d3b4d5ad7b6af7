"""What every file of tests over several processes asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dist.world import World, end_idle


@pytest.fixture(scope="package", autouse=True)
def no_process_outlives_the_folder() -> Iterator[None]:
    yield
    end_idle()


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int], World]]:
    """The file's world of n processes, started when it is first asked for."""
    started: dict[int, World] = {}

    def of(n: int) -> World:
        if n not in started:
            started[n] = World(n)
        return started[n]

    yield of
    for world in started.values():
        world.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the file's tiny models are saved."""
    return tmp_path_factory.mktemp("models")
