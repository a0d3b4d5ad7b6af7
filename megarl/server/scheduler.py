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

from megarl.server.protocol import ServerError, described
from megarl.server.runner import ModelRunner
from megarl.server.sampler import SamplingBatch
from megarl.server.sequence import ABORTED, ABORTED_IN_QUEUE, ServedSequence, TextTools

logger = logging.getLogger(__name__)
PAUSE_MODES = ("abort", "retract", "in_place")
# an idle server starts when no request has come for _BURST_GAP seconds, after _BURST at the latest
_BURST_GAP, _BURST = 0.001, 0.02


@dataclass(eq=False)
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

    running: the sequences that are being written; they own rows 0..n-1 of the KV cache, in their
    order. version: of the weights that write the tokens from here on. error: why the loop has
    failed, None while it has not.

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
        self.runner, self.text = runner, text
        self.version = "default"
        self.paused = False
        self.error: str | None = None
        self.running: list[ServedSequence] = []
        self.waiting: deque[ServedSequence | Exclusive] = deque()
        self.requests_ended = self.tokens_written = 0  # since the start
        self._ended: list[ServedSequence] = []  # whose calls are to be told
        self._batch: SamplingBatch | None = None  # of `running`, while that is the same
        self._notify, self._on_death, self._threads = notify, on_death, threads
        self._unfit = unfit
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # ---- called from any thread

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
        if abort_all:
            self.abort(lambda s: True)
        self._inbox.put(lambda: self.waiting.append(job))
        return job.future

    def abort(self, chosen: Callable[[ServedSequence], bool]) -> None:
        """Aborts the sequences of which `chosen` is true, where they are not finished."""
        self._inbox.put(lambda: self._abort(chosen))

    # ---- the scheduler's thread only: the loop

    def pause(self, mode: str) -> None:
        """Stops generation; `mode` is one of PAUSE_MODES: abort ends what runs, retract puts it
        back into the queue, in_place leaves it in its rows."""
        self.paused = True
        if mode == "abort":
            self._abort(lambda s: True)
        elif mode == "retract":
            retracted = self._take_running()
            for s in retracted:
                s.retractions += 1
            self.waiting.extendleft(reversed(retracted))

    def resume(self) -> None:
        """Ends a pause."""
        self.paused = False

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
            s.written = 0
            if s.spans:  # it has run, though it may have written nothing yet
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
                    self._fail(self._take_running(), f"the generation step failed: {described(e)}")
                    self.runner.cache.clear()
                    self.runner.probe()
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

    def _abort(self, chosen: Callable[[ServedSequence], bool]) -> None:
        queued = set(filter(chosen, self._queued()))
        for s in queued:
            self._finish(s, ABORTED if s.output else ABORTED_IN_QUEUE)
        self.waiting = deque(w for w in self.waiting if w not in queued)
        for s in filter(chosen, self.running):
            self._finish(s, ABORTED)
        self._drop_finished()

    def _deliver(self) -> None:
        if self._ended:
            self._notify(self._ended)
            self._ended = []

    def _die(self, message: str) -> None:
        """Tells every call in flight the error; the server is no longer healthy."""
        self.error = message
        for job in self._jobs():
            job.refuse(message, status=500)
        self._fail([*self.running, *self._queued()], message)
        self._deliver()
        self._on_death()

    # ---- one step

    def _step(self) -> None:
        if (self.running or self.waiting) and (why := self._unfit()):
            self._fail([*self.running, *self._queued()], why)
            self.waiting = deque(self._jobs())
        elif admitted := self._admit():
            self._prefill(admitted)
        self._drop_finished()
        if self.running:
            self._decode()
            self._drop_finished()

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

    def _prefill(self, new: list[ServedSequence]) -> None:
        """Adds `new` to what runs, each with its next token; where that fails, one by one, so that
        only those at fault fail."""
        first = len(self.running)
        try:
            self.running, self._batch = [*self.running, *new], None
            self.runner.make_room(self.running, used=first)
            seqs, logits = self.runner.prefill(new, first)
            self.running[first:] = seqs  # in the order of their rows
            at_once = 1 if self.runner.deterministic else len(seqs)
            for i in range(0, len(seqs), at_once):
                part = seqs[i : i + at_once]
                self._append(part, logits[i : i + at_once], self._sampling(part))
            return
        except Exception as e:
            logger.exception("a prefill failed")
            why = f"the prefill failed: {described(e)}"
        del self.running[first:]
        self.runner.cache.scrub(range(first, self.runner.cache.rows))
        if len(new) == 1:
            self._fail(new, why)
            self.runner.probe()
            return
        left = [s for s in new if not s.finished_at]
        self.waiting.extendleft(reversed(left))  # until it is their turn
        for s in left:
            self.waiting.popleft()
            self._prefill([s])

    def _decode(self) -> None:
        """Reads one token of every sequence, and writes the next."""
        self.runner.make_room(self.running, used=len(self.running))
        if self.runner.deterministic:  # row by row: no bit may depend on the rest of the batch
            for row, s in enumerate(self.running):
                self._append([s], self.runner.decode([s], row), self._sampling([s]))
            return
        logits = self.runner.decode(self.running)
        if self._batch is None:
            self._batch = self._sampling(self.running)
        self._append(self.running, logits, self._batch)

    def _sampling(self, seqs: list[ServedSequence]) -> SamplingBatch:
        return SamplingBatch(seqs, self.runner.device, self.runner.vocab_size)

    def _append(
        self, seqs: list[ServedSequence], logits: torch.Tensor, batch: SamplingBatch
    ) -> None:
        """Draws one token for each of `seqs` from logits [n,V]; finishes those it completes."""
        for s, token, logprob in zip(seqs, *batch.sample(logits)):
            if s.read < s.length:  # its next token is there, and not read yet
                continue
            if logprob != logprob:
                self._finish(s, None, error=f"the model's logits are NaN (request {s.rid})")
                continue
            if s.max_new_tokens == 0:
                self._finish(s, {"type": "length", "length": 0})
                continue
            s.output.append(token)
            s.written += 1
            s.logprobs.append(logprob)
            try:
                reason = self._finish_reason(s, token)
            except Exception as e:  # a tokenizer that cannot decode what this sequence says
                logger.exception("request %s", s.rid)
                why = f"its text cannot be searched for stops: {described(e)}"
                self._finish(s, None, error=why)
                continue
            if reason:
                self._finish(s, reason)

    def _finish_reason(self, s: ServedSequence, token: int) -> dict[str, Any] | None:
        """Checks in SGLang's order: length, then stop tokens, then stop strings."""
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
        self, s: ServedSequence, reason: dict[str, Any] | None, *, error: str | None = None
    ) -> None:
        """Ends a sequence, running or not; the next `_drop_finished` frees its row."""
        s.finish(reason, error=error)
        self.requests_ended += 1
        self.tokens_written += len(s.output)
        self._ended.append(s)

    def _fail(self, seqs: Iterable[ServedSequence], error: str) -> None:
        """Ends those of `seqs` that are not ended, with `error`."""
        for s in seqs:
            if not s.finished_at:
                self._finish(s, None, error=error)

    def _drop_finished(self) -> None:
        """Frees the rows of finished sequences; the last rows move into the holes."""
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

    def _take_running(self) -> list[ServedSequence]:
        """Takes all sequences out and returns them; the rows are free."""
        taken, self.running, self._batch = self.running, [], None
        return taken
