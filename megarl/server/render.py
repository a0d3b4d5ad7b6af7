"""Turns sequences into SGLang's answers, as plain dicts for orjson."""

from __future__ import annotations

import time
from typing import Any

from megarl.server.sequence import ABORTED_IN_QUEUE, ServedSequence
from megarl.server.text import TextTools


def render(seq: ServedSequence, length: int, finished: bool, text: TextTools) -> dict[str, Any]:
    """Returns SGLang's answer for the first `length` output tokens of `seq`."""
    output = seq.output[:length]
    reason = seq.finish_reason if finished else None
    meta: dict[str, Any] = {"id": seq.rid, "finish_reason": reason}
    if reason is ABORTED_IN_QUEUE:  # SGLang says no more about a request it never ran
        if seq.report.logprobs:
            meta |= {"input_token_logprobs": [], "output_token_logprobs": []}
        return {"text": "", "output_ids": [], "meta_info": meta | {"completion_tokens": 0}}
    meta |= {
        "prompt_tokens": len(seq.prompt),
        "weight_version": seq.version,
        "num_retractions": seq.retractions,
    }
    if seq.report.logprobs:
        meta |= _logprobs(seq, length)
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


def _spans(seq: ServedSequence, length: int) -> list[dict[str, Any]]:
    ends = [start for _, start in seq.spans[1:]] + [length]
    return [
        {"version": version, "start": start, "end": end}
        for (version, start), end in zip(seq.spans, ends)
        if end > start
    ]


def _logprobs(seq: ServedSequence, length: int) -> dict[str, Any]:
    """Returns logprobs as entries [logprob, token id, null]; SGLang may have text in the last."""

    def entry(logprob: float | None, token: int) -> list[Any]:
        return [logprob, token, None]

    start = max(0, seq.report.start)
    prompt = zip(seq.input_logprobs or [], seq.prompt[start:])
    out: dict[str, Any] = {
        "input_token_logprobs": [entry(lp, t) for lp, t in prompt],
        "output_token_logprobs": [
            entry(lp, t) for lp, t in zip(seq.logprobs[:length], seq.output[:length])
        ],
        "output_token_logprobs_length": length,
    }
    if seq.report.top:
        for key, tops in (
            ("input_top_logprobs", seq.input_top_logprobs),
            ("output_top_logprobs", seq.top_logprobs[:length]),
        ):
            out[key] = [top and [entry(lp, t) for lp, t in top] for top in tops]
    return out
