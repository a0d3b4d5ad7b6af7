"""What benchmarks/step_profile.py says of a trace: every microsecond of a part once, by kind."""

from __future__ import annotations

from typing import Any

from benchmarks.trace_times import BETWEEN, COLLECTIVES, OTHERS, by_part


def event(name: str, ts: float, dur: float, *, tid: int = 1, cat: str = "cpu_op") -> dict[str, Any]:
    return dict(name=name, ts=ts, dur=dur, tid=tid, cat=cat)


def test_own_times_by_kind_add_up_to_the_part() -> None:
    events = [
        event("aten::mm", 0, 5),  # before the part
        event("step", 10, 100, cat="user_annotation"),
        event("aten::linear", 20, 30),
        event("aten::addmm", 25, 20),
        event("aten::scaled_dot_product_attention", 50, 20),
        event("aten::bmm", 50, 15),  # part of attention, though a product
        event("aten::mul", 80, 10),
        event("aten::mul", 30, 40, tid=2),  # another thread's
        event("c10d::allreduce_", 105, 1),
        event("aten::view", 109, 1),  # after waiting
        event("Optimizer.step#Adam.step", 95, 10, cat="user_annotation"),
        event("aten::mul", 96, 4),
    ]
    spent = by_part(events, ["step"])["step"]
    assert spent.whole == sum(spent.kinds.values()) == sum(spent.operations.values()) == 100
    assert spent.kinds == {
        BETWEEN: 25, COLLECTIVES: 4, OTHERS: 11,
        "products with weights": 30, "attention": 20, "optimizer": 10,
    }  # fmt: skip
    assert (spent.operations["aten::mul"], spent.calls["aten::mul"]) == (14, 2)
    assert spent.operations["aten::linear"] == 10


def test_parts_of_one_trace_are_apart() -> None:
    events = [
        event("decode", start, 10, cat="user_annotation") for start in (0, 20)
    ] + [event("prefill", 10, 5, cat="user_annotation"), event("aten::mm", 11, 4)]  # fmt: skip
    found = by_part(events, ["prefill", "decode"])
    assert (found["decode"].whole, found["prefill"].whole) == (20, 5)
    assert found["prefill"].kinds["products with weights"] == 4
    assert not found["decode"].calls["aten::mm"]
