"""Reads a request of OpenAI's chat completions as one of /generate, and writes its answer: whole,
one, text alone. It is there for judges and for a look by hand; agents go through the gateway.
"""

from __future__ import annotations

import time
from typing import Any

from megarl.server.errors import ServerError, described
from megarl.server.sequence import ServedSequence
from megarl.server.text import TextTools

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
