"""Measures tokens/s of the embedded server beside HF's batched `model.generate`, on CPU.

    python benchmarks/server_throughput.py [--big] [--reps 5] [--threads N]

Same weights, prompts, sampling (temperature 1) and threads, float32. The server gets one HTTP
request for every prompt, all at once, and answers with logprobs, as in RL; `generate` gets one
left-padded batch, without logprobs. "ragged": every request has its own max_new_tokens, and
`generate` runs until the longest; only wanted tokens count. The two take turns, and the ratio is
the median over the turns of server / generate. The last column is the batch-invariant mode, once,
beside the normal one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megarl.config.rollout import ServerConfig
from megarl.rollout.server_process import start_server

VOCAB, PAD, CONTEXT = 264, 0, 256
CONCURRENCY = (1, 16, 64)
# hidden, layers, head_dim
SIZES = {"1M": (128, 5, 32), "5M": (256, 6, 32), "135M": (768, 19, 64)}
NEW_TOKENS = 64  # equal; ragged draws from 1/8 of it to twice it
MIN_SECONDS = 1.0  # of a turn: small requests are repeated


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    new_tokens: int


def make_requests(count: int, *, ragged: bool) -> list[Request]:
    rng = random.Random(count)
    requests = []
    for _ in range(count):
        prompt = [rng.randrange(4, VOCAB) for _ in range(rng.randint(12, 24))]
        wanted = rng.randint(NEW_TOKENS // 8, 2 * NEW_TOKENS) if ragged else NEW_TOKENS
        requests.append(Request(prompt, wanted))
    return requests


def make_model(path: Path, size: str) -> int:
    hidden, layers, head_dim = SIZES[size]
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=3 * hidden, head_dim=head_dim,
        num_hidden_layers=layers, num_attention_heads=hidden // head_dim,
        num_key_value_heads=hidden // head_dim // 2, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, eos_token_id=None, bos_token_id=None, pad_token_id=PAD,
    )  # fmt: skip
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(path)
    return sum(p.numel() for p in model.parameters())


class Server:
    """A server process, and a client in this one that keeps its connections."""

    def __init__(self, address: str, runner: asyncio.Runner) -> None:
        self.url, self.runner = f"http://{address}/generate", runner
        self.session = runner.run(_session())

    def seconds(self, requests: list[Request]) -> float:
        return self.runner.run(self._run(requests))

    def close(self) -> None:
        self.runner.run(self.session.close())

    async def _run(self, requests: list[Request]) -> float:
        start = time.perf_counter()
        counts = await asyncio.gather(*(self._one(r) for r in requests))
        seconds = time.perf_counter() - start
        assert counts == [r.new_tokens for r in requests]
        return seconds

    async def _one(self, request: Request) -> int:
        params = {"temperature": 1.0, "max_new_tokens": request.new_tokens, "ignore_eos": True}
        body = {"input_ids": request.prompt, "sampling_params": params, "return_logprob": True}
        async with self.session.post(self.url, json=body) as response:
            answer = await response.json()
        return len(answer["meta_info"]["output_token_logprobs"])


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


class Generate:
    def __init__(self, path: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def seconds(self, requests: list[Request]) -> float:
        start = time.perf_counter()
        width, longest = (max(n) for n in zip(*((len(r.prompt), r.new_tokens) for r in requests)))
        ids = torch.tensor([[PAD] * (width - len(r.prompt)) + r.prompt for r in requests])
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in requests])
        out = self.model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=longest, eos_token_id=None, pad_token_id=PAD,
        )  # fmt: skip
        assert out.shape == (len(requests), width + longest)
        return time.perf_counter() - start


def tokens_per_second(side: Server | Generate, requests: list[Request], repeats: int) -> float:
    seconds = sum(side.seconds(requests) for _ in range(repeats))
    return repeats * sum(r.new_tokens for r in requests) / seconds


def measure(sides: dict[str, Server | Generate], requests: list[Request], reps: int) -> list[str]:
    """Returns cells: tok/s of server and generate, server / generate, deterministic / server."""
    for name, side in sides.items():
        if name != "deterministic":
            side.seconds(requests)  # warm-up
    repeats = max(1, round(MIN_SECONDS / sides["generate"].seconds(requests)))
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for rep in range(reps):
        for name, side in sides.items():
            if name != "deterministic":
                rates[name].append(tokens_per_second(side, requests, repeats))
            elif rep == 0:  # once: it is many times slower, which no noise hides
                rates[name].append(tokens_per_second(side, requests, 1))
    middle = {name: statistics.median(r) for name, r in rates.items()}

    def ratio(a: str, b: str) -> float:
        return statistics.median(x / y for x, y in zip(rates[a], rates[b]))

    return [
        f"{middle['server']:.0f}", f"{middle['generate']:.0f}",
        f"**{ratio('server', 'generate'):.2f}**", f"{ratio('deterministic', 'server'):.2f}",
    ]  # fmt: skip


@contextlib.contextmanager
def servers(path: Path, threads: int) -> Iterator[dict[str, Server]]:
    """Yields a normal server and a deterministic one."""
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        running = {}
        for name in ("server", "deterministic"):
            config = ServerConfig(
                context_length=CONTEXT, threads=threads, deterministic=name == "deterministic"
            )
            process = start_server(
                config, model_path=str(path), dtype="float32", log_path=path / f"{name}.log"
            )
            stack.callback(process.stop)
            running[name] = Server(process.address, runner)
            stack.callback(running[name].close)
        yield running


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--big", action="store_true", help="135M parameters, too (minutes)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1M", "5M"])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers, too
    torch.set_num_threads(args.threads)
    os.environ |= {"MEGARL_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    head = ["parameters", "requests", "lengths", "server tok/s", "generate tok/s", "ratio",
            "deterministic"]  # fmt: skip
    print(f"{args.threads} threads\n\n| " + " | ".join(head) + " |")
    print("|" + " --- |" * len(head), flush=True)
    for size in [*args.sizes, *(["135M"] if args.big else [])]:
        with tempfile.TemporaryDirectory() as tmp:
            path = Path(tmp) / "model"
            numel = make_model(path, size)
            with servers(path, args.threads) as ours:
                sides = {**ours, "generate": Generate(path)}
                for ragged in (False, True):
                    for count in CONCURRENCY if not ragged else CONCURRENCY[1:]:
                        cells = measure(sides, make_requests(count, ragged=ragged), args.reps)
                        name = "ragged" if ragged else "equal"
                        row = [f"{numel / 1e6:.1f}M", str(count), name, *cells]
                        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
