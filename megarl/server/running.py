"""The sequences that are being written, and the steps that write them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from megarl.server.errors import described
from megarl.server.runner import ModelRunner
from megarl.server.sampler import SamplingBatch
from megarl.server.sequence import ServedSequence
from megarl.server.text import TextTools

logger = logging.getLogger(__name__)


class RunningSequences:
    """Owns rows 0..n-1 of the KV cache, one for each of `sequences`, in their order.

    `ended` collects those whose calls are to be told. Only the scheduler's thread comes here.
    """

    def __init__(self, runner: ModelRunner, text: TextTools) -> None:
        self.runner, self.text = runner, text
        self.sequences: list[ServedSequence] = []
        self.ended: list[ServedSequence] = []
        self._batch: SamplingBatch | None = None  # of `sequences`, while they are the same

    def prefill(self, new: list[ServedSequence]) -> None:
        """Adds `new`, each with its first token. Where that raises, none of them is added."""
        first = len(self.sequences)
        try:
            self.sequences, self._batch = [*self.sequences, *new], None
            self.runner.make_room(self.sequences, used=first)
            seqs, logits = self.runner.prefill(new, first)
            self.sequences[first:] = seqs  # in the order of their rows
            self._write(seqs, logits)
        except Exception:
            del self.sequences[first:]
            self._batch = None
            self.runner.cache.scrub(range(first, self.runner.cache.rows))
            raise

    def decode(self) -> None:
        """Writes one more token to every sequence."""
        self.runner.make_room(self.sequences, used=len(self.sequences))
        if self.runner.deterministic:  # row by row: no bit may depend on the rest of the batch
            for row, s in enumerate(self.sequences):
                self._append([s], self.runner.decode([s], row), self._sampling([s]))
        else:
            logits = self.runner.decode(self.sequences)
            if self._batch is None:
                self._batch = self._sampling(self.sequences)
            self._append(self.sequences, logits, self._batch)

    def finish(
        self, s: ServedSequence, reason: dict[str, Any] | None, *, error: str | None = None
    ) -> None:
        """Ends a sequence, running or not; the caller's next `drop_finished` frees its row."""
        s.finish(reason, error=error)
        self.ended.append(s)

    def fail(self, seqs: Iterable[ServedSequence], error: str) -> None:
        """Ends those of `seqs` that are not ended, with `error`."""
        for s in seqs:
            if not s.finished_at:
                self.finish(s, None, error=error)

    def drop_finished(self) -> None:
        """Frees the rows of finished sequences; the last rows move into the holes."""
        running, holes = self.sequences, [i for i, s in enumerate(self.sequences) if s.finished_at]
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

    def clear(self) -> list[ServedSequence]:
        """Takes all sequences out and returns them; the rows are free."""
        taken, self.sequences, self._batch = self.sequences, [], None
        return taken

    def _sampling(self, seqs: list[ServedSequence]) -> SamplingBatch:
        return SamplingBatch(seqs, self.runner.device, self.runner.vocab_size)

    def _write(self, seqs: list[ServedSequence], logits: torch.Tensor) -> None:
        """Appends the first token behind each prompt; logits [n,V]."""
        if self.runner.deterministic:
            for i, s in enumerate(seqs):
                self._append([s], logits[i : i + 1], self._sampling([s]))
        else:
            self._append(seqs, logits, self._sampling(seqs))

    def _append(
        self, seqs: list[ServedSequence], logits: torch.Tensor, batch: SamplingBatch
    ) -> None:
        """Draws one token for each of `seqs` from logits [n,V]; finishes those it completes."""
        for s, token, logprob in zip(seqs, *batch.sample(logits)):
            if logprob != logprob:
                self.finish(s, None, error=f"the model's logits are NaN (request {s.rid})")
                continue
            if s.max_new_tokens == 0:
                self.finish(s, {"type": "length", "length": 0})
                continue
            s.output.append(token)
            s.logprobs.append(logprob)
            try:
                reason = self._finish_reason(s, token)
            except Exception as e:  # a tokenizer that cannot decode what this sequence says
                logger.exception("request %s", s.rid)
                why = f"its text cannot be searched for stops: {described(e)}"
                self.finish(s, None, error=why)
                continue
            if reason:
                self.finish(s, reason)

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
