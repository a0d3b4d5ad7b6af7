"""Waits for generation servers: until all of them are healthy, until all serve some weights."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from megarl.api.records import WeightUpdateMeta
from megarl.config.recipe_engines import ADDRESSES_ENV
from megarl.rollout.server_pool import POLL_INTERVAL, PROBE_TIMEOUT, ServerPool, gone, silent
from megarl.utils.http import STRANGER, HttpError, shown


async def wait_healthy(pool: ServerPool, setup_timeout: float) -> None:
    """Returns once every server is healthy and speaks the protocol.

    Raises RuntimeError with every cause after `setup_timeout` seconds, and at once for an answer
    that no server of ours gives while it starts.
    """
    deadline = time.monotonic() + setup_timeout
    while True:
        left = deadline - time.monotonic()
        patience = max(1.0, min(PROBE_TIMEOUT, left))
        down = await pool.unhealthy(timeout=patience)
        if not down:
            await pool.check_protocol(timeout=patience)
            return
        for error in down.values():
            if 400 <= (error.status or 0) < 500:
                raise RuntimeError(f"{error}: {STRANGER}")
        if left <= POLL_INTERVAL:
            causes = "\n  ".join(map(str, down.values()))
            raise RuntimeError(
                f"{len(down)} of {len(pool.addresses)} generation servers were not reachable "
                f"within rollout.setup_timeout={setup_timeout:g} s:\n  {causes}\n"
                f"Start them, correct rollout.addresses or {ADDRESSES_ENV}, or raise "
                "rollout.setup_timeout if they are still loading."
            )
        await asyncio.sleep(POLL_INTERVAL)


async def wait_for_version(pool: ServerPool, meta: WeightUpdateMeta, patience: float) -> None:
    """Returns once every server of the pool reports `meta.version`; drops those that are gone or
    silent for `patience` seconds. Raises TimeoutError after `meta.timeout` seconds.
    """
    wanted = str(meta.number)
    deadline = time.monotonic() + meta.timeout
    while True:
        left = deadline - time.monotonic()
        infos = await pool.everywhere("GET", "/model_info", timeout=max(1.0, min(patience, left)))
        pool.drop(gone(infos) if left < patience else silent(infos))
        late = {a: _served(info) for a, info in infos.items() if _served(info) != wanted}
        late = {a: what for a, what in late.items() if a in pool.addresses}
        if not late:
            pool.serves(meta.number)
            return
        if left <= POLL_INTERVAL:
            who = "; ".join(f"{a} serves {what}" for a, what in late.items())
            raise TimeoutError(
                f"weights of version {wanted} did not reach {len(late)} of {len(infos)} "
                f"servers within weight_sync.timeout={meta.timeout:g} s: {who}"
            )
        await asyncio.sleep(POLL_INTERVAL)


async def context_length(pool: ServerPool) -> int | None:
    """Returns the smallest context of the servers, in tokens; None where none of them says."""
    found = await pool.everywhere("GET", "/server_info", timeout=PROBE_TIMEOUT)
    known = [info.get("context_length") for info in found.values() if isinstance(info, dict)]
    return min((n for n in known if isinstance(n, int)), default=None)


async def check_routes(pool: ServerPool) -> None:
    """Raises RuntimeError naming the servers that do not return the routes of all tokens."""
    found = await pool.everywhere("GET", "/server_info", timeout=PROBE_TIMEOUT)
    wrong = {address: why for address, info in found.items() if (why := _without_routes(info))}
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


def _served(info: Any) -> str:
    """Returns the weight version of a /model_info answer, or why there is none."""
    if not isinstance(info, dict):
        return f"nothing ({info if isinstance(info, HttpError) else shown(info)})"
    return str(info.get("weight_version"))
