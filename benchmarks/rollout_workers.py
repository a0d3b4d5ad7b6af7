"""Measures how many episodes the rollout client drives, by rollout.workers.

    python benchmarks/rollout_workers.py [--workers 0 1 2 4] [--concurrent 256 2048] [--seconds 8]

A stub server in another process answers every request at once, with a group of 4 answers of 64
tokens. Each number of workers has its client; all are open at the same time, and take turns: each
submits rows so that as many episodes are in flight as --concurrent says, for --seconds. Beside it a
coroutine in the driver's event loop sleeps 5 ms at a time and notes how late it wakes. Prints a
Markdown table:

episodes/s     that were handed out to the caller
of 0 workers   over those without workers
lag, ms        of the driver's event loop, median and 99th percentile
driver         CPU time of the driver's process over the wall time: 1.0 is a whole core
ms             CPU time of the driver's process for an episode
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from stub_server import stub_server

from megarl.api.batch import Padded
from megarl.api.inference import InferenceEngine, RolloutWorkflow
from megarl.api.records import ModelRequest
from megarl.config.rollout import GenerationHyperparameters, RolloutConfig
from megarl.rollout.client import RemoteSGLangEngine

GROUP, ANSWER, PROMPT = 4, 64, 64
PROBE = 0.005  # seconds


class Ask(RolloutWorkflow):
    """Makes one request for a group, and a batch of its answers."""

    gconfig = GenerationHyperparameters(n_samples=GROUP, max_new_tokens=ANSWER, seed=1)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Padded:
        """Returns the group, [GROUP, PROMPT + ANSWER]."""
        prompt = list(range(1, PROMPT + 1))
        request = ModelRequest(rid="r", input_ids=prompt, gconfig=self.gconfig)
        found = await engine.agenerate_many([request] * GROUP)
        ids = torch.tensor([prompt + r.output_tokens for r in found])
        written = torch.zeros_like(ids, dtype=torch.bool)
        written[:, PROMPT:] = True
        logprobs = torch.zeros(ids.shape)
        logprobs[:, PROMPT:] = torch.tensor([r.output_logprobs for r in found])
        versions = torch.where(written, engine.get_version(), -1).to(torch.int32)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(written),
            "loss_mask": written,
            "logprobs": logprobs,
            "versions": versions,
            "rewards": torch.zeros(GROUP),
        }


@contextmanager
def open_client(address: str, workers: int, concurrent: int) -> Iterator[RemoteSGLangEngine]:
    """Yields a client whose episodes are run by so many workers."""
    client = RemoteSGLangEngine(
        RolloutConfig(
            addresses=[address], workers=workers, max_concurrent_rollouts=concurrent, affinity=0
        )
    )
    client.initialize()
    try:
        yield client
    finally:
        client.destroy()


async def probe(late: list[float]) -> None:
    """Notes how late this loop wakes a coroutine, in ms, until it is cancelled."""
    while True:
        due = time.perf_counter() + PROBE
        await asyncio.sleep(PROBE)
        late.append(1000 * (time.perf_counter() - due))


def measure(client: RemoteSGLangEngine, concurrent: int, seconds: float) -> dict[str, float]:
    """Returns rate, lag and CPU of so many seconds, behind a part that is not counted."""
    flow, late, row = Ask(), list[float](), 0
    step = max(1, concurrent // 8)

    def submit(count: int) -> None:
        nonlocal row
        for _ in range(count):
            client.submit({"row_id": row}, flow)
            row += 1

    submit(concurrent)
    for _ in range(8):  # all workers have the workflow, all connections are open
        client.wait(step)
        submit(step)
    probing = client.opened().loop.submit(probe(late))
    begun, cpu, done = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - begun < seconds:
        client.wait(step)
        submit(step)
        done += step
    wall = time.perf_counter() - begun
    cpu = time.process_time() - cpu
    client.wait(concurrent)
    probing.cancel()  # only now: a loop that is late by all these seconds has woken it by then
    cuts = statistics.quantiles(late, n=100)
    return {"rate": done / wall, "p50": cuts[49], "p99": cuts[98], "cpu": cpu / wall}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--concurrent", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--reps", type=int, default=1, help="rounds; the table has medians")
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores; medians of {args.reps} rounds of {args.seconds:g} s\n")
    print(
        "| episodes in flight | workers | episodes/s | of 0 workers | lag p50, ms | p99 | driver "
        "| ms |"
    )
    print("| --- " * 8 + "|", flush=True)
    for concurrent in args.concurrent:
        found: dict[int, list[dict[str, float]]] = {k: [] for k in args.workers}
        with ExitStack() as stack:
            address = stack.enter_context(stub_server(group=GROUP, answer=ANSWER))
            clients = {
                k: stack.enter_context(open_client(address, k, concurrent)) for k in args.workers
            }
            for _ in range(args.reps):
                for k, client in clients.items():
                    found[k].append(measure(client, concurrent, args.seconds))
        middle = {
            k: {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
            for k, rounds in found.items()
        }
        base = middle[args.workers[0]]["rate"]
        for k, m in middle.items():
            print(
                f"| {concurrent} | {k} | {m['rate']:.0f} | {m['rate'] / base:.2f} | "
                f"{m['p50']:.1f} | {m['p99']:.0f} | {m['cpu']:.2f} | "
                f"{1000 * m['cpu'] / m['rate']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
