"""A GPU's memory as text: another process maps it, as colocated servers do."""

from __future__ import annotations

import pytest
import torch

from tests.unit.test_colocated import check_shared


@pytest.mark.parametrize("flattened", (True, False))
def test_another_process_reads_and_writes_the_same_memory(flattened: bool) -> None:
    check_shared(torch.device("cuda", 0), flattened)
