"""The kernels of the LM head, compiled, against fp64 and against torch on the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests import head_kernels as cases


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize(("tp", "spare"), [(1, 0), (2, 1), (3, 0), (4, 1)])
@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_values_and_gradients_equal_the_dense_formulas(
    dtype: torch.dtype, tp: int, spare: int, temperature: float
) -> None:
    cases.values_and_gradients("cuda", dtype, temperature, tp, spare)


@pytest.mark.parametrize("what", cases.OF_A_CHUNK, ids=lambda fn: fn.__name__)
def test_of_a_chunk(what: Callable[[str], None]) -> None:
    what("cuda")
