"""/generate: request body -> sequences, finished sequences -> answers.

Token lists are checked with C-speed builtins and answers are plain dicts for orjson: with short
responses this file is the server's hot path beside the model.
"""

from __future__ import annotations

import time
import uuid
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.rollout.server.errors import ServerError
from megarl.rollout.server.sampling_params import (
    DEFAULT_MAX_NEW_TOKENS,
    SamplingParams,
    parse_sampling_params,
)
from megarl.rollout.server.sequence import ABORTED_IN_QUEUE, GenerateCall, Sequence
from megarl.rollout.server.text import TextTools

# fields of SGLang's request that change the answer and that this server does not have
_UNSUPPORTED = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "lora_path",
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

    def parse(self, body: Any) -> tuple[GenerateCall, bool]:
        """(call with its sequences, whether the answer is a list)."""
        if not isinstance(body, dict):
            raise ServerError("the body must be a JSON object")
        for key in _UNSUPPORTED:
            if body.get(key):
                raise ServerError(f"{key} is not supported by the embedded server")
        prompts, batched = self._prompts(body)
        count = len(prompts)
        params = [
            parse_sampling_params(p)
            for p in _per_item(body.get("sampling_params"), count, "sampling_params", batched)
        ]
        samples = {p.n for p in params}
        if len(samples) > 1:
            raise ServerError(f"sampling_params.n must be equal in a batch, got {sorted(samples)}")
        n = samples.pop()
        rids = _rids(body.get("rid"), count, n, batched)
        options = [
            _per_item(body.get(key), count, key, batched)
            for key in ("return_logprob", "logprob_start_len", "top_logprobs_num")
        ]
        call = GenerateCall(stream=bool(body.get("stream")))
        for i, prompt in enumerate(prompts):
            return_logprob, start, top = (o[i] for o in options)
            for k in range(n):
                sequence = self._sequence(
                    rids[i * n + k],
                    prompt,
                    params[i],
                    call,
                    sample=k,
                    return_logprob=bool(return_logprob),
                    logprob_start=start,
                    top_logprobs_num=top,
                    return_text=bool(body.get("return_text_in_logprobs")),
                )
                call.sequences.append(sequence)
        call.pending = len(call.sequences)
        return call, batched or n > 1

    def _prompts(self, body: dict[str, Any]) -> tuple[list[list[int]], bool]:
        text, ids = body.get("text"), body.get("input_ids")
        if (text is None) == (ids is None):
            raise ServerError("give exactly one of text and input_ids")
        given = ids if text is None else text
        if text is not None:
            batched = isinstance(text, list)
            texts = text if batched else [text]
            if not all(isinstance(t, str) for t in texts):
                raise ServerError("text must be a string or a list of strings")
            prompts = [self.text.encode(t) for t in texts]
        else:
            if not isinstance(ids, list):
                raise ServerError("input_ids must be a list of token ids or a list of such lists")
            batched = bool(ids) and isinstance(ids[0], list)
            prompts = ids if batched else [ids]
        if not given or not prompts:
            raise ServerError("the input is empty")
        for prompt in prompts:
            self._check_ids(prompt)
        return prompts, batched

    def _check_ids(self, ids: Any) -> None:
        if not isinstance(ids, list) or not ids:
            raise ServerError("input_ids holds an empty prompt or mixes ids and lists")
        try:
            array("q", ids)
        except (TypeError, OverflowError):
            raise ServerError("input_ids must hold integers") from None
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
        call: GenerateCall,
        *,
        sample: int,
        return_logprob: bool,
        logprob_start: Any,
        top_logprobs_num: Any,
        return_text: bool,
    ) -> Sequence:
        for name, value in (
            ("logprob_start_len", logprob_start),
            ("top_logprobs_num", top_logprobs_num),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ServerError(f"{name} must be an integer, got {value!r}")
        for token in params.stop_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ServerError(f"stop_token_ids contains {token}, outside the vocabulary")
        if params.stop and self.text.tokenizer is None:
            raise ServerError("stop needs a tokenizer and this model has none; use stop_token_ids")
        seed = params.sampling_seed
        return Sequence(
            rid=rid,
            prompt=prompt,
            params=params,
            call=call,
            index=len(call.sequences),
            max_new_tokens=self._max_new_tokens(prompt, params),
            stop_ids=frozenset()
            if params.ignore_eos  # SGLang: no stop token of any kind then
            else self.eos.union(params.stop_token_ids),
            seed=int(self.rng.integers(2**63)) if seed is None else seed + sample,
            return_logprob=return_logprob,
            logprob_start=-1 if logprob_start is None else logprob_start,
            top_logprobs_num=top_logprobs_num or 0,
            return_text=return_text,
        )


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


def render(seq: Sequence, length: int, finished: bool, text: TextTools) -> dict[str, Any]:
    """SGLang's answer for the first `length` output tokens of `seq`."""
    output = seq.output[:length]
    reason = seq.finish_reason if finished else None
    meta: dict[str, Any] = {"id": seq.rid, "finish_reason": reason}
    if reason is ABORTED_IN_QUEUE:  # SGLang says no more about a request it never ran
        if seq.return_logprob:
            meta |= {"input_token_logprobs": [], "output_token_logprobs": []}
        return {"text": "", "output_ids": [], "meta_info": meta | {"completion_tokens": 0}}
    meta |= {
        "prompt_tokens": len(seq.prompt),
        "weight_version": seq.version,
        "num_retractions": seq.retractions,
    }
    if seq.return_logprob:
        meta |= _logprobs(seq, length, text)
    meta |= {
        "reasoning_tokens": 0,
        "completion_tokens": length,
        "cached_tokens": seq.cached_tokens,
        "cached_tokens_details": {"device": seq.cached_tokens, "host": 0}
        if seq.cached_tokens
        else None,
        "dp_rank": None,
    }
    if finished:
        meta |= {
            "weight_versions": _spans(seq, length),
            "e2e_latency": seq.finished_at - seq.arrived,
            "response_sent_to_client_ts": time.time(),
        }
    answer = text.answer(
        output,
        reason,
        skip_special_tokens=seq.params.skip_special_tokens,
        no_stop_trim=seq.params.no_stop_trim,
    )
    return {"text": answer, "output_ids": output, "meta_info": meta}


def _spans(seq: Sequence, length: int) -> list[dict[str, Any]]:
    ends = [start for _, start in seq.spans[1:]] + [length]
    return [
        {"version": version, "start": start, "end": end}
        for (version, start), end in zip(seq.spans, ends)
        if end > start
    ]


def _logprobs(seq: Sequence, length: int, text: TextTools) -> dict[str, Any]:
    """Entries are [logprob, token id, text or null]."""

    def entry(logprob: float | None, token: int) -> list[Any]:
        said = text.decode([token], skip_special_tokens=False) if seq.return_text else None
        return [logprob, token, said]

    start = max(0, seq.logprob_start)
    prompt = zip(seq.input_logprobs or [], seq.prompt[start:])
    out: dict[str, Any] = {
        "input_token_logprobs": [entry(lp, t) for lp, t in prompt],
        "output_token_logprobs": [
            entry(lp, t) for lp, t in zip(seq.logprobs[:length], seq.output[:length])
        ],
        "output_token_logprobs_length": length,
    }
    if seq.top_logprobs_num:
        for key, tops in (
            ("input_top_logprobs", seq.input_top_logprobs),
            ("output_top_logprobs", seq.top_logprobs[:length]),
        ):
            out[key] = [top and [entry(lp, t) for lp, t in top] for top in tops]
    return out
