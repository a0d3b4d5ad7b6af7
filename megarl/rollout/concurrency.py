"""Adapts how many episodes are in flight to the servers' queues (`rollout.max_queue`).

A request that waits in a server's queue gains nothing: its episode could begin later, with newer
weights. Too few requests leave the servers idle. So the bound grows by a little at every look at
which no queue is long and the bound was reached, and falls by a part where a queue is too long, as
TCP adapts its window.

Only the number of episodes in flight changes. Which may begin, and which make a batch, is the
staleness bound's to say; in a synchronous run the samples are the same, later or sooner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from megarl.observability.logging import get_logger
from megarl.rollout.generation import Generator
from megarl.rollout.pipeline import Pipeline
from megarl.rollout.servers import PROBE_TIMEOUT, ServerPool
from megarl.utils.http import HttpError

log = get_logger(__name__)

LOOK_EVERY = 1.0  # seconds
SHRINK = 0.75
GROW = 1 / 16  # of the bound, at least 1


def adapted(bound: int, running: int, queues: Mapping[str, int], max_queue: int) -> int:
    """Returns how many episodes may be in flight from now on, at least one for each server.

    bound: how many may now, of which `running` are. queues: requests that wait, by server.
    """
    longest = max(queues.values())
    if longest > max_queue:
        # what runs beyond a bound that has just shrunk is no reason to let more run
        return max(len(queues), int(SHRINK * min(bound, running)))
    if longest == 0 and running >= bound:
        return bound + max(1, int(GROW * bound))
    return bound


async def adapt(pool: ServerPool, samples: Generator, pipeline: Pipeline, max_queue: int) -> None:
    """Adapts the pipeline's bound until it is cancelled. Where servers do not report their queues,
    or a look fails, it says so and leaves the bound as it is."""
    try:
        while await _look(pool, samples, pipeline, max_queue):
            await asyncio.sleep(LOOK_EVERY)
        log.warning("rollout.max_queue=%d: the servers do not report their queues", max_queue)
    except Exception:  # nobody awaits this task, and a run goes on with the bound that it has
        log.exception("rollout.max_queue=%d: the bound is adapted no more", max_queue)


async def _look(pool: ServerPool, samples: Generator, pipeline: Pipeline, max_queue: int) -> bool:
    """Adapts the bound once; returns False where no server can report its queue."""
    if samples.held:  # a pause fills queues, and says nothing of the servers
        return True
    answers = await pool.everywhere("GET", "/v1/loads?include=core", timeout=PROBE_TIMEOUT)
    queues = waiting(answers)
    if queues and not samples.held:
        with pipeline.changed:
            now = pipeline.staleness
            now.max_concurrent = adapted(now.max_concurrent, now.running, queues, max_queue)
        pipeline.start_soon()
    return bool(queues) or not any(_refused(a) for a in answers.values())


def waiting(answers: Mapping[str, Any]) -> dict[str, int]:
    """Returns the requests that wait at each server, of those that report it. Replicas of one
    server have a queue each; the longest counts."""
    found = {}
    for address, answer in answers.items():
        loads = answer.get("loads") if isinstance(answer, dict) else None
        queued = [load["num_waiting_reqs"] for load in loads or () if "num_waiting_reqs" in load]
        if queued:
            found[address] = max(queued)
    return found


def _refused(answer: Any) -> bool:
    return isinstance(answer, HttpError) and answer.status is not None
