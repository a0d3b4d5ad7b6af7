"""Spells the experts that a server's routers chose, as SGLang's meta_info["routed_experts"] has
them: base64 of int32 [n,L,k], positions `routed_experts_start_len` to the last but one.

L layers of the model, numbered as in its checkpoint and with 0 in dense ones, k experts per token.
The last token has no routes yet: no pass has read it.

A position's routes are those of the pass that read it and predicted the next token. So a token that
a server wrote keeps the routes that were behind it, whatever a later request recomputes: where they
did not come with it, they stay unknown.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.utils.http import HttpError, shown

UNKNOWN = -1


@dataclass(frozen=True, kw_only=True)
class RouteShape:
    """Says which routes a model has: `top_k` of `experts` in each of `layers`."""

    layers: int
    experts: int
    top_k: int

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the smallest integers that hold an expert's number, and UNKNOWN."""
        bounds = {torch.int8: 1 << 7, torch.int16: 1 << 15, torch.int32: 1 << 31}
        return next(dtype for dtype, bound in bounds.items() if self.experts <= bound)

    def unknown(self, n: int) -> Tensor:
        """Returns the routes [n,L,k] of n tokens of which nothing is known."""
        return torch.full((n, self.layers, self.top_k), UNKNOWN, dtype=self.dtype)


def encode(routes: Tensor) -> str:
    """Returns the text of routes [n,L,k]."""
    return base64.b64encode(routes.to(torch.int32).contiguous().numpy().tobytes()).decode()


def decode(text: object, shape: RouteShape) -> Tensor:
    """Returns the routes [n,L,k] of a text, in `shape.dtype`. Raises ValueError for what is none,
    or is of a model with other layers or experts."""
    each = 4 * shape.layers * shape.top_k
    try:
        raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b"?"
    except ValueError:
        raw = b"?"
    if len(raw) % each:
        raise ValueError(
            f"routed_experts are not the base64 of int32 numbers, {shape.top_k} in each of "
            f"{shape.layers} layers; does the server run the model that is trained?"
        )
    flat = torch.frombuffer(bytearray(raw), dtype=torch.int32) if raw else torch.empty(0)
    if len(flat) and not (int(flat.min()) >= 0 and int(flat.max()) < shape.experts):
        raise ValueError(
            f"routed_experts names the experts {int(flat.min())} to {int(flat.max())} of a model "
            f"that has {shape.experts}"
        )
    return flat.view(-1, shape.layers, shape.top_k).to(shape.dtype)


class Routes:
    """Holds the routes of a sample from position `start` on.

    prompt_len: tokens of the request that began it; their routes may be of any pass.
    known: the routes [n,L,k] of the positions that a pass has read, -1 where they are unknown.
    """

    def __init__(self, shape: RouteShape, *, start: int, prompt_len: int) -> None:
        self.shape, self.start, self.prompt_len = shape, start, prompt_len
        self.known = shape.unknown(0)

    @property
    def end(self) -> int:
        """Returns the first position whose routes are not decided yet."""
        return self.start + len(self.known)

    def begin_with(self, kept: Tensor | None, written: int) -> None:
        """Takes the routes of prompt and `written` tokens that an earlier run has kept, unless
        there are none, or they are another model's."""
        like = self.shape.unknown(max(0, self.prompt_len + written - 1 - self.start))
        if kept is not None and (kept.shape, kept.dtype) == (like.shape, like.dtype):
            self.known = kept

    def absorb(self, meta: Mapping[str, Any], *, sent: int, got: int, first: int) -> None:
        """Takes the meta_info of an answer of `got` tokens to `sent`, which was asked for routes
        from position `first` on. Raises ValueError for another number of routes than of tokens."""
        text = meta.get("routed_experts")
        if not got and text is None:  # of a request that never ran
            return
        end = max(sent + got - 1, self.end)
        known = self.shape.unknown(end - self.end)
        if text is not None:
            routes = decode(text, self.shape)
            if len(routes) != max(0, sent + got - 1 - first):
                raise ValueError(
                    f"routed_experts has {len(routes)} positions, not the {sent + got - 1 - first} "
                    f"from {first} to the last token but one"
                )
            known = routes[self.end - first :]
            self._forget(known, self.prompt_len, sent)
            self._forget(known, sent, sent + _recomputed(meta))
        self.known = torch.cat([self.known, known])

    def _forget(self, known: Tensor, first: int, stop: int) -> None:
        """Makes those of `known` unknown that belong to tokens `first` to `stop`, which an earlier
        pass has written: token t was predicted at position t - 1."""
        known[max(0, first - 1 - self.end) : max(0, stop - 1 - self.end)] = UNKNOWN


def _recomputed(meta: Mapping[str, Any]) -> int:
    """Returns how many tokens of an answer were read again under newer weights than wrote them:
    after a retraction the server computes all before it anew."""
    spans = meta.get("weight_versions") or []
    return int(spans[-1]["start"]) if meta.get("num_retractions") and len(spans) > 1 else 0


def check_routes(infos: Mapping[str, Any]) -> None:
    """Raises RuntimeError naming the servers, of {address: its /server_info, or its HttpError},
    that do not return the routes of all tokens."""
    wrong = {address: why for address, info in infos.items() if (why := _without_routes(info))}
    if wrong:
        raise RuntimeError(
            "router_replay=rollout needs the routes of the servers: "
            + "; ".join(f"{address} {why}" for address, why in wrong.items())
        )


# flag of SGLang -> values with which it returns routes, and why it does not with others
_ROUTES: dict[str, tuple[tuple[Any, ...], str]] = {
    "enable_return_routed_experts": ((True,), "was started without --enable-return-routed-experts"),
    "pp_size": ((None, 1), "returns those of the layers of its last pipeline stage alone"),
    "enable_hierarchical_cache": ((None, False), "forgets them with the KV cache that it offloads"),
    "enable_lmcache": ((None, False), "forgets them with the KV cache that it offloads"),
    "disaggregation_mode": ((None, "null"), "forgets those of prompts that another server reads"),
}


def _without_routes(info: Any) -> str:
    """Returns why a server of this /server_info returns no routes; "" where it does."""
    if not isinstance(info, dict):
        return f"says nothing of its flags ({info if isinstance(info, HttpError) else shown(info)})"
    wrong = (why for flag, (good, why) in _ROUTES.items() if info.get(flag) not in good)
    return next(wrong, "")
