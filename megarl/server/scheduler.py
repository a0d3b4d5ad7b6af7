"""Continuous batching: one thread that owns the model.

The event loop hands it sequences and control calls; between two steps the thread takes them all,
then prefills what fits and decodes every running sequence by one token. Nothing else touches the
model, so a control call sees no forward half done.

`waiting` holds sequences and exclusive jobs (weight updates) in order of arrival. An exclusive job
runs when everything before it is done; what came after it waits behind it. While generation is
paused sequences stay where they are and exclusive jobs run at once.

A failure ends what it belongs to: a job its call, a prompt's prefill that prompt, a decode step the
sequences that were in it, for which of them is at fault nobody can say. The thread goes on while
the model can still compute.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from megarl.server.errors import ServerError
from megarl.server.runner import ModelRunner
from megarl.server.sampler import SamplingBatch
from megarl.server.sequence import ABORTED, ABORTED_IN_QUEUE, Sequence
from megarl.server.text import TextTools

logger = logging.getLogger(__name__)
Delivery = tuple[Sequence, int, bool]  # (sequence, output tokens, finished)
PAUSE_MODES = ("abort", "retract", "in_place")
# an idle server starts once no request came for _BURST_GAP seconds, at the latest after _BURST
_BURST_GAP, _BURST = 0.001, 0.02


@dataclass
class Exclusive:
    """A job that must not overlap with generation."""

    run: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


class Scheduler:
    def __init__(
        self,
        runner: ModelRunner,
        text: TextTools,
        *,
        notify: Callable[[list[Delivery]], None],
        on_death: Callable[[], None],
        unfit: Callable[[], str] = lambda: "",
        threads: int | None = None,
    ) -> None:
        """`notify`, `on_death` and `unfit` are called in the scheduler's thread. `unfit` says why
        the weights are none to generate with, "" where they are.
        """
        self.runner, self.text = runner, text
        self.version = "default"
        self.paused = False
        self.error: str | None = None
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence | Exclusive] = deque()
        self._notify, self._on_death, self._threads = notify, on_death, threads
        self._unfit = unfit
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._deliveries: list[Delivery] = []
        self._batch: SamplingBatch | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # ---- called from any thread

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.error is None

    def stop(self, timeout: float) -> bool:
        """Aborts everything and ends the thread; False if it is still busy after `timeout` s."""

        def end() -> None:
            self._abort(lambda s: True)
            for job in self._jobs():
                _refuse(job, "the server is stopping", status=503)
            self.waiting.clear()
            self._stopping = True

        self._inbox.put(end)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(self, seqs: list[Sequence]) -> None:
        self._inbox.put(lambda: self.waiting.extend(seqs))

    def call(self, fn: Callable[[], Any]) -> Future[Any]:
        """Runs `fn` in the scheduler's thread before its next step."""
        job = Exclusive(fn)
        self._inbox.put(lambda: self._finish_job(job))
        return job.future

    def call_exclusive(self, fn: Callable[[], Any], *, abort_all: bool = False) -> Future[Any]:
        """Runs `fn` when no sequence that came earlier is in flight, or while paused."""
        job = Exclusive(fn)

        def enter() -> None:
            if abort_all:
                self._abort(lambda s: True)
            self.waiting.append(job)

        self._inbox.put(enter)
        return job.future

    def abort(self, rid: str, *, abort_all: bool = False) -> None:
        """Aborts the sequences whose rid starts with `rid`."""
        self._inbox.put(lambda: self._abort(lambda s: abort_all or s.rid.startswith(rid)))

    def abort_sequences(self, seqs: Iterable[Sequence]) -> None:
        gone = set(seqs)
        self._inbox.put(lambda: self._abort(lambda s: s in gone))

    def pause(self, mode: str) -> Future[Any]:
        return self.call(lambda: self._pause(mode))

    def resume(self) -> Future[Any]:
        return self.call(lambda: setattr(self, "paused", False))

    # ---- the scheduler's thread only

    def flush_cache(self) -> bool:
        """Gives the KV memory back; False while sequences hold it or, unpaused, wait for it."""
        return (self.paused or not self._queued()) and self.drop_cache()

    def drop_cache(self) -> bool:
        """Gives the KV memory back; False while sequences hold it."""
        if not self.running:
            self.runner.cache.clear()
        return not self.running

    def set_version(self, version: str) -> None:
        self.version = version
        for s in (*self.running, *self._queued()):
            if s.output:
                s.start_span(version)

    def _queued(self) -> list[Sequence]:
        return [w for w in self.waiting if isinstance(w, Sequence)]

    def _jobs(self) -> list[Exclusive]:
        return [w for w in self.waiting if isinstance(w, Exclusive)]

    @torch.inference_mode()
    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        try:
            while not self._stopping:
                try:
                    self._take_inbox()
                    self._run_exclusive()
                    if not self.paused:
                        self._step()
                except Exception as e:
                    logger.exception("a step failed")
                    self._recover(e)
                self._deliver()
        except Exception as e:
            logger.exception("the scheduler died")
            self._die(f"the generation loop failed: {_said(e)}")

    def _take_inbox(self) -> None:
        idle = not self.running and not self.waiting
        if idle or (self.paused and not self._jobs()):
            self._inbox.get()()
            if not self.paused and not self._jobs():  # a weight update has nothing to wait for
                self._gather_burst()
        while not self._inbox.empty():
            self._inbox.get_nowait()()

    def _gather_burst(self) -> None:
        """Requests come in bursts: a moment of patience saves many tiny prefills."""
        deadline = time.monotonic() + _BURST
        while time.monotonic() < deadline:
            try:
                self._inbox.get(timeout=_BURST_GAP)()
            except queue.Empty:
                return

    def _run_exclusive(self) -> None:
        """The jobs at the head of an idle server's queue; all of them while paused."""
        if self.paused:
            jobs, self.waiting = self._jobs(), deque(self._queued())
            for job in jobs:
                self._finish_job(job)
            return
        while self.waiting and not self.running and isinstance(self.waiting[0], Exclusive):
            head = self.waiting.popleft()
            assert isinstance(head, Exclusive)
            self._finish_job(head)

    def _finish_job(self, job: Exclusive) -> None:
        """Whatever goes wrong in a job is its call's error alone."""
        if not job.future.set_running_or_notify_cancel():
            return  # its caller is gone
        try:
            result = job.run()
        except BaseException as e:
            if not isinstance(e, ServerError):
                logger.exception("a call failed")
            job.future.set_exception(e)
        else:
            job.future.set_result(result)

    def _pause(self, mode: str) -> None:
        self.paused = True
        if mode == "abort":
            self._abort(lambda s: True)
        elif mode == "retract":
            for s in self.running:
                s.retractions += 1
            self.waiting.extendleft(reversed(self.running))
            self.running, self._batch = [], None

    def _abort(self, chosen: Callable[[Sequence], bool]) -> None:
        for s in self._queued():
            if chosen(s):
                self._finish(s, ABORTED if s.output else ABORTED_IN_QUEUE)
        for s in self.running:
            if chosen(s):
                self._finish(s, ABORTED)
        self.waiting = deque(
            w for w in self.waiting if isinstance(w, Exclusive) or w.finish_reason is None
        )
        self._reap()

    def _recover(self, e: Exception) -> None:
        """Ends what was running. Raises where the model can compute nothing any more."""
        self._fail(self.running, f"the generation step failed: {_said(e)}")
        self.running, self._batch = [], None
        self.runner.cache.clear()
        self.runner.probe()

    def _step(self) -> None:
        if (self.running or self.waiting) and (why := self._unfit()):
            self._fail([*self.running, *self._queued()], why)
            self.waiting = deque(self._jobs())
            self._reap()
            return
        if admitted := self._admit():
            self._prefill_apart(admitted)
        if self.running:
            self._decode()

    def _prefill_apart(self, admitted: list[Sequence]) -> None:
        """Prefills them together; where that fails one by one, so that only those at fault fail."""
        first = len(self.running)
        try:
            self._prefill(admitted)
        except Exception as e:
            logger.exception("a prefill failed")
            del self.running[first:]
            self._batch = None
            self.runner.cache.scrub(range(first, self.runner.cache.rows))
            if len(admitted) == 1:
                self._fail(admitted, f"the prefill failed: {_said(e)}")
                self.runner.probe()
                return
            left = [s for s in admitted if not s.finished_at]
            self.waiting.extendleft(reversed(left))
            for s in left:
                self.waiting.popleft()
                self._prefill_apart([s])

    def _decode(self) -> None:
        self.runner.make_room(self.running, used=len(self.running))
        if self.runner.deterministic:
            for row, s in enumerate(self.running):
                self._append([s], self.runner.decode([s], row), self._sampling([s]))
        else:
            logits = self.runner.decode(self.running)
            if self._batch is None:
                self._batch = self._sampling(self.running)
            self._append(self.running, logits, self._batch)
        self._reap()

    def _admit(self) -> list[Sequence]:
        """Takes waiting sequences while rows and cache last, up to the first exclusive job."""
        admitted: list[Sequence] = []
        longest = max((s.reserved for s in self.running), default=0)
        while self.waiting and isinstance(self.waiting[0], Sequence):
            rows = len(self.running) + len(admitted) + 1
            longest = max(longest, self.waiting[0].reserved)
            if rows > self.runner.max_rows or (
                rows > 1 and rows * longest > self.runner.max_total_tokens
            ):
                break
            admitted.append(self.waiting.popleft())  # type: ignore[arg-type]
        return admitted

    def _prefill(self, admitted: list[Sequence]) -> None:
        for s in admitted:
            if not s.spans:
                s.start_span(self.version)
        first = len(self.running)
        self.running, self._batch = [*self.running, *admitted], None
        self.runner.make_room(self.running, used=first)
        seqs, logits = self.runner.prefill(admitted, first)
        self.running[first:] = seqs  # in the order of their rows
        if self.runner.deterministic:
            for i, s in enumerate(seqs):
                self._append([s], logits[i : i + 1], self._sampling([s]))
        else:
            self._append(seqs, logits, self._sampling(seqs))
        self._reap()

    def _sampling(self, seqs: list[Sequence]) -> SamplingBatch:
        return SamplingBatch(seqs, self.runner.device, self.runner.vocab_size)

    def _append(self, seqs: list[Sequence], logits: torch.Tensor, batch: SamplingBatch) -> None:
        """Draws one token for each of `seqs` and finishes those it completes."""
        drawn = batch.sample(logits)
        for i, (s, token, logprob) in enumerate(zip(seqs, drawn.tokens, drawn.logprobs)):
            if logprob != logprob:
                self._finish(s, None, error=f"the model's logits are NaN (request {s.rid})")
                continue
            if s.max_new_tokens == 0:  # a request for prompt logprobs only
                self._finish(s, {"type": "length", "length": 0})
                continue
            s.output.append(token)
            s.logprobs.append(logprob)
            if s.report.top:
                s.top_logprobs.append(drawn.top_logprobs[i])
            try:
                reason = self._finish_reason(s, token)
            except Exception as e:  # a tokenizer that cannot decode what this one wrote
                logger.exception("request %s", s.rid)
                self._finish(s, None, error=f"its text cannot be searched for stops: {_said(e)}")
                continue
            if reason:
                self._finish(s, reason)
            elif s.call.stream:
                self._deliveries.append((s, len(s.output), False))

    def _finish_reason(self, s: Sequence, token: int) -> dict[str, Any] | None:
        """SGLang's order: length, then stop tokens, then stop strings."""
        if len(s.output) >= s.max_new_tokens:
            return {"type": "length", "length": s.max_new_tokens}
        if token in s.stop_ids:
            return {"type": "stop", "matched": token}
        if s.params.stop and len(s.output) >= s.params.min_new_tokens:
            matched = self.text.matched_stop(s.output, s.params.stop)
            if matched is not None:
                return {"type": "stop", "matched": matched}
        return None

    def _finish(
        self, s: Sequence, reason: dict[str, Any] | None, *, error: str | None = None
    ) -> None:
        if not s.version:
            s.version = self.version
        s.finish(reason, error=error)
        self._deliveries.append((s, len(s.output), True))

    def _fail(self, seqs: Iterable[Sequence], error: str) -> None:
        for s in seqs:
            if not s.finished_at:
                self._finish(s, None, error=error)

    def _reap(self) -> None:
        """Drops finished rows; the last rows move into the holes."""
        running, holes = self.running, [i for i, s in enumerate(self.running) if s.finished_at]
        if not holes:
            return
        if broken := [i for i in holes if running[i].error]:
            self.runner.cache.scrub(broken)
        left = len(running) - len(holes)
        movers = [i for i in range(left, len(running)) if not running[i].finished_at]
        holes = holes[: len(movers)]
        positions = max((running[i].length for i in movers), default=0)
        self.runner.cache.copy_rows(movers, holes, positions)
        for source, target in zip(movers, holes):
            running[target] = running[source]
        del running[left:]
        self._batch = None

    def _deliver(self) -> None:
        if self._deliveries:
            self._notify(self._deliveries)
            self._deliveries = []

    def _die(self, message: str) -> None:
        """Every call in flight gets the error; the server is no longer healthy."""
        self.error = message
        for job in self._jobs():
            _refuse(job, message, status=500)
        self._fail([*self.running, *self._queued()], message)
        self._deliver()
        self._on_death()


def _said(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}"


def _refuse(job: Exclusive, message: str, *, status: int) -> None:
    if job.future.set_running_or_notify_cancel():
        job.future.set_exception(ServerError(message, status=status))
