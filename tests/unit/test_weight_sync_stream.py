"""The order of one sync's steps, and whether a bucket stays as it is until servers answered."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megarl.api.records import WeightUpdateMeta
from megarl.models.hf_config import read_hf_config
from megarl.models.piece_table import build_piece_table
from megarl.parallel.layout import Layout
from megarl.weight_sync.broadcast import GroupStream
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import SyncPlan, plan_sync
from megarl.weight_sync.servers import Deadline
from megarl.wire.buckets import Bucket
from tests.tiny import save_tiny


class Gatherer:
    """Fills a bucket with its number."""

    message_bytes = 0

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def gather(self, bucket: Bucket, out: torch.Tensor | None, **_: Any) -> torch.Tensor | None:
        if out is None:
            return None
        self.log.append(f"gather {bucket.index}")
        return out[: bucket.nbytes].fill_(bucket.index)


class Channel:
    """What is sent arrives when it is waited for, as late as it may."""

    group_name = "group"

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def deliver(self, what: str, flat: torch.Tensor, body: Any, *_: Any) -> Any:
        index = int(flat[0])
        self.log.append(f"send {index}" + " and version" * ("weight_version" in body))
        ours: Future[float] = Future()
        ours.set_result(time.monotonic())

        def wait(_: Deadline) -> None:
            assert bool((flat == index).all()), f"bucket {index} was overwritten on its way"
            self.log.append(f"answer {index}")

        return SimpleNamespace(wait=wait, ours=ours, answered=time.monotonic, begun=0.0)


def stream(plan: SyncPlan, log: list[str], *, sends: bool) -> GroupStream:
    alone: Any = SimpleNamespace(together=lambda fn, *args: fn(*args))
    source = SimpleNamespace(
        ranks=alone, sender=0, table=SimpleNamespace(tensors=()), device=torch.device("cpu")
    )
    pair = [torch.empty(plan.largest, dtype=torch.uint8) for _ in range(2)]
    return GroupStream(
        source=cast(Any, source), plan=plan,
        gatherer=cast(Any, Gatherer(log)), pair=pair if sends else [],
        channel=cast(Any, Channel(log)) if sends else None,
        meta=WeightUpdateMeta(type="distributed", version=1, verify="off"), deadline=Deadline(60),
        phases=Phases(),
    )  # fmt: skip


@pytest.fixture
def plan(tmp_path: Path) -> SyncPlan:
    model = read_hf_config(save_tiny(tmp_path, "llama", layers=2))
    return plan_sync(build_piece_table(model, Layout(pp=2, dp=2)), torch.bfloat16, 9_000)


def test_a_bucket_follows_when_the_one_before_is_answered_for(plan: SyncPlan) -> None:
    """It is gathered meanwhile, and the version arrives with the last."""
    n, log = len(plan.buckets), list[str]()
    sender = stream(plan, log, sends=True)
    sender.run({})
    want = ["gather 0", "send 0"]
    for k in range(1, n):
        want += [f"gather {k}", f"answer {k - 1}", f"send {k}"]
    want[-1] += " and version"
    assert n > 8 and log == [*want, f"answer {n - 1}"]
    assert sender.nbytes == plan.nbytes


def test_a_rank_that_does_not_send_only_gathers(plan: SyncPlan) -> None:
    log: list[str] = []
    other = stream(plan, log, sends=False)
    other.run({})
    assert not log and not other.nbytes
