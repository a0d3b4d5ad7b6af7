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
from megarl.weight_sync.buffers import BucketBuffers
from megarl.weight_sync.phases import Phases
from megarl.weight_sync.plan import SyncPlan, plan_sync
from megarl.weight_sync.servers import Deadline
from megarl.weight_sync.transports.distributed import GroupStream
from megarl.wire.buckets import Bucket
from tests.tiny import save_tiny

CPU = torch.device("cpu")


class Gatherer:
    """Fills a bucket with its number."""

    device, message_bytes = CPU, 0

    def __init__(self, plan: SyncPlan, rank: int, log: list[str]) -> None:
        self.plan, self.rank, self.log = plan, rank, log

    def lying(self, _: Bucket) -> None: ...

    def gather(self, bucket: Bucket, out: torch.Tensor | None, **_: Any) -> torch.Tensor | None:
        if self.plan.senders[bucket.index] != self.rank:
            return None
        assert out is not None
        self.log.append(f"gather {bucket.index}")
        return out[: bucket.nbytes].fill_(bucket.index)


class Channel:
    """What is sent arrives when it is waited for, as late as it may."""

    group_name = "group"

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def deliver(self, what: str, tensors: list[torch.Tensor], *_: Any) -> Any:
        index = int(tensors[0][0])
        self.log.append(f"send {index}")
        ours: Future[float] = Future()
        ours.set_result(time.monotonic())

        def wait(_: Deadline) -> None:
            assert bool((tensors[0] == index).all()), f"bucket {index} was overwritten on its way"
            self.log.append(f"answer {index}")

        return SimpleNamespace(wait=wait, ours=ours, answered=time.monotonic, begun=0.0)


def streams(plan: SyncPlan, log: list[str]) -> list[GroupStream]:
    """One of each rank."""
    out = []
    for rank in range(plan.table.layout.world_size):
        alone: Any = SimpleNamespace(rank=rank, size=1, together=lambda fn, *args: fn(*args))
        buffers = {sender: BucketBuffers(alone, sender, CPU) for sender in plan.sizes}
        for sender, nbytes in plan.sizes.items():
            buffers[sender].take(nbytes)
        stream = GroupStream(
            source=cast(Any, SimpleNamespace(rank=rank, agreement=alone)), plan=plan,
            gatherer=cast(Any, Gatherer(plan, rank, log)), buffers=buffers,
            channel=cast(Any, Channel(log)) if rank in plan.sizes else None, verifier=None,
            changes=None, meta=WeightUpdateMeta(type="distributed", version=1),
            deadline=Deadline(60), phases=Phases(),
        )  # fmt: skip
        out.append(stream)
    return out


@pytest.mark.parametrize("owners", ([0], [0, 2], [3, 1, 2]))
@pytest.mark.parametrize("reverse", (False, True), ids=("ranks", "ranks-reversed"))
def test_a_bucket_follows_the_one_before_and_no_third_is_under_way(
    owners: list[int], reverse: bool, tmp_path: Path
) -> None:
    model = read_hf_config(save_tiny(tmp_path, "llama", layers=2))
    plan = plan_sync(build_piece_table(model, Layout(pp=2, dp=2)), torch.bfloat16, 9_000, owners)
    n, log = len(plan.buckets), list[str]()
    ranks = streams(plan, log)
    for k in range(n):  # ranks are in one step at a time, in whichever order
        for stream in ranks[:: -1 if reverse else 1]:
            stream.step(k)
    for stream in ranks[:: -1 if reverse else 1]:
        stream.finish()
    assert n > 8 and set(plan.senders) == set(owners)
    at = {line: i for i, line in enumerate(log)}
    assert len(at) == len(log) == 3 * n
    assert sum(s.counts["bytes"] for s in ranks) == plan.nbytes
    for k in range(n - 1):
        assert at[f"send {k}"] < at[f"send {k + 1}"] and at[f"answer {k}"] < at[f"answer {k + 1}"]
        # the next one is gathered, and begun by the same sender, while one is under way; but the
        # version arrives with the last one, after all others
        follows = plan.senders[k] == plan.senders[k + 1] and k < n - 2
        assert follows == (at[f"send {k + 1}"] < at[f"answer {k}"])
        if len(owners) == 1:
            assert at[f"send {k}"] < at[f"gather {k + 1}"] < at[f"answer {k}"]
    for k in range(n - 2):
        assert at[f"answer {k}"] < at[f"send {k + 2}"]
