"""Patches of megatron-core that another version of torch than CI's needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.parallel.mcore import maybe_nothing


@contextmanager
def of_torch_2_6(group: Any, async_ops: bool = False) -> Iterator[list[str]]:
    """Ends as torch.distributed._coalescing_manager did."""
    ops: list[str] = []
    yield ops
    if ops:
        work = ops[0]
    ops.append(work)


def test_a_group_of_one_rank_may_have_nothing_to_coalesce() -> None:
    manager = maybe_nothing(of_torch_2_6)
    alone, pair = (SimpleNamespace(size=lambda n=n: n) for n in (1, 2))
    with manager(alone, async_ops=True) as handle:
        pass
    assert handle == []
    with manager(pair) as handle:
        handle.append("all_reduce")
    assert handle == ["all_reduce"] * 2
    with pytest.raises(UnboundLocalError), manager(pair):
        pass
    with pytest.raises(RuntimeError, match="inside"), manager(alone):
        raise RuntimeError("inside")
