"""Learning rates by closed forms, over an optimizer that is nothing but its parameter groups."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from megarl.api.records import FinetuneSpec
from megarl.config.engine import OptimizerConfig
from megarl.engine.optimizer import build_schedule, current_lr, set_position

LR, LEAST = 0.5, 0.1  # the peak, and the end as a fraction of it
FALL = {"linear": lambda x: 1 - x, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2}


def schedule(kind: str, n: int, warmup: float):
    """The optimizer, and its schedule of `n` steps."""
    optimizer = SimpleNamespace(param_groups=[{"lr": -1.0}])
    cfg = OptimizerConfig(
        lr=LR, min_lr_ratio=LEAST, lr_scheduler_type=kind,
        warmup_steps=warmup,
    )  # fmt: skip
    spec = FinetuneSpec(total_train_epochs=1, dataset_size=n, train_batch_size=1)
    return optimizer, build_schedule(cfg, optimizer, spec)


def rates(kind: str, n: int, warmup: float, *, resume_at: int | None = None) -> list[float]:
    """The rates of steps 0..n (n is one after the last), from a new schedule set to `resume_at`."""
    optimizer, plan = schedule(kind, n, warmup)
    found = []
    for step in range(n + 1):
        if step == resume_at:
            position = plan.num_steps
            optimizer, plan = schedule(kind, n, warmup)
            set_position(plan, position)
        found.append(current_lr(optimizer))
        plan.step(1)
    return found


def closed_form(kind: str, n: int, w: int) -> list[float]:
    """w steps up, the last of them at LR; then down, to LEAST * LR at step n."""
    top = max(w, 1) - 1  # the step at the peak
    up = [LR * (k + 1) / w for k in range(top)]
    down = [FALL[kind]((k - top) / (n - top)) for k in range(top, n + 1)]
    return up + [LR * (LEAST + (1 - LEAST) * x) for x in down]


@pytest.mark.parametrize("kind", FALL)
@pytest.mark.parametrize("n, w", [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (5, 0), (5, 2), (5, 5)])
def test_the_peak_is_reached_and_the_fall_ends_at_the_run_s_end(kind, n, w):
    want = closed_form(kind, n, w)
    assert want[max(w, 1) - 1] == LR
    for warmup in {w, w / n if w < n else w}:  # in steps, and as a fraction
        assert rates(kind, n, warmup) == pytest.approx(want)
    for step in range(1, n + 1):
        assert rates(kind, n, w, resume_at=step) == pytest.approx(want)


def test_a_warm_up_that_is_longer_than_the_run_does_not_become_steeper():
    rising = [LR * (k + 1) / 10 for k in range(6)]
    for kind in ("constant", *FALL):
        assert rates(kind, 5, 10) == pytest.approx(rising)


def test_a_warm_up_in_steps_needs_no_length():
    optimizer = SimpleNamespace(param_groups=[{"lr": -1.0}])
    plan = build_schedule(OptimizerConfig(lr=LR, warmup_steps=4), optimizer, None)
    found = []
    for _ in range(6):
        found.append(current_lr(optimizer))
        plan.step(1)
    assert found == pytest.approx([LR / 4, LR / 2, 3 * LR / 4, LR, LR, LR])


def test_a_constant_rate_needs_no_length():
    optimizer = SimpleNamespace(param_groups=[{"lr": -1.0}])
    plan = build_schedule(OptimizerConfig(lr=LR), optimizer, None)
    for _ in range(3):
        assert current_lr(optimizer) == LR
        plan.step(1)
    with pytest.raises(ValueError, match="lr_scheduler_type='linear' needs to know the run's"):
        build_schedule(OptimizerConfig(lr_scheduler_type="linear"), optimizer, None)


def test_the_rest_of_an_epoch_is_a_step_unless_it_is_dropped():
    def steps(drop_last: bool, rows: int = 10, **kw: int) -> int:
        spec = FinetuneSpec(
            total_train_epochs=3, dataset_size=rows, train_batch_size=4, drop_last=drop_last, **kw
        )
        return spec.total_train_steps

    assert (steps(True), steps(False), steps(True, 8), steps(False, 8)) == (6, 9, 6, 6)
    assert steps(False, 1) == steps(True, 1) == 3 and steps(False, max_steps=7) == 7
