"""Fixtures of several files of unit tests; each imports what it needs, which takes seconds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.tiny_tokenizer import save_tokenizer

    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The warnings of megarl's loggers, which do not propagate to the root."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megarl")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


@pytest.fixture
def servers() -> Iterator[list[Any]]:
    """Two doubles of SGLang's server."""
    from tests.unit.rollout_fakes import FakeServer

    made = [FakeServer(), FakeServer()]
    yield made
    for server in made:
        server.close()
