"""Speaks the generate API of token ids in, token ids and logprobs out (vLLM's, which verifiers'
clients use): POST /inference/v1/generate."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megarl.api.records import ModelResponse
from megarl.rollout.gateway.messages import BadRequest, whole_number


@dataclass(kw_only=True)
class TokenRequest:
    """Holds a request for one answer to token ids.

    session: id of the session, for workers of environments, whose key is for all of them. trace:
    names the conversation among those of the session. max_tokens and stop_token_ids bound the
    session's parameters. routes_from: first position whose routes the answer has.
    """

    token_ids: list[int]
    session: str
    trace: str
    max_tokens: int | None
    stop_token_ids: tuple[int, ...]
    routes_from: int = 0


def read(body: Mapping[str, Any], *, trace: str) -> TokenRequest:
    """Returns the request of a body. Sampling parameters other than max_tokens and stop_token_ids
    are the session's, whatever the body says. Raises BadRequest."""
    params = body.get("sampling_params")
    if not isinstance(params, dict):
        raise BadRequest("sampling_params is missing: send an object, it may be empty")
    return TokenRequest(
        token_ids=_ids(body.get("token_ids"), "token_ids"),
        session=str(params.get("session") or ""),
        trace=trace,
        routes_from=whole_number(params, "routed_experts_prompt_start", least=0) or 0,
        max_tokens=whole_number(params, "max_tokens"),
        stop_token_ids=tuple(
            _ids(params.get("stop_token_ids") or [], "stop_token_ids", empty=True)
        ),
    )


def _ids(value: Any, name: str, *, empty: bool = False) -> list[int]:
    good = isinstance(value, list) and all(type(t) is int and 0 <= t < 1 << 31 for t in value)
    if not good or not (value or empty):
        raise BadRequest(f"{name} must be a list of token ids, whole numbers from 0")
    return list(value)


def write(request: TokenRequest, answer_id: str, response: ModelResponse) -> dict[str, Any]:
    """Returns the body of the answer. Each logprob names its token, as clients check it."""
    pairs = zip(response.output_tokens, response.output_logprobs, strict=True)
    content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
    choice = {
        "index": 0,
        "token_ids": list(response.output_tokens),
        "logprobs": {"content": content},
        "finish_reason": "length" if response.stop_reason == "length" else "stop",
    }
    if not request.session and (routes := _routes(response, request.routes_from)) is not None:
        choice["routed_experts"] = routes  # our own workers have no use for them
    return {"request_id": answer_id, "choices": [choice]}


def _routes(response: ModelResponse, start: int) -> dict[str, Any] | None:
    """Returns the experts that routers chose [rows,L,k] from position `start`; None where some are
    not known. Clients look for `data` as the first field."""
    if response.routed_experts is None or response.routes_from > start:
        return None
    routes = response.routed_experts[start - response.routes_from :]
    if (routes < 0).any():
        return None
    dtype = torch.uint8 if int(routes.max()) < 256 else torch.uint16
    data = base64.b64encode(routes.to(dtype).numpy().tobytes()).decode()
    name = str(dtype).removeprefix("torch.")
    return {"data": data, "shape": list(routes.shape), "dtype": name, "start": start}
