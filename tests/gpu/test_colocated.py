"""A GPU's memory as text: another process maps it, as colocated servers do."""

from __future__ import annotations

import torch

from tests.unit.test_colocated import check_shared


def test_another_process_reads_and_writes_the_same_memory() -> None:
    check_shared(torch.device("cuda", 0))
