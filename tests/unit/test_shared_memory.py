"""Memory that ranks on one host share."""

from __future__ import annotations

import dataclasses
import os

import pytest

from megarl.wire.shared_memory import attach, offer


def test_whoever_attaches_sees_the_same_bytes_until_the_last_lets_go() -> None:
    offered = offer(1000)
    assert offered is not None
    one, two = attach(offered), attach(offered)
    os.close(offered.fd)
    assert one is not None and two is not None and one.numel() == two.numel() == 1000
    one[999] = 7
    del one
    assert two[999] == 7


@pytest.mark.parametrize(
    "change", ({"machine": "other"}, {"fd": 10**6}, {"inode": (0, 0)}, {"pid": 2**22 + 1})
)
def test_memory_of_others_is_not_taken_for_it(change: dict[str, object]) -> None:
    offered = offer(1000)
    assert offered is not None
    try:
        assert attach(dataclasses.replace(offered, **change)) is None  # type: ignore[arg-type]
    finally:
        os.close(offered.fd)
