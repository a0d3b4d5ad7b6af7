"""Micro-batches that a thread makes ready while others run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megarl.api.batch import Batch
from megarl.engine.micro_batch import MicroBatch, ahead, build
from megarl.parallel import worlds
from megarl.parallel.packing import Alignment

CUT = [[0, 3], [2], [1], [4]]


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def batch() -> Batch:
    ids = torch.arange(20).view(5, 4)
    mask = torch.arange(4)[None] < torch.tensor([4, 2, 3, 1, 4])[:, None]
    return Batch.from_padded({"input_ids": ids * mask, "attention_mask": mask, "w": ids[:, 0]})


def whole(mb: MicroBatch) -> list[list[int]]:
    return [mb.rows, *(getattr(mb.packed, name).tolist() for name in ("input_ids", "token"))]


def test_micro_batches_come_in_order_with_one_made_ready_meanwhile(thread) -> None:
    of, seen = batch(), []
    plan = build(of, CUT, Alignment())
    assert not of.packed, "nothing is packed before it is asked for"
    for i, mb in enumerate(ahead(plan, thread, ["input_ids", "w"])):
        thread.submit(int).result()  # what was asked of the thread is done
        assert len(of.packed) == min(i + 2, len(CUT))
        assert mb.fields["w"].tolist() == of["w"][CUT[i]].tolist()
        assert mb.length == len(mb.packed.input_ids) == sum(of.lengths[CUT[i]].tolist())
        seen.append(whole(mb))
    assert seen == [whole(mb) for mb in build(batch(), CUT, Alignment())]


def test_chunks_of_a_pipeline_ask_in_their_own_order(thread) -> None:
    plan = build(batch(), CUT, Alignment())
    first, second = (ahead(plan, thread) for _ in range(2))
    order = [first, first, second, second, first, first, second, second]
    seen = [next(chunk).rows for chunk in order]
    assert seen == [*CUT[:2], *CUT[:2], *CUT[2:], *CUT[2:]]


def test_what_goes_wrong_in_the_thread_is_the_error_of_who_asks(thread) -> None:
    of = batch()
    coming = ahead(build(of, CUT, Alignment()), thread)
    assert next(coming).rows == CUT[0]
    thread.submit(int).result()
    of.pop("input_ids")
    assert next(coming).rows == CUT[1], "it was ready"
    with pytest.raises(KeyError, match="input_ids"):
        next(coming)


def test_fields_that_are_on_the_device_stay_there(thread, monkeypatch) -> None:
    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device.type == "cpu", "only dense CPU tensors can be pinned"
        return tensor

    of = batch()
    of["w"] = of["w"].to("meta")
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(worlds, "on_cuda", lambda: True)
    monkeypatch.setattr(worlds, "device", lambda: torch.device("meta"))
    plan = build(of, CUT, Alignment())
    assert all(mb.fields["w"].is_meta for mb in ahead(plan, thread, ["w"]))


def test_only_what_runs_is_on_the_device(thread, monkeypatch) -> None:
    plan = build(batch(), CUT, Alignment())
    monkeypatch.setattr(worlds, "on_cuda", lambda: True)
    monkeypatch.setattr(worlds, "device", lambda: torch.device("meta"))
    for mb, on_host in zip(ahead(plan, thread, ["w"]), plan, strict=True):
        assert mb.packed.token.is_meta and mb.fields["w"].is_meta
        assert mb.packed is mb.packed, "copied once"
        assert not on_host.packed.token.is_meta
