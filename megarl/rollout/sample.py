"""Brings one sample through SGLang's /generate: request body, answer, continuation.

A sample that a pause aborted is continued: its next request holds the prompt and the tokens so far,
and the remaining budget. Its seed stays, since seeded sampling is keyed by the position in the
sequence. (A stop string that straddles the interruption is not seen; stop tokens are.)
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

from megarl.api.records import INITIAL_VERSION, ModelRequest, ModelResponse
from megarl.config.rollout import GenerationHyperparameters
from megarl.rollout.routes import Routes
from megarl.utils.http import shown
from megarl.wire.routes import RouteShape

_FIX = "start a server that speaks SGLang's protocol, or correct rollout.addresses"


class Sample:
    """Collects the tokens of one ModelRequest over as many requests as it takes. Raises ValueError
    for a request without tokens. routes: the model's, where the answer is to have them."""

    def __init__(
        self, request: ModelRequest, *, seed: int | None, routes: RouteShape | None = None
    ) -> None:
        if not request.input_ids:
            raise ValueError(f"request {request.rid}: input_ids is empty")
        self.request, self.seed = request, seed
        self.response = ModelResponse(input_tokens=list(request.input_ids), stop_reason="")
        self.routes: Routes | None = None
        if routes is not None:
            start, n = min(request.routes_from, len(request.input_ids)), len(request.input_ids)
            self.routes = Routes(routes, start=start, prompt_len=n)
            self.response.routes_from, self.response.routed_experts = start, self.routes.known
        self._begun = time.monotonic()

    @property
    def done(self) -> bool:
        """Returns whether the sample has ended."""
        return bool(self.response.stop_reason)

    @property
    def tokens(self) -> list[int]:
        """Returns the prompt and the tokens generated so far."""
        return self.response.input_tokens + self.response.output_tokens

    def sampling_params(self) -> dict[str, Any]:
        """Returns SGLang's sampling parameters for the next request, with the budget left."""
        config, written = self.request.gconfig, self.response.output_len
        params = _sampling_params(config)
        params["max_new_tokens"] = config.max_new_tokens - written
        params["min_new_tokens"] = max(0, config.min_new_tokens - written)
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        return params

    def absorb(self, item: dict[str, Any], *, routes_from: int = 0) -> int:
        """Takes one answer in, whose routes begin at position `routes_from`; returns how many
        tokens it brought. Raises ValueError for an answer that breaks the protocol and RuntimeError
        for a request that the server gave up on."""
        meta = item["meta_info"]
        tokens, logprobs = _tokens_and_logprobs(item)
        finish = meta.get("finish_reason")
        if not isinstance(finish, dict):
            raise ValueError(f"finish_reason {shown(finish)} is no object; {_FIX}")
        response = self.response
        if response.output_len + len(tokens) > (most := self.request.gconfig.max_new_tokens):
            raise ValueError(
                f"{response.output_len + len(tokens)} tokens where {most} were asked for; {_FIX}"
            )
        versions = _versions(meta, len(tokens))
        if self.routes is not None:
            sent = len(self.tokens)
            self.routes.absorb(meta, sent=sent, got=len(tokens), asked=routes_from)
            response.routed_experts = self.routes.known
        response.output_tokens += tokens
        response.output_logprobs += logprobs
        response.output_versions += versions
        self._take_reason(finish)
        return len(tokens)

    def _take_reason(self, finish: dict[str, Any]) -> None:
        """Ends the sample where the answer's finish_reason says so."""
        reason = finish.get("type")
        if reason == "abort":
            self._check_abort(finish)
            if self.response.output_len >= self.request.gconfig.max_new_tokens:
                self._finish("length")
        elif reason in ("stop", "length"):
            self._finish(reason)
        else:
            raise ValueError(f"finish_reason {shown(finish)} is not known; {_FIX}")

    def _finish(self, reason: str) -> None:
        self.response.stop_reason = reason
        self.response.latency = time.monotonic() - self._begun

    def _check_abort(self, finish: dict[str, Any]) -> None:
        """Raises RuntimeError for an abort with a status, a refusal; a pause's abort has none."""
        if finish.get("status_code") is not None:
            raise RuntimeError(
                f"request {self.request.rid}: server aborted it with status "
                f"{finish['status_code']}: {finish.get('message', '(no message)')}"
            )


def fill_ids(req: ModelRequest, tokenizer: Any) -> None:
    """Gives a request of text alone the ids of its text. Raises ValueError where there is no
    tokenizer for it."""
    if req.input_ids or not req.text:
        return
    if tokenizer is None:
        raise ValueError(
            f"request {req.rid} has text and no input_ids: give the client a tokenizer "
            "(RemoteSGLangEngine(config, tokenizer=...)), or the request its ids"
        )
    req.input_ids = list(tokenizer(req.text, add_special_tokens=False)["input_ids"])


def batch_body(
    samples: Sequence[Sample], extra_key: str, adapter: str | None = None
) -> dict[str, Any]:
    """Returns the body of ONE /generate request for all samples, each with its own parameters and
    seed. extra_key: of the prefix cache; adapter: the name of the adapter that the servers compute
    with."""
    more: dict[str, Any] = {} if adapter is None else {"lora_path": [adapter] * len(samples)}
    if (start := routes_from(samples)) is not None:  # one for all samples of a request
        more |= {"return_routed_experts": True, "routed_experts_start_len": start}
    return more | {
        "rid": [f"{s.request.rid}-{uuid.uuid4().hex[:8]}" for s in samples],
        "input_ids": [s.tokens for s in samples],
        "sampling_params": [s.sampling_params() for s in samples],
        "return_logprob": True,
        "extra_key": extra_key,
    }


def routes_from(samples: Sequence[Sample]) -> int | None:
    """Returns the first position whose routes one of the samples lacks; None where they are to have
    none."""
    return min((s.routes.end for s in samples if s.routes is not None), default=None)


def _sampling_params(config: GenerationHyperparameters) -> dict[str, Any]:
    params: dict[str, Any] = {"ignore_eos": config.ignore_eos}
    if config.greedy:
        params["temperature"] = 0.0
    else:
        if config.temperature <= 0:
            raise ValueError(f"gconfig.temperature={config.temperature}: use greedy=true for 0")
        params |= {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
        }
    if config.stop_token_ids:
        params["stop_token_ids"] = list(config.stop_token_ids)
    if config.stop:
        params["stop"] = list(config.stop)
    return params


def _tokens_and_logprobs(item: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Returns tokens and logprobs, both from output_token_logprobs ([logprob, id, text] each), so
    that they cannot disagree."""
    entries, ids = item["meta_info"].get("output_token_logprobs"), item.get("output_ids")
    if entries is None:  # a request aborted while it queued has a reduced meta_info
        if ids:
            raise ValueError(f"tokens came without output_token_logprobs; {_FIX}")
        return [], []
    if not isinstance(entries, list) or not all(
        isinstance(e, list) and len(e) > 1 and type(e[1]) is int and isinstance(e[0], int | float)
        for e in entries
    ):
        raise ValueError(
            f"output_token_logprobs {shown(entries)} is no list of [logprob, token id, ...]; {_FIX}"
        )
    if isinstance(ids, list) and len(ids) != len(entries):
        raise ValueError(f"{len(ids)} tokens came with {len(entries)} logprobs; {_FIX}")
    tokens, logprobs = [e[1] for e in entries], [float(e[0]) for e in entries]
    if bad := [lp for lp in logprobs if not math.isfinite(lp)]:
        raise ValueError(
            f"the server answered a logprob of {bad[0]}; its weights are broken, or overflow in "
            "its dtype"
        )
    return tokens, logprobs


def _versions(meta: dict[str, Any], count: int) -> list[int]:
    """Returns the weight version of each of `count` tokens, from spans [{version, start, end}]."""
    spans = meta.get("weight_versions") or [
        {"version": meta.get("weight_version", INITIAL_VERSION), "start": 0, "end": count}
    ]
    versions: list[int | None] = [None] * count
    try:
        for span in spans:
            number = _version(str(span["version"]))
            for t in range(max(0, span["start"]), min(span["end"], count)):
                versions[t] = number
    except (TypeError, KeyError):
        raise ValueError(
            f"weight_versions {shown(spans)} is no list of version, start, end; {_FIX}"
        ) from None
    if None in versions:
        raise ValueError(
            f"weight_versions {shown(spans)} do not cover all {count} output tokens; {_FIX}"
        )
    return [v for v in versions if v is not None]


def _version(text: str) -> int:
    """Returns the number of a server's weight version, 0 for the weights it started with. Raises
    ValueError for other text."""
    try:
        return 0 if text == INITIAL_VERSION else int(text)
    except ValueError:
        raise ValueError(
            f"server weight_version {text!r} is not a number: only megarl may update its weights"
        ) from None
