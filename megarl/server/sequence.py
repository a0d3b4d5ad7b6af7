"""One sequence that the server is writing, and the HTTP call that waits for it.

Sequences are written by the scheduler thread and read by the event loop: the token lists only ever
grow, and the loop reads no further than the length it was told.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from megarl.server.sampling_params import SamplingParams

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}

Delivery = tuple["ServedSequence", int, bool]  # (sequence, output tokens, finished)


class GenerateCall:
    """Waits for the sequences of one HTTP request: it counts them down, or queues what to
    stream."""

    def __init__(self, *, stream: bool) -> None:
        self.sequences: list[ServedSequence] = []
        self.stream = stream
        self.pending = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.updates: asyncio.Queue[Delivery] = asyncio.Queue()

    def deliver(self, seq: ServedSequence, length: int, finished: bool) -> None:
        """Notes that `seq` has `length` output tokens. Called in the event loop."""
        if self.stream:
            self.updates.put_nowait((seq, length, finished))
        self.pending -= finished
        if not self.pending and not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Says which logprobs an answer has: any at all, those of prompt tokens from `start` on (none
    if negative), and those of the `top` likeliest tokens at each position."""

    logprobs: bool = False
    start: int = -1
    top: int = 0


@dataclass(kw_only=True, eq=False)
class ServedSequence:
    """Holds a prompt and what was written to it so far.

    index: its place among the sequences of its call. spans: (weight version, the first output token
    written under it). Logprobs are in nats; `input_logprobs` is None until the prefill, and so is
    its first element, for the token that nothing comes before. Times are those of time.monotonic().
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int
    stop_ids: frozenset[int]
    seed: int
    report: Report
    call: GenerateCall
    index: int
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    input_logprobs: list[float | None] | None = None
    input_top_logprobs: list[list[tuple[float, int]] | None] = field(default_factory=list)
    cached_tokens: int = 0
    retractions: int = 0
    spans: list[tuple[str, int]] = field(default_factory=list)
    version: str = ""
    finish_reason: dict[str, Any] | None = None
    error: str | None = None
    arrived: float = field(default_factory=time.monotonic)
    finished_at: float = 0.0

    @property
    def length(self) -> int:
        """Returns the number of its tokens, prompt included."""
        return len(self.prompt) + len(self.output)

    @property
    def reserved(self) -> int:
        """Returns how many positions it may come to hold in the KV cache."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def tokens(self) -> list[int]:
        """Returns the token ids of prompt and output."""
        return self.prompt + self.output

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Tells whether its prefill must report logprobs of the prompt."""
        return (
            self.report.logprobs
            and self.input_logprobs is None
            and 0 <= self.report.start < len(self.prompt)
        )

    def start_span(self, version: str) -> None:
        """Notes that the weights `version` write the tokens from here on."""
        self.version = version
        if self.spans and self.spans[-1][1] == len(self.output):
            self.spans.pop()
        self.spans.append((version, len(self.output)))

    def finish(self, reason: dict[str, Any] | None, *, error: str | None = None) -> None:
        """Ends the sequence, with SGLang's finish reason or with the error."""
        self.finish_reason, self.error = reason, error
        self.finished_at = time.monotonic()
