"""Turns the body of /generate into sequences.

Token lists are checked with C-speed builtins: with short responses this is a hot path.
"""

from __future__ import annotations

import uuid
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.server.errors import MAX_SEQUENCES, ServerError
from megarl.server.sequence import (
    DEFAULT_MAX_NEW_TOKENS,
    GenerateCall,
    SamplingParams,
    ServedSequence,
    parse_sampling_params,
)

# fields of SGLang's request that change the answer and that this server does not have
_UNSUPPORTED = (
    "text",
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "lora_id",
    "session_params",
    "stream",
    "return_hidden_states",
    "custom_logit_processor",
    "token_ids_logprob",
    "return_prompt_token_ids",
    "return_text_in_logprobs",
    "bootstrap_host",
    "bootstrap_room",
)


@dataclass(kw_only=True)
class RequestParser:
    """Builds the sequences of one /generate body.

    context_length and vocab_size are in tokens; eos are the ids that end a sequence; rng seeds
    requests that bring no seed.
    """

    has_tokenizer: bool
    context_length: int
    vocab_size: int
    eos: frozenset[int]
    rng: np.random.Generator

    def parse(self, body: dict[str, Any]) -> tuple[GenerateCall, bool]:
        """Returns the call with its sequences, and whether its answer is a list. Raises ServerError
        naming what is wrong. It must run in the event loop."""
        for key in _UNSUPPORTED:
            if body.get(key):
                hint = "; send input_ids" if key == "text" else ""
                raise ServerError(f"{key} is not supported by the embedded server{hint}")
        prompts, batched = _prompts(body.get("input_ids"))
        for prompt in prompts:
            self._check_ids(prompt)
        count = len(prompts)
        params = _all_params(body.get("sampling_params"), count, batched)
        logprobs = _per_item(body.get("return_logprob"), count, "return_logprob", batched)
        rids = _rids(body.get("rid"), count, batched)
        keys = _extra_keys(body.get("extra_key"), count, batched)
        start = _routes_from(body, min(map(len, prompts)))
        top = _prompt_top(body, self.vocab_size)
        call = GenerateCall()
        call.sequences = [
            self._sequence(*parts, start, top, call)
            for parts in zip(rids, prompts, params, logprobs, keys)
        ]
        call.pending = count
        return call, batched

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
        wants_logprobs: Any,
        extra_key: str | None,
        routes_from: int | None,
        prompt_top: int | None,
        call: GenerateCall,
    ) -> ServedSequence:
        for token in params.stop_token_ids:
            if not 0 <= token < self.vocab_size:
                raise ServerError(f"stop_token_ids contains {token}, outside the vocabulary")
        if params.stop and not self.has_tokenizer:
            raise ServerError("stop needs a tokenizer and this model has none; use stop_token_ids")
        if prompt_top and params.max_new_tokens != 0:
            raise ServerError(
                "top_logprobs_num: the embedded server names likely tokens beside those of a "
                "prompt alone; send max_new_tokens=0"
            )
        seed = params.sampling_seed
        stops = self.eos.union(params.stop_token_ids)
        return ServedSequence(
            rid=rid,
            prompt=prompt,
            params=params,
            max_new_tokens=self._max_new_tokens(prompt, params),
            # as in SGLang, ignore_eos is about stop tokens of every kind
            stop_ids=frozenset() if params.ignore_eos else stops,
            seed=int(self.rng.integers(2**63)) if seed is None else seed,
            wants_logprobs=bool(wants_logprobs),
            routes_from=routes_from,
            prompt_top=prompt_top if wants_logprobs else None,
            call=call,
            extra_key=extra_key,
        )


def _prompts(ids: Any) -> tuple[list[Any], bool]:
    """Returns the prompts, which are not checked yet, and whether there may be several."""
    if not isinstance(ids, list):
        raise ServerError("input_ids must be a list of token ids or a list of such lists")
    if not ids:
        raise ServerError("input_ids is empty")
    batched = isinstance(ids[0], list)
    if batched and len(ids) > MAX_SEQUENCES:
        raise ServerError(
            f"{len(ids)} prompts; one request may have {MAX_SEQUENCES}, send several requests"
        )
    return ids if batched else [ids], batched


def _all_params(given: Any, count: int, batched: bool) -> list[SamplingParams]:
    if not isinstance(given, list):
        return [parse_sampling_params(given)] * count
    items = _per_item(given, count, "sampling_params", batched)
    return [parse_sampling_params(p) for p in items]


def _per_item(value: Any, count: int, name: str, batched: bool) -> list[Any]:
    """Returns a value for each prompt, from a batch's list or from one value for all."""
    if not isinstance(value, list):
        return [value] * count
    if not batched or len(value) != count:
        raise ServerError(f"{name} has {len(value)} entries for {count} prompt(s)")
    return value


def _extra_keys(given: Any, count: int, batched: bool) -> list[str | None]:
    """Returns the extra key of each prompt; None where it is empty, as in SGLang."""
    keys = _per_item(given, count, "extra_key", batched)
    if not all(key is None or isinstance(key, str) for key in keys):
        raise ServerError("extra_key must be a string or a list of strings")
    return [key or None for key in keys]


def _routes_from(body: dict[str, Any], shortest: int) -> int | None:
    """Returns the first position whose routes are asked for, None for none; as in SGLang one for
    all prompts, and within the `shortest`."""
    if not body.get("return_routed_experts"):
        return None
    start = body.get("routed_experts_start_len", 0)
    if type(start) is not int or not 0 <= start <= shortest:
        raise ServerError(
            f"routed_experts_start_len={start!r}: use a position of the prompt, 0 to {shortest}"
        )
    return start


def _prompt_top(body: dict[str, Any], vocab_size: int) -> int | None:
    """Returns how many likely tokens are asked for beside each of the prompt's; None where no
    logprobs of the prompt are."""
    start, top = body.get("logprob_start_len", -1), body.get("top_logprobs_num") or 0
    if start not in (None, -1, 0) or type(start) is bool:
        raise ServerError(
            f"logprob_start_len={start!r}: use 0, the whole prompt, or -1, none of it"
        )
    if type(top) is not int or not 0 <= top <= vocab_size:
        raise ServerError(f"top_logprobs_num={top!r}: use a number from 0 to {vocab_size}")
    if start != 0 and top:
        raise ServerError(
            "top_logprobs_num: the embedded server names likely tokens beside those of a prompt "
            "alone; send logprob_start_len=0"
        )
    return top if start == 0 and body.get("return_logprob") else None


def _rids(given: Any, count: int, batched: bool) -> list[str]:
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(given, str):
        return [f"{given}_{i}" for i in range(count)] if batched else [given]
    rids = _per_item(given, count, "rid", batched)
    if not all(isinstance(r, str) for r in rids):
        raise ServerError("rid must be a string or a list of strings")
    return rids
