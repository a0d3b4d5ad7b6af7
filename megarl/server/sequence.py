"""One sample in flight, and the HTTP call that waits for it.

Sequences are written by the scheduler thread and read by the event loop: the token lists only ever
grow, and the loop reads no further than the length it was told.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from megarl.server.sampling_params import SamplingParams

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}


class GenerateCall:
    """One HTTP request for one or more sequences: counts down, or queues updates to stream."""

    def __init__(self, *, stream: bool) -> None:
        self.sequences: list[Sequence] = []
        self.stream = stream
        self.pending = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.updates: asyncio.Queue[tuple[Sequence, int, bool]] = asyncio.Queue()

    def deliver(self, seq: Sequence, length: int, finished: bool) -> None:
        """Runs in the event loop: `seq` has `length` output tokens."""
        if self.stream:
            self.updates.put_nowait((seq, length, finished))
        self.pending -= finished
        if not self.pending and not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What an answer tells about logprobs; prompt tokens are reported from `start` on, if >= 0."""

    logprobs: bool = False
    start: int = -1
    top: int = 0
    text: bool = False


class Sequence:
    def __init__(
        self,
        *,
        rid: str,
        prompt: list[int],
        params: SamplingParams,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        seed: int,
        report: Report,
        call: GenerateCall,
        index: int,
    ) -> None:
        """`index` is its place among the call's sequences."""
        self.rid, self.prompt, self.params = rid, prompt, params
        self.max_new_tokens, self.stop_ids, self.seed = max_new_tokens, stop_ids, seed
        self.report, self.call, self.index = report, call, index
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[float, int]]] = []
        self.input_logprobs: list[float | None] | None = None
        self.input_top_logprobs: list[list[tuple[float, int]] | None] = []
        self.cached_tokens = self.retractions = 0
        self.spans: list[tuple[str, int]] = []  # (version, first output token under it)
        self.version = ""
        self.finish_reason: dict[str, Any] | None = None
        self.error: str | None = None
        self.arrived, self.finished_at = time.monotonic(), 0.0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def reserved(self) -> int:
        """Positions it may come to hold in the KV cache."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def wants_prompt_logprobs(self) -> bool:
        return (
            self.report.logprobs
            and self.input_logprobs is None
            and 0 <= self.report.start < len(self.prompt)
        )

    def start_span(self, version: str) -> None:
        """Tokens from here on are written by `version`."""
        self.version = version
        if self.spans and self.spans[-1][1] == len(self.output):
            self.spans.pop()
        self.spans.append((version, len(self.output)))

    def finish(self, reason: dict[str, Any] | None, *, error: str | None = None) -> None:
        self.finish_reason, self.error = reason, error
        self.finished_at = time.monotonic()
