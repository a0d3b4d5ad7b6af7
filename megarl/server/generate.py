"""/generate: request body -> sequences.

Token lists are checked with C-speed builtins: with short responses this is a hot path.
"""

from __future__ import annotations

import asyncio
import uuid
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.server.errors import ServerError
from megarl.server.limits import MAX_CHARS_PER_TOKEN, MAX_SEQUENCES, MAX_TOP_LOGPROBS
from megarl.server.sampling_params import (
    DEFAULT_MAX_NEW_TOKENS,
    SamplingParams,
    parse_sampling_params,
)
from megarl.server.sequence import GenerateCall, Report, Sequence
from megarl.server.text import TextTools

# fields of SGLang's request that change the answer and that this server does not have
_UNSUPPORTED = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "lora_id",
    "session_params",
    "custom_logit_processor",
    "return_hidden_states",
    "token_ids_logprob",
    "return_routed_experts",
    "return_prompt_token_ids",
    "bootstrap_host",
    "bootstrap_room",
)


@dataclass(kw_only=True)
class RequestParser:
    """Builds the sequences of one /generate body. What is wrong is a ServerError naming it."""

    text: TextTools
    context_length: int
    vocab_size: int
    eos: frozenset[int]
    rng: np.random.Generator

    async def parse(self, body: Any) -> tuple[GenerateCall, bool]:
        """(call with its sequences, whether the answer is a list)."""
        if not isinstance(body, dict):
            raise ServerError("the body must be a JSON object")
        for key in _UNSUPPORTED:
            if body.get(key):
                raise ServerError(f"{key} is not supported by the embedded server")
        given, batched = self._given(body)
        params = _all_params(body.get("sampling_params"), len(given), batched)
        n = params[0].n
        if len(given) * n > MAX_SEQUENCES:
            raise ServerError(
                f"{len(given)} prompt(s) with n={n} are {len(given) * n} sequences; one request "
                f"may ask for {MAX_SEQUENCES}, send several"
            )
        prompts = given if body.get("text") is None else await self._encoded(given)
        for prompt in prompts:
            self._check_ids(prompt)
        reports = _reports(body, len(prompts), batched)
        rids = _rids(body.get("rid"), len(prompts), n, batched)
        call = GenerateCall(stream=bool(body.get("stream")))
        for i, prompt in enumerate(prompts):
            for k in range(n):
                seq = self._sequence(rids[i * n + k], prompt, params[i], k, reports[i], call)
                call.sequences.append(seq)
        call.pending = len(call.sequences)
        return call, batched or n > 1

    def _given(self, body: dict[str, Any]) -> tuple[list[Any], bool]:
        """(The prompts, as texts or as lists of ids that are not checked yet, whether several)."""
        text, ids = body.get("text"), body.get("input_ids")
        if (text is None) == (ids is None):
            raise ServerError("give exactly one of text and input_ids")
        if not (text or ids):
            raise ServerError("the input is empty")
        if text is not None:
            batched = isinstance(text, list)
            texts = text if batched else [text]
            if not all(isinstance(t, str) for t in texts):
                raise ServerError("text must be a string or a list of strings")
            return texts, batched
        if not isinstance(ids, list):
            raise ServerError("input_ids must be a list of token ids or a list of such lists")
        batched = isinstance(ids[0], list)
        return ids if batched else [ids], batched

    async def _encoded(self, texts: list[str]) -> list[list[int]]:
        most, longest = max(map(len, texts)), MAX_CHARS_PER_TOKEN * self.context_length
        if most > longest:
            raise ServerError(
                f"text has {most} characters; with a context of {self.context_length} tokens it "
                f"may have {longest}"
            )
        # long ones take a while, in which others want an answer
        return await asyncio.to_thread(lambda: [self.text.encode(t) for t in texts])

    def _check_ids(self, ids: Any) -> None:
        if not isinstance(ids, list) or not ids:
            raise ServerError("input_ids holds an empty prompt or mixes ids and lists")
        try:
            array("q", ids)
        except (TypeError, OverflowError):
            raise ServerError("input_ids must hold integers of 64 bits") from None
        if bool in set(map(type, ids)):
            raise ServerError("input_ids must hold integers, not true or false")
        for bad in (min(ids), max(ids)):
            if not 0 <= bad < self.vocab_size:
                raise ServerError(
                    f"input_ids contains token id {bad}, outside the vocabulary of "
                    f"{self.vocab_size} tokens"
                )
        if len(ids) >= self.context_length:
            raise ServerError(
                f"The input ({len(ids)} tokens) is longer than the model's context length "
                f"({self.context_length} tokens)."
            )

    def _max_new_tokens(self, prompt: list[int], params: SamplingParams) -> int:
        room, wanted = self.context_length - len(prompt), params.max_new_tokens
        if wanted is None:
            return min(DEFAULT_MAX_NEW_TOKENS, room)
        if wanted > room:
            raise ServerError(
                "Requested token count exceeds the model's maximum context length of "
                f"{self.context_length} tokens. You requested a total of {wanted + len(prompt)} "
                f"tokens: {len(prompt)} tokens from the input messages and {wanted} tokens for the "
                "completion. Please reduce the number of tokens in the input messages or the "
                "completion to fit within the limit."
            )
        return wanted

    def _sequence(
        self,
        rid: str,
        prompt: list[int],
        params: SamplingParams,
        sample: int,
        report: Report,
        call: GenerateCall,
    ) -> Sequence:
        for token in params.stop_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ServerError(f"stop_token_ids contains {token}, outside the vocabulary")
        if params.stop and self.text.tokenizer is None:
            raise ServerError("stop needs a tokenizer and this model has none; use stop_token_ids")
        seed = params.sampling_seed
        stops = self.eos.union(params.stop_token_ids)
        return Sequence(
            rid=rid,
            prompt=prompt,
            params=params,
            max_new_tokens=self._max_new_tokens(prompt, params),
            # as in SGLang, ignore_eos is about stop tokens of every kind
            stop_ids=frozenset() if params.ignore_eos else stops,
            seed=int(self.rng.integers(2**63)) if seed is None else seed + sample,
            report=report,
            call=call,
            index=len(call.sequences),
        )


def _all_params(given: Any, count: int, batched: bool) -> list[SamplingParams]:
    if isinstance(given, list):
        items = _per_item(given, count, "sampling_params", batched)
        params = [parse_sampling_params(p) for p in items]
    else:
        params = [parse_sampling_params(given)] * count
    if len(samples := {p.n for p in params}) > 1:
        raise ServerError(f"sampling_params.n must be equal in a batch, got {sorted(samples)}")
    return params


def _reports(body: dict[str, Any], count: int, batched: bool) -> list[Report]:
    """What each prompt's answers are to tell about logprobs."""
    wanted, starts, tops = (
        _per_item(body.get(key), count, key, batched)
        for key in ("return_logprob", "logprob_start_len", "top_logprobs_num")
    )
    for name, values in (("logprob_start_len", starts), ("top_logprobs_num", tops)):
        for v in values:
            if v is not None and (isinstance(v, bool) or not isinstance(v, int)):
                raise ServerError(f"{name} must be an integer, got {v!r}")
    if bad := [t for t in tops if t is not None and not 0 <= t <= MAX_TOP_LOGPROBS]:
        raise ServerError(f"top_logprobs_num must be from 0 to {MAX_TOP_LOGPROBS}, got {bad[0]}")
    text = bool(body.get("return_text_in_logprobs"))
    return [
        Report(logprobs=True, start=-1 if start is None else start, top=top or 0, text=text)
        if want
        else Report()
        for want, start, top in zip(wanted, starts, tops)
    ]


def _per_item(value: Any, count: int, name: str, batched: bool) -> list[Any]:
    """One value for each prompt, from a list of a batch or a value for all."""
    if not isinstance(value, list):
        return [value] * count
    if not batched or len(value) != count:
        raise ServerError(f"{name} has {len(value)} entries for {count} prompt(s)")
    return value


def _rids(given: Any, count: int, n: int, batched: bool) -> list[str]:
    if given is None:
        return [uuid.uuid4().hex for _ in range(count * n)]
    if isinstance(given, str):
        bases = [f"{given}_{i}" for i in range(count)] if batched else [given]
    else:
        bases = _per_item(given, count, "rid", batched)
    if not all(isinstance(r, str) for r in bases):
        raise ServerError("rid must be a string or a list of strings")
    return bases if n == 1 else [f"{r}_{k}" for r in bases for k in range(n)]
