"""One sequence that the server is writing, and the HTTP call that waits for it.

Sequences are written by the scheduler thread, and read by the event loop once they have ended.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megarl.server.prompt_logprobs import PromptLogprobs
from megarl.server.sampling_params import SamplingParams

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}


class GenerateCall:
    """Waits for the sequences of one HTTP request; `done` is set when all of them have ended."""

    def __init__(self) -> None:
        self.sequences: list[ServedSequence] = []
        self.pending = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def one_ended(self) -> None:
        """Notes that one of the sequences has ended. Called in the event loop."""
        self.pending -= 1
        if not self.pending and not self.done.done():
            self.done.set_result(None)


@dataclass(kw_only=True, eq=False)
class ServedSequence:
    """Holds a prompt and what was written to it so far.

    spans: (weight version, the first output token written under it). Logprobs are in nats; an
    answer has them where `wants_logprobs`. Sequences share KV where their `extra_key` is the same.
    routes: what routers chose for its tokens but the last, in parts [n,L,k], where the server
    records it; an answer has those from position `routes_from` on, None for none. prompt_top: how
    many of the likeliest tokens an answer names beside each of the prompt's; None asks for no
    logprobs of the prompt. Times are those of time.monotonic().
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int
    stop_ids: frozenset[int]
    seed: int
    wants_logprobs: bool
    call: GenerateCall
    extra_key: str | None = None
    prompt_top: int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    routes_from: int | None = None
    routes: list[Tensor] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
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
