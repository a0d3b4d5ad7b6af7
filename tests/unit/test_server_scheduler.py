"""The scheduler's thread: jobs, their order, and what its death leaves behind."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
import torch

from megarl.server.protocol import ControlError, SamplingParams, ServerError
from megarl.server.scheduler import Scheduler
from megarl.server.sequence import ServedSequence

VOCAB = 8


class _Cache:
    rows = 4

    def __init__(self):
        self.cleared, self.scrubbed, self.full = 0, [], False

    def clear(self):
        self.cleared += 1

    def copy_rows(self, source, target, positions):
        if self.full:
            self.full = False
            raise RuntimeError("out of memory")

    def scrub(self, rows):
        self.scrubbed += rows


class FakeRunner:
    """Always predicts token 5. `gate` closed holds a decode step back. The next `decode_fails`
    decodes fail, and so does a prefill with a sequence of rid `poison`; `lost` is a lost GPU.
    """

    device, vocab_size, deterministic = torch.device("cpu"), VOCAB, False

    def __init__(self, max_rows=4, max_total_tokens=1000):
        self.max_rows, self.max_total_tokens = max_rows, max_total_tokens
        self.cache, self.gate, self.decoding = _Cache(), threading.Event(), threading.Event()
        self.decode_fails, self.poison, self.lost = 0, None, False
        self.batches: list[int] = []
        self.gate.set()

    def make_room(self, seqs, *, used):
        pass

    def _logits(self, count):
        logits = torch.zeros(count, VOCAB)
        logits[:, 5] = 50.0
        return logits

    def probe(self):
        if self.lost:
            raise RuntimeError("the GPU is lost")

    def prefill(self, seqs, first_row):
        if self.lost or self.poison in [s.rid for s in seqs]:
            raise RuntimeError("out of memory")
        for s in seqs:
            s.read = s.length
        return list(seqs), self._logits(len(seqs))

    def decode(self, seqs):
        self.decoding.set()
        assert self.gate.wait(10)
        if self.decode_fails:
            self.decode_fails -= 1
            raise RuntimeError("out of memory")
        self.batches.append(len(seqs))
        for s in seqs:
            s.read += 1
        return self._logits(len(seqs))


@pytest.fixture
def world():
    """(scheduler, runner, finish): `finish(seq)` waits until `seq` is done."""
    runner, dead = FakeRunner(), threading.Event()
    done: dict[ServedSequence, Future] = {}

    def notify(ended):
        for seq in ended:
            done[seq].set_result(seq)

    torn = []
    scheduler = Scheduler(
        runner, None, notify=notify, on_death=dead.set, unfit=lambda: "".join(torn)
    )
    scheduler.dead, scheduler.torn = dead, torn
    scheduler.start()

    def submit(count=1, tokens=5, params=None, prompt=(1, 2), written=0):
        seqs = [
            ServedSequence(
                rid=f"r{i}",
                prompt=list(prompt),
                params=params or SamplingParams(),
                max_new_tokens=tokens,
                stop_ids=frozenset(),
                seed=0,
                wants_logprobs=False,
                done=None,
                written=written,
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


def test_a_job_that_fails_fails_alone(world):
    scheduler, _, submit, finish = world
    with pytest.raises(KeyError):
        scheduler.call(lambda: {}["x"]).result(10)
    with pytest.raises(SystemExit):
        scheduler.call_exclusive(exit).result(10)
    assert len(finish(submit()[0]).output) == 5 and scheduler.alive


def test_a_decode_that_fails_ends_its_sequences_and_frees_their_rows(world):
    """Nobody can say whose fault it is. What waited runs."""
    scheduler, runner, submit, finish = world
    runner.gate.clear()
    seqs = submit(6)
    job = scheduler.call(lambda: None)
    runner.decode_fails = 1
    runner.gate.set()
    ends = [finish(s) for s in seqs]
    assert ["out of memory" in (s.error or "") for s in ends] == [True] * 4 + [False] * 2
    assert [len(s.output) for s in ends[4:]] == [5, 5]
    job.result(10)
    assert scheduler.alive and not scheduler.running and runner.cache.cleared == 1


def test_a_prefill_that_fails_is_tried_one_by_one(world):
    scheduler, runner, submit, finish = world
    runner.poison = "r1"
    scheduler.call(lambda: scheduler.pause("in_place")).result(10)
    seqs = submit(3)
    scheduler.call(scheduler.resume).result(10)
    ends = [finish(s) for s in seqs]
    assert ["out of memory" in (s.error or "") for s in ends] == [False, True, False]
    assert [len(s.output) for s in ends] == [5, 0, 5]
    assert runner.cache.cleared == 0 and runner.cache.scrubbed  # other rows keep what they had


def test_rows_that_cannot_move_end_what_runs_once(world):
    """Of two new sequences the first is done with its first token, and the other moves."""
    scheduler, runner, submit, finish = world
    scheduler.call(lambda: scheduler.pause("in_place")).result(10)
    (short,), (long,) = submit(tokens=1), submit(tokens=6)
    runner.cache.full = True
    scheduler.call(scheduler.resume).result(10)
    assert finish(short).error is None and len(finish(short).output) == 1
    assert "out of memory" in finish(long).error
    assert [len(finish(s).output) for s in submit(2, tokens=3)] == [3, 3] and scheduler.alive


def test_an_answer_that_cannot_be_searched_for_stops_fails_alone(world):
    _, _, submit, finish = world  # it has no tokenizer to search with
    (bad,) = submit(params=SamplingParams(stop=("x",)))
    assert "searched for stops" in finish(bad).error
    assert len(finish(submit()[0]).output) == 5


def test_torn_weights_generate_nothing(world):
    scheduler, runner, submit, finish = world
    runner.gate.clear()
    seqs = submit(6)
    scheduler.call(lambda: scheduler.pause("in_place"))
    done = scheduler.call_exclusive(lambda: scheduler.torn.append("torn"))
    runner.gate.set()
    done.result(10)
    scheduler.call(scheduler.resume)
    assert all(finish(s).error == "torn" for s in seqs)
    scheduler.call_exclusive(scheduler.torn.clear).result(10)
    assert len(finish(submit()[0]).output) == 5


def test_a_model_that_computes_nothing_any_more_ends_the_thread(world):
    scheduler, runner, submit, finish = world
    runner.gate.clear()
    seqs = submit(6)
    job = scheduler.call_exclusive(lambda: None)
    assert runner.decoding.wait(10)
    runner.decode_fails, runner.lost = 1, True
    runner.gate.set()
    errors = [finish(s).error for s in seqs]
    assert all("out of memory" in e for e in errors[:4])
    assert all("the GPU is lost" in e for e in errors[4:])
    with pytest.raises(ServerError, match="the GPU is lost"):
        job.result(10)
    assert scheduler.dead.wait(10) and not scheduler.alive


def test_stop_aborts_what_waits(world):
    scheduler, _, submit, finish = world
    scheduler.call(lambda: scheduler.pause("in_place")).result(10)
    (seq,) = submit()
    assert scheduler.stop(10)
    assert finish(seq).finish_reason["type"] == "abort"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_answer_paused_before_its_first_new_token_goes_on_by_the_new_weights(
    world, monkeypatch, mode
):
    """A deterministic server still reads what was written before, token by token."""
    scheduler, runner, submit, finish = world

    def prefill(seqs, first_row):
        for s in seqs:
            s.read = s.length - s.written
        return list(seqs), runner._logits(len(seqs))

    decode = runner.decode
    monkeypatch.setattr(runner, "deterministic", True, raising=False)
    monkeypatch.setattr(runner, "prefill", prefill)
    monkeypatch.setattr(runner, "decode", lambda seqs, row=0: decode(seqs))
    scheduler.call(lambda: scheduler.set_version("4")).result(10)
    runner.gate.clear()
    (answer,) = submit(tokens=3, prompt=[1, 2, 3, 4, 5, 6], written=3)
    assert runner.decoding.wait(10)
    paused = scheduler.call(lambda: scheduler.pause(mode))
    runner.gate.set()
    paused.result(10)
    scheduler.call_exclusive(lambda: scheduler.set_version("5")).result(10)
    scheduler.call(scheduler.resume).result(10)
    finish(answer)
    assert answer.spans == [("5", 0)] and len(answer.output) == 3
