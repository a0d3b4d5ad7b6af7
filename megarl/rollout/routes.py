"""Collects the experts that a server's routers chose for the tokens of one sample.

A position's routes are those of the pass that read it and predicted the next token. So a token that
a server wrote keeps the routes that were behind it, whatever a later request recomputes: where they
did not come with it, they stay unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megarl.rollout.servers import PROBE_TIMEOUT, ServerPool
from megarl.utils.http import HttpError, shown
from megarl.wire.routes import UNKNOWN, RouteShape, decode


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


async def check_routes(pool: ServerPool) -> None:
    """Raises RuntimeError naming the servers that do not return the routes of all tokens."""
    infos = await pool.everywhere("GET", "/server_info", timeout=PROBE_TIMEOUT)
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
