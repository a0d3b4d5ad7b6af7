"""One sequence that the server is writing: made from a request, told as SGLang's answer or as that
of OpenAI's chat completions, which are there for judges and for a look by hand (agents go through
the gateway). A model without a tokenizer serves ids only.

Sequences are written by the scheduler's thread, and read by the event loop once they have ended.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

from megarl.server.protocol import SamplingParams, ServerError, described
from megarl.wire.routes import encode

DEFAULT_MAX_NEW_TOKENS = 128
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}


@dataclass(frozen=True)
class PromptLogprobs:
    """Holds SGLang's entries [logprob, token id, null] of each of n tokens, null for the logprob of
    the first; and of each the `top` likeliest, null for the first."""

    tokens: list[list[Any]]
    top: list[list[list[Any]] | None]


@dataclass(kw_only=True, eq=False)
class ServedSequence:
    """Holds a prompt and what was written to it so far.

    written: how many of its last tokens the weights of now have written, in earlier requests, too.
    read: how many of its tokens its row of the KV cache holds.
    spans: (weight version, the first output token written under it). Logprobs are in nats; an
    answer has them where `wants_logprobs`. Sequences share KV where their `extra_key` is the same.
    routes: what routers chose for its tokens but the last, in parts [n,L,k], where the server
    records it; an answer has those from position `routes_from` on, None for none. prompt_top: how
    many of the likeliest tokens an answer names beside each of the prompt's; None asks for no
    logprobs of the prompt. done: set, in the event loop, once it has ended. Times are those of
    time.monotonic().
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int
    stop_ids: frozenset[int]
    seed: int
    wants_logprobs: bool
    done: asyncio.Future[None]
    extra_key: str | None = None
    prompt_top: int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    routes_from: int | None = None
    routes: list[Tensor] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    written: int = 0
    read: int = 0
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
    def unread(self) -> int:
        """Returns the first token id that its row lacks."""
        at = self.read - len(self.prompt)
        return self.output[at] if at >= 0 else self.prompt[at]

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


class TextTools:
    """Decodes with the tokenizer in directory `path`; `tokenizer` is None where it has none.
    Raises ValueError for one that cannot be loaded."""

    def __init__(self, path: str) -> None:
        has_one = any((Path(path) / name).is_file() for name in _TOKENIZER_FILES)
        self.tokenizer: Any = _load(path) if has_one else None

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids`, or "" without a tokenizer."""
        if self.tokenizer is None or not ids:
            return ""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def matched_stop(self, ids: list[int], stops: tuple[str, ...]) -> str | None:
        """Returns the first of `stops` that is in the text of the last tokens, or None."""
        # a token may hold a part of a character; every byte of the stop string plus a margin do
        window = max(len(s.encode()) for s in stops) + 4
        tail = self.decode(ids[-window:], skip_special_tokens=False)
        return next((s for s in stops if s in tail), None)

    def chat_ids(self, messages: list[Any]) -> list[int]:
        """Returns the prompt of an answer to `messages`. Raises ServerError where they are refused,
        or the model has no chat template."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ServerError("this model's tokenizer has no chat template; use /generate")
        try:
            prompt = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as e:  # templates are programs
            raise ServerError(f"the chat template refuses the messages: {described(e)}") from None
        ids: list[int] = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return ids

    def answer(self, ids: list[int], finish_reason: dict[str, Any] | None) -> str:
        """Returns the text of an answer, without the stop token or stop string that ended it."""
        matched = (finish_reason or {}).get("matched")
        text = self.decode(ids[:-1] if isinstance(matched, int) else ids)
        return text.partition(matched)[0] if isinstance(matched, str) else text


def _load(path: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as e:  # of many types
        raise ValueError(
            f"--model-path={path}: its tokenizer cannot be loaded ({type(e).__name__}); add "
            "tokenizer.json, or remove tokenizer_config.json to serve token ids alone"
        ) from e


def eos_token_ids(model_path: str, config: PretrainedConfig, tokenizer: Any) -> frozenset[int]:
    """Returns every id that the model's files call end of sequence."""
    found: set[int] = set()
    try:
        generation = GenerationConfig.from_pretrained(model_path)
    except OSError:  # the file is optional
        generation = GenerationConfig()
    from_tokenizer = getattr(tokenizer, "eos_token_id", None)
    for ids in (generation.eos_token_id, config.eos_token_id, from_tokenizer):
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(int(i) for i in found)


def render(seq: ServedSequence, text: TextTools) -> dict[str, Any]:
    """Returns SGLang's answer for `seq`, which has ended."""
    reason = seq.finish_reason
    meta: dict[str, Any] = {"id": seq.rid, "finish_reason": reason}
    if reason is ABORTED_IN_QUEUE:  # SGLang says no more about a request it never ran
        if seq.wants_logprobs:
            meta["output_token_logprobs"] = []
        return {"text": "", "output_ids": [], "meta_info": meta | {"completion_tokens": 0}}
    meta |= {
        "prompt_tokens": len(seq.prompt),
        "weight_version": seq.version,
        "num_retractions": seq.retractions,
        "weight_versions": _spans(seq),
        "completion_tokens": len(seq.output),
        "cached_tokens": seq.cached_tokens,
        "e2e_latency": seq.finished_at - seq.arrived,
    }
    if seq.wants_logprobs:  # entries [logprob, token id, null]; SGLang may have text in the last
        pairs = zip(seq.logprobs, seq.output, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    if (said := seq.prompt_logprobs) is not None:
        meta["input_token_logprobs"] = said.tokens
        if seq.prompt_top:
            meta["input_top_logprobs"] = said.top
            meta["output_top_logprobs"] = []  # there are no such tokens
    if seq.routes_from is not None and seq.routes:  # a server that does not record has none
        meta["routed_experts"] = encode(torch.cat(seq.routes)[seq.routes_from : seq.length - 1])
    return {"text": text.answer(seq.output, reason), "output_ids": seq.output, "meta_info": meta}


def _spans(seq: ServedSequence) -> list[dict[str, Any]]:
    ends = [start for _, start in seq.spans[1:]] + [len(seq.output)]
    return [
        {"version": version, "start": start, "end": end}
        for (version, start), end in zip(seq.spans, ends)
        if end > start
    ]


def chat_answer(seq: ServedSequence, text: TextTools, model: str) -> dict[str, Any]:
    """Returns the answer of a sequence that has ended."""
    message = {"role": "assistant", "content": text.answer(seq.output, seq.finish_reason)}
    why = (seq.finish_reason or {}).get("type")
    read, wrote = len(seq.prompt), len(seq.output)
    return {
        "id": f"chatcmpl-{seq.rid}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": why, "logprobs": None}],
        "usage": {
            "prompt_tokens": read,
            "completion_tokens": wrote,
            "total_tokens": read + wrote,
        },
    }
