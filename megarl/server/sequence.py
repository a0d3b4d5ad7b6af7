"""One sequence that the server is writing, its sampling parameters, and the HTTP call of it.

Sampling parameters have SGLang 0.5.23's names, defaults and bounds. Sequences are written by the
scheduler thread, and read by the event loop once they have ended.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator
from torch import Tensor

from megarl.server.errors import MAX_STOP_LENGTH, MAX_STOPS, ServerError

# parameters that only SGLang has: values that ask for nothing new pass
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "min_p": (None, 0, 0.0),
    "skip_special_tokens": (None, True),
    "no_stop_trim": (None, False),
    "stop_regex": (None, [], ""),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "spaces_between_special_tokens": (None, True),
    "stream_interval": (None, 1),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "beam_width": (None, 1),
    "watermark": (None, False),
    "choice": (None, []),
}
DEFAULT_MAX_NEW_TOKENS = 128
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stop = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]


class SamplingParams(BaseModel, strict=True, frozen=True, allow_inf_nan=False):
    """Holds how tokens are drawn and when they end. `max_new_tokens` None is 128, cut to the room
    in the context. Raises pydantic's ValidationError for a value out of its bounds."""

    max_new_tokens: Int64 | None = None
    min_new_tokens: Int64 = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: Int64 = -1
    stop: tuple[Stop, ...] = Field(default=(), max_length=MAX_STOPS, strict=False)
    stop_token_ids: tuple[Int64, ...] = Field(default=(), max_length=MAX_STOPS, strict=False)
    ignore_eos: bool = False
    sampling_seed: Int64 | None = None

    @property
    def greedy(self) -> bool:
        """Tells whether the likeliest token is written: SGLang takes a temperature below 1e-6 as 0,
        and reports logprobs at temperature 1 there."""
        return self.temperature < 1e-6

    @model_validator(mode="after")
    def _check(self) -> Self:
        most, least = self.max_new_tokens, self.min_new_tokens
        if most is not None and most < least:
            raise ValueError(f"max_new_tokens={most} must be at least min_new_tokens={least}")
        if self.top_k < 1 and self.top_k != -1:
            raise ValueError(f"top_k={self.top_k} must be -1 (disable) or at least 1")
        return self


def parse_sampling_params(given: Any) -> SamplingParams:
    """Reads a request's `sampling_params`. Raises ServerError, naming what is wrong."""
    if given is None:
        return SamplingParams()
    if not isinstance(given, dict):
        raise ServerError(f"sampling_params must be an object, got {type(given).__name__}")
    own = SamplingParams.model_fields
    for key, value in given.items():
        if key not in own and key not in _NEUTRAL:
            known = ", ".join(f"`{name}`" for name in (*own, *_NEUTRAL))
            raise ServerError(f"unknown field `{key}`, expected one of {known}")
        if key in _NEUTRAL and value not in _NEUTRAL[key]:
            raise ServerError(
                f"sampling_params.{key}={value!r} is not supported by the embedded server"
            )
    values = {k: v for k, v in given.items() if k in own and v is not None}
    stops = [values["stop"]] if isinstance(values.get("stop"), str) else values.get("stop")
    if isinstance(stops, list):
        values["stop"] = [stop for stop in stops if stop != ""]
    try:
        return SamplingParams.model_validate(values)
    except ValidationError as e:
        error = e.errors()[0]
        where = ".".join(map(str, ("sampling_params", *error["loc"])))
        raise ServerError(f"{where}: {error['msg']}, got {error['input']!r}") from None


ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}


@dataclass(frozen=True)
class PromptLogprobs:
    """Holds SGLang's entries [logprob, token id, null] of each of n tokens, null for the logprob of
    the first; and of each the `top` likeliest, null for the first."""

    tokens: list[list[Any]]
    top: list[list[list[Any]] | None]


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
