"""Continuous batching: one thread that owns the model.

The event loop hands it sequences and control calls; between two steps the thread takes them all,
then prefills what fits and decodes every running sequence by one token. Nothing else touches the
model, so a control call sees no forward half done.

`waiting` holds sequences and exclusive jobs (weight updates) in order of arrival. An exclusive job
runs when everything before it is done; what came after it waits behind it. While generation is
paused sequences stay where they are and exclusive jobs run at once.

A failed job ends its call, a failed prefill its prompt, and a failed decode step all sequences in
it, for nobody can say which of them is at fault. The thread goes on while the model can compute.
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

from megarl.server.errors import ServerError, described
from megarl.server.runner import ModelRunner
from megarl.server.running import RunningSequences
from megarl.server.sequence import ABORTED, ABORTED_IN_QUEUE, ServedSequence
from megarl.server.text import TextTools

logger = logging.getLogger(__name__)
PAUSE_MODES = ("abort", "retract", "in_place")
# an idle server starts when no request has come for _BURST_GAP seconds, after _BURST at the latest
_BURST_GAP, _BURST = 0.001, 0.02


@dataclass
class Exclusive:
    """Holds a job that must not overlap with generation, and the future that its caller
    waits for."""

    run: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)

    def finish(self) -> None:
        """Runs the job, unless its caller is gone; an error goes to the caller alone."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.run()
        except BaseException as e:
            if not isinstance(e, ServerError):
                logger.exception("a call failed")
            self.future.set_exception(e)
        else:
            self.future.set_result(result)

    def refuse(self, message: str, *, status: int) -> None:
        """Answers the caller, who may be gone, with an error."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(ServerError(message, status=status))


class Scheduler:
    """Runs the generation loop in a thread of its own.

    `notify`, `on_death` and `unfit` are called in that thread. `notify` gets the sequences that
    have ended. `unfit` returns why nothing may be generated with the weights, or "" where they are
    whole.
    """

    def __init__(
        self,
        runner: ModelRunner,
        text: TextTools,
        *,
        notify: Callable[[list[ServedSequence]], None],
        on_death: Callable[[], None],
        unfit: Callable[[], str] = lambda: "",
        threads: int | None = None,
    ) -> None:
        self.runner = runner
        self.version = "default"
        self.paused = False
        self.error: str | None = None
        self.waiting: deque[ServedSequence | Exclusive] = deque()
        self._rows = RunningSequences(runner, text)
        self._notify, self._on_death, self._threads = notify, on_death, threads
        self._unfit = unfit
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # ---- called from any thread

    @property
    def running(self) -> list[ServedSequence]:
        """Returns the sequences that are being written, in the order of their rows."""
        return self._rows.sequences

    @property
    def alive(self) -> bool:
        """Tells whether the generation loop runs."""
        return self._thread.is_alive() and self.error is None

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Aborts everything and ends the thread; returns False if it is still busy after `timeout`
        seconds."""

        def end() -> None:
            self._abort(lambda s: True)
            for job in self._jobs():
                job.refuse("the server is stopping", status=503)
            self.waiting.clear()
            self._stopping = True

        self._inbox.put(end)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(self, seqs: list[ServedSequence]) -> None:
        """Puts sequences at the end of the queue."""
        self._inbox.put(lambda: self.waiting.extend(seqs))

    def call(self, fn: Callable[[], Any]) -> Future[Any]:
        """Runs `fn` in the scheduler's thread before its next step."""
        job = Exclusive(fn)
        self._inbox.put(job.finish)
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
        """Aborts the sequences whose rid starts with `rid`, or all."""
        self._inbox.put(lambda: self._abort(lambda s: abort_all or s.rid.startswith(rid)))

    def abort_sequences(self, seqs: Iterable[ServedSequence]) -> None:
        """Aborts these sequences, where they are not finished."""
        gone = set(seqs)
        self._inbox.put(lambda: self._abort(lambda s: s in gone))

    def pause(self, mode: str) -> Future[Any]:
        """Stops generation; `mode` is one of PAUSE_MODES: abort ends what runs, retract puts it
        back into the queue, in_place leaves it in its rows."""
        return self.call(lambda: self._pause(mode))

    def resume(self) -> Future[Any]:
        """Ends a pause."""
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
        """Sets the version of the weights that write the tokens from here on."""
        self.version = version
        for s in (*self.running, *self._queued()):
            if s.output:
                s.start_span(version)

    def _queued(self) -> list[ServedSequence]:
        return [w for w in self.waiting if isinstance(w, ServedSequence)]

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
            self._die(f"the generation loop failed: {described(e)}")

    def _take_inbox(self) -> None:
        idle = not self.running and not self.waiting
        if idle or (self.paused and not self._jobs()):
            self._inbox.get()()
            if not self.paused and not self._jobs():  # a weight update has nothing to wait for
                self._gather_burst()
        while not self._inbox.empty():
            self._inbox.get_nowait()()

    def _gather_burst(self) -> None:
        """Waits a moment for more requests: they come in bursts, and one prefill is cheaper than
        many tiny ones."""
        deadline = time.monotonic() + _BURST
        while time.monotonic() < deadline:
            try:
                self._inbox.get(timeout=_BURST_GAP)()
            except queue.Empty:
                return

    def _run_exclusive(self) -> None:
        """Runs the jobs at the head of an idle server's queue, or all of them while paused."""
        if self.paused:
            jobs, self.waiting = self._jobs(), deque(self._queued())
            for job in jobs:
                job.finish()
            return
        while self.waiting and not self.running and isinstance(head := self.waiting[0], Exclusive):
            self.waiting.popleft()
            head.finish()

    def _pause(self, mode: str) -> None:
        self.paused = True
        if mode == "abort":
            self._abort(lambda s: True)
        elif mode == "retract":
            retracted = self._rows.clear()
            for s in retracted:
                s.retractions += 1
            self.waiting.extendleft(reversed(retracted))

    def _abort(self, chosen: Callable[[ServedSequence], bool]) -> None:
        for s in self._queued():
            if chosen(s):
                self._rows.finish(s, ABORTED if s.output else ABORTED_IN_QUEUE)
        for s in self.running:
            if chosen(s):
                self._rows.finish(s, ABORTED)
        self.waiting = deque(
            w for w in self.waiting if isinstance(w, Exclusive) or w.finish_reason is None
        )
        self._rows.drop_finished()

    def _step(self) -> None:
        if (self.running or self.waiting) and (why := self._unfit()):
            self._rows.fail([*self.running, *self._queued()], why)
            self.waiting = deque(self._jobs())
            self._rows.drop_finished()
            return
        if admitted := self._admit():
            self._prefill(admitted)
            self._rows.drop_finished()
        if self.running:
            self._rows.decode()
            self._rows.drop_finished()

    def _admit(self) -> list[ServedSequence]:
        """Takes waiting sequences while rows and cache last, up to the first exclusive job."""
        admitted: list[ServedSequence] = []
        longest = max((s.reserved for s in self.running), default=0)
        while self.waiting and isinstance(s := self.waiting[0], ServedSequence):
            rows = len(self.running) + len(admitted) + 1
            longest = max(longest, s.reserved)
            if rows > self.runner.max_rows or (
                rows > 1 and rows * longest > self.runner.max_total_tokens
            ):
                break
            self.waiting.popleft()
            admitted.append(s)
            if not s.spans:
                s.start_span(self.version)
        return admitted

    def _prefill(self, admitted: list[ServedSequence]) -> None:
        """Prefills sequences together, or, if that fails, one by one, so that only those at fault
        fail."""
        try:
            self._rows.prefill(admitted)
        except Exception as e:
            logger.exception("a prefill failed")
            if len(admitted) == 1:
                self._rows.fail(admitted, f"the prefill failed: {described(e)}")
                self.runner.probe()
                return
            left = [s for s in admitted if not s.finished_at]
            self.waiting.extendleft(reversed(left))  # until it is their turn
            for s in left:
                self.waiting.popleft()
                self._prefill([s])

    def _recover(self, e: Exception) -> None:
        """Ends the running sequences. Raises where the model can compute nothing any more."""
        self._rows.fail(self._rows.clear(), f"the generation step failed: {described(e)}")
        self.runner.cache.clear()
        self.runner.probe()

    def _deliver(self) -> None:
        if self._rows.ended:
            self._notify(self._rows.ended)
            self._rows.ended = []

    def _die(self, message: str) -> None:
        """Tells every call in flight the error; the server is no longer healthy."""
        self.error = message
        for job in self._jobs():
            job.refuse(message, status=500)
        self._rows.fail([*self.running, *self._queued()], message)
        self._deliver()
        self._on_death()
