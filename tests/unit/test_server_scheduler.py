"""The scheduler's thread: jobs, their order, and what its death leaves behind."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
import torch

from megarl.rollout.server.errors import ControlError, ServerError
from megarl.rollout.server.sampling_params import SamplingParams
from megarl.rollout.server.scheduler import Scheduler
from megarl.rollout.server.sequence import Report, Sequence

VOCAB = 8


class _Cache:
    def clear(self):
        pass

    def copy_rows(self, source, target, positions):
        pass

    def scrub(self, rows):
        pass


class FakeRunner:
    """Always predicts token 5. `gate` closed holds a decode step back."""

    device, vocab_size, deterministic = torch.device("cpu"), VOCAB, False

    def __init__(self, max_rows=4, max_total_tokens=1000):
        self.max_rows, self.max_total_tokens = max_rows, max_total_tokens
        self.cache, self.gate, self.broken = _Cache(), threading.Event(), False
        self.batches: list[int] = []
        self.gate.set()

    def make_room(self, seqs, *, used):
        pass

    def _logits(self, count):
        if self.broken:
            raise RuntimeError("out of memory")
        logits = torch.zeros(count, VOCAB)
        logits[:, 5] = 50.0
        return logits

    def prefill(self, seqs, first_row):
        return list(seqs), self._logits(len(seqs))

    def decode(self, seqs):
        assert self.gate.wait(10)
        self.batches.append(len(seqs))
        return self._logits(len(seqs))


class Call:
    stream = False


@pytest.fixture
def world():
    """(scheduler, runner, finish): `finish(seq)` waits until `seq` is done."""
    runner, dead = FakeRunner(), threading.Event()
    done: dict[Sequence, Future] = {}

    def notify(deliveries):
        for seq, _, finished in deliveries:
            if finished:
                done[seq].set_result(seq)

    scheduler = Scheduler(runner, None, notify=notify, on_death=dead.set)
    scheduler.dead = dead
    scheduler.start()

    def submit(count=1, tokens=5):
        seqs = [
            Sequence(
                rid=f"r{i}",
                prompt=[1, 2],
                params=SamplingParams(),
                max_new_tokens=tokens,
                stop_ids=frozenset(),
                seed=0,
                report=Report(),
                call=Call(),
                index=i,
            )
            for i in range(count)
        ]
        for s in seqs:
            done[s] = Future()
        scheduler.submit(seqs)
        return seqs

    yield scheduler, runner, submit, lambda seq: done[seq].result(10)
    runner.gate.set()
    assert scheduler.stop(10)


def test_rows_bound_the_batch_and_finished_ones_make_room(world):
    _, runner, submit, finish = world
    seqs = submit(10, tokens=3)
    assert all(len(finish(s).output) == 3 for s in seqs)
    assert max(runner.batches) == 4


def test_the_cache_bounds_the_batch(world):
    _, runner, submit, finish = world
    runner.max_total_tokens = 2 * (2 + 6)
    assert all(len(finish(s).output) == 6 for s in submit(5, tokens=6))
    assert max(runner.batches) == 2


def test_a_job_whose_caller_left_is_skipped(world):
    scheduler, runner, submit, finish = world
    runner.gate.clear()
    (seq,) = submit()
    ran = []
    left = scheduler.call_exclusive(lambda: ran.append("left"))
    stays = scheduler.call_exclusive(lambda: ran.append("stays"))
    assert left.cancel()
    runner.gate.set()
    stays.result(10)
    assert ran == ["stays"] and finish(seq).finish_reason["type"] == "length" and scheduler.alive


def test_a_refusal_answers_its_call_and_nothing_else_happens(world):
    scheduler, _, submit, finish = world

    def refuse():
        raise ControlError("no such tensor")

    with pytest.raises(ControlError, match="no such tensor"):
        scheduler.call_exclusive(refuse).result(10)
    assert len(finish(submit()[0]).output) == 5


def test_an_unexpected_error_reaches_everybody_and_ends_the_thread(world):
    scheduler, runner, submit, finish = world
    runner.gate.clear()
    seqs = submit(6)
    job = scheduler.call_exclusive(lambda: None)
    runner.broken = True
    runner.gate.set()
    for s in seqs:
        assert "out of memory" in finish(s).error
    with pytest.raises(ServerError, match="out of memory"):
        job.result(10)
    assert scheduler.dead.wait(10) and not scheduler.alive


def test_stop_aborts_what_waits(world):
    scheduler, _, submit, finish = world
    scheduler.pause("in_place").result(10)
    (seq,) = submit()
    assert scheduler.stop(10)
    assert finish(seq).finish_reason["type"] == "abort"
