"""Tests of this folder need a GPU: run for their own sake without one they are an error."""

from __future__ import annotations

import os
from pathlib import Path

# Transformer Engine's products of fp32 are TF32 whatever torch is told, unless NVIDIA's libraries
# are told before CUDA starts: exact to 1e-3 at best, where these tests compare to 1e-4.
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU a run over more than this folder goes on without it, and counts it as
    deselected; a run over this folder alone (`make test-gpu`) ends here."""
    mine = [item for item in items if HERE in item.path.parents]
    if torch.cuda.is_available() or not mine:
        return
    if len(mine) == len(items):
        raise pytest.UsageError(
            f"tests/gpu needs a CUDA device, and torch {torch.__version__} sees none; "
            "`make test` is the CPU suite"
        )
    config.hook.pytest_deselected(items=mine)
    items[:] = [item for item in items if item not in mine]


@pytest.fixture(autouse=True, scope="session")
def exact_matrix_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
