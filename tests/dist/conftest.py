"""Fixtures of the tests over several processes."""

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
    """Returns worlds(n): the file's world of n processes, started at the first call."""
    started: dict[int, World] = {}

    def of(n: int) -> World:
        if n not in started:
            started[n] = World(n)
        return started[n]

    yield of
    for world in started.values():
        world.close()


@pytest.fixture(scope="module")
def world1(worlds: Callable[[int], World]) -> World:
    return worlds(1)


@pytest.fixture(scope="module")
def world2(worlds: Callable[[int], World]) -> World:
    return worlds(2)


@pytest.fixture(scope="module")
def world4(worlds: Callable[[int], World]) -> World:
    return worlds(4)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two processes that answer within two minutes: those of the tests of weight sync."""
    with World(2, timeout=120) as w:
        yield w


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the file's tiny models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="package", autouse=True)
def starts_are_warm(warm: None) -> None:
    """Jobs start in a tenth of the time."""
