"""Measures the generation client: what a request costs it, and what a pause costs generation.

    python benchmarks/client.py [--requests 2000] [--reps 3] [--pauses] [--seconds 8]

By itself it asks a stub in another process, which answers 64 tokens at once, in turn with a plain
aiohttp client that posts the same bytes. With --pauses, two embedded servers answer long-tailed
requests while their weights are updated every second, once for each weight_sync.pause_mode, in
turns. Each prints a Markdown table:

requests/s     of 64 that are under way at once
CPU, ms        of the client's process per request, JSON included
tokens/s       with pauses, and over those of `abort` in the same round (medians)
paused, s      from the pause to the end of the resume, the update of a tiny model included
wait           the longest that one pause took to begin
versions       answers that tokens of more than one version are in
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from megarl.api.records import ModelRequest, WeightUpdateMeta
from megarl.config.rollout import (
    GenerationHyperparameters,
    RolloutConfig,
    ServerConfig,
    WeightSyncConfig,
)
from megarl.rollout.client import RemoteSGLangEngine
from megarl.rollout.server_process import start_server
from megarl.utils.http import call_json

sys.path.insert(0, str(Path(__file__).resolve().parent))
from server_throughput import make_model
from stub_server import stub_server

ANSWER, PROMPT, AT_ONCE = 64, 256, 64
MODES = {"abort": "flush", "drain": "flush", "retract": "flush", "in_place": "keep"}
EVERY = 1.0  # seconds between updates


async def rates(count: int, ask: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
    """Returns requests per second and milliseconds of CPU per request."""

    async def one() -> None:
        for _ in range(count // AT_ONCE):
            await ask()

    begun, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one() for _ in range(AT_ONCE)))
    done = count // AT_ONCE * AT_ONCE
    seconds = time.perf_counter() - begun
    return done / seconds, 1000 * (time.process_time() - cpu) / done


def measure_requests(count: int, reps: int) -> None:
    """Prints what the client costs beside bare requests."""
    gconfig = GenerationHyperparameters(max_new_tokens=ANSWER)
    request = ModelRequest(rid="r", input_ids=list(range(PROMPT)), gconfig=gconfig, seed=1)
    body = {"input_ids": [request.input_ids], "sampling_params": [{"max_new_tokens": ANSWER}]}
    found: dict[str, list[tuple[float, float]]] = {"plain aiohttp": [], "client": []}
    with stub_server(group=1, answer=ANSWER) as address:
        client = RemoteSGLangEngine(RolloutConfig(addresses=[address], setup_timeout=30))
        client.initialize()

        async def plain() -> tuple[float, float]:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:

                async def ask() -> None:
                    async with session.post(f"http://{address}/generate", json=body) as answer:
                        json.loads(await answer.read())

                return await rates(count, ask)

        async def ours() -> tuple[float, float]:
            return await rates(count, lambda: client.agenerate(request))

        for _ in range(reps):
            found["plain aiohttp"].append(asyncio.run(plain()))
            # in the client's own loop, as workflows are
            found["client"].append(client.opened().loop.run(ours(), timeout=600))
        client.destroy()
    print("| client | requests/s | CPU, ms |\n| --- | --- | --- |")
    for name, rows in found.items():
        rate, cpu = (statistics.median(column) for column in zip(*rows))
        print(f"| {name} | {rate:.0f} | {cpu:.2f} |", flush=True)


def measure_pauses(seconds: float, reps: int) -> None:
    """Prints what each pause mode costs generation."""
    os.environ |= {"MEGARL_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as tmp, ExitStack() as stack:
        path = Path(tmp) / "model"
        make_model(path, "1M")
        addresses = []
        for i in range(2):
            server = start_server(
                ServerConfig(context_length=256, threads=1, max_running_requests=16),
                model_path=str(path), dtype="float32", log_path=Path(tmp) / f"{i}.log",
            )  # fmt: skip
            stack.callback(server.stop)
            addresses.append(server.address)
        for rep in range(reps + 1):  # the first warms up
            for mode in MODES:
                row = one_run(addresses, path, mode, seconds)
                if rep:
                    found[mode].append(row)
    columns = ("tokens/s", "paused, s", "wait", "versions")
    print(f"| pause_mode | {' | '.join(columns)} | over abort |\n|{' --- |' * 6}")
    for mode, rows in found.items():
        cells = [statistics.median(row[c] for row in rows) for c in columns]
        pairs = zip(rows, found["abort"], strict=True)
        ratio = statistics.median(a["tokens/s"] / b["tokens/s"] for a, b in pairs)
        shown = f"{cells[0]:.0f} | {cells[1]:.2f} | {cells[2]:.2f} | {cells[3]:.0%}"
        print(f"| {mode} | {shown} | {ratio:.2f} |", flush=True)


def one_run(addresses: list[str], path: Path, mode: str, seconds: float) -> dict[str, float]:
    """Returns the figures of one mode: answers without end, an update every second."""
    client = RemoteSGLangEngine(
        RolloutConfig(addresses=addresses, kv_after_sync=MODES[mode]),
        weight_sync=WeightSyncConfig(pause_mode=mode),
    )
    client.initialize()
    loop, rng = client.opened().loop, random.Random(1)
    lengths = [min(200, int(16 * rng.paretovariate(1.1))) for _ in range(4096)]
    written: list[tuple[int, int]] = []  # tokens and versions of each answer
    answers = iter(lengths)

    async def write() -> None:
        while True:
            gconfig = GenerationHyperparameters(max_new_tokens=next(answers), ignore_eos=True)
            request = ModelRequest(rid="r", input_ids=list(range(4, 36)), gconfig=gconfig)
            r = await client.agenerate(request)
            written.append((r.output_len, len(set(r.output_versions))))

    async def writers() -> None:
        await asyncio.gather(*(write() for _ in range(32)))

    task = loop.submit(writers())
    begun, pauses, waits, version = time.monotonic(), [], [], 0
    while time.monotonic() - begun < seconds:
        time.sleep(EVERY)
        version += 1
        start = time.monotonic()
        client.pause()
        waits.append(time.monotonic() - start)
        for address in addresses:
            body: dict[str, Any] = {"model_path": str(path), "weight_version": str(version)}
            body |= {"flush_cache": MODES[mode] == "flush"}
            call_json("POST", address, "/update_weights_from_disk", body, timeout=60)
        meta = WeightUpdateMeta(type="disk", path=str(path), version=version)
        client.update_weights(meta).result(60)
        client.resume()
        pauses.append(time.monotonic() - start)
    elapsed = time.monotonic() - begun
    tokens, answered = sum(n for n, _ in written), len(written)
    mixed = sum(versions > 1 for _, versions in written) / answered
    task.cancel()
    client.destroy()
    for address in addresses:
        call_json("POST", address, "/update_weight_version", {"new_version": "default"}, timeout=60)
    return {
        "tokens/s": tokens / elapsed,
        "paused, s": statistics.mean(pauses),
        "wait": max(waits),
        "versions": mixed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--pauses", action="store_true", help="the table of pause modes instead")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run with pauses")
    args = parser.parse_args()
    if args.pauses:
        measure_pauses(args.seconds, args.reps)
    else:
        measure_requests(args.requests, args.reps)


if __name__ == "__main__":
    main()
