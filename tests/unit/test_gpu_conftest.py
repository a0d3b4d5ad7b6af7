"""tests/gpu without a GPU: an error when asked for by itself, left out of a larger run."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.gpu.conftest import HERE, pytest_collection_modifyitems


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def item(folder: Path) -> Any:
    return SimpleNamespace(path=folder / "test_x.py")


def test_products_of_fp32_are_fp32_also_where_torch_is_not_asked() -> None:
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"


def test_alone_they_are_an_error_that_says_why() -> None:
    with pytest.raises(pytest.UsageError, match=r"tests/gpu needs a CUDA device.*`make test`"):
        pytest_collection_modifyitems(Mock(), [item(HERE)])


def test_in_a_larger_run_they_are_deselected() -> None:
    config, here, other = Mock(), item(HERE), item(HERE.parent)
    items = [here, other]
    pytest_collection_modifyitems(config, items)
    assert items == [other]
    config.hook.pytest_deselected.assert_called_once_with(items=[here])
