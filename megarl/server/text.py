"""Text of token ids, for stop strings, and answers with it: SGLang's, and those of OpenAI's chat
completions, which are whole, one, and text alone. They are there for judges and for a look by hand;
agents go through the gateway.

A model without a tokenizer serves ids only.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

from megarl.server.errors import ServerError, described
from megarl.server.sequence import ABORTED_IN_QUEUE, ServedSequence
from megarl.wire.routes import encode

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


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


# by their names of /generate's sampling_params
_PARAMS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "stop": "stop",
    "seed": "sampling_seed",
}
_OTHERS = ("messages", "model", "user")
# what else a client may send, with values that ask for nothing
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, [], {})


def read_chat(body: dict[str, Any], text: TextTools) -> dict[str, Any]:
    """Returns the body of /generate that a chat's answer takes. Raises ServerError naming what is
    wrong, or what this server does not have."""
    for key, value in body.items():
        known = key in _PARAMS or key in _OTHERS
        if not known and (value is True or value not in _NEUTRAL):
            raise ServerError(f"{key}={value!r} is not supported by the embedded server")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ServerError("messages must be a list of messages, one at least")
    if getattr(text.tokenizer, "chat_template", None) is None:
        raise ServerError("this model's tokenizer has no chat template; use /generate")
    try:
        prompt = text.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except Exception as e:  # templates are programs
        raise ServerError(f"the chat template refuses the messages: {described(e)}") from None
    ids = text.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    params = {_PARAMS[k]: v for k, v in body.items() if k in _PARAMS and v is not None}
    return {"input_ids": ids, "sampling_params": params}


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
