"""Measures what it saves to bring weights back while the pass runs, not before it.

    python benchmarks/onload.py [--tokens 64 256 1024] [--rounds 7]

An engine of SmolLM2-135M's shape, which rests in host memory, computes the logprobs of one sequence
three ways, in turns within one process: with its weights there, with `onload` before the pass, and
with `onload(behind=True)`. Every round compares the numbers of the three. One thread computes, and
another copies. Prints Markdown: what an onload adds to the pass, and how much of that is hidden.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.train_batch import SIZES, make_model

WAYS = ("there", "before", "behind")
PARAMS = ("params",)


def make(path: Path) -> Any:
    """Returns a frozen engine of the model at `path`."""
    from megarl.config.engine import TrainEngineConfig
    from megarl.engine import MegatronEngine

    engine = MegatronEngine(TrainEngineConfig(path=str(path), dtype="float32"))
    engine.initialize()
    return engine


def timed(engine: Any, way: str, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Returns the seconds of a pass with its onload, and the logprobs."""
    if way != "there":
        engine.offload(PARAMS)
    begun = time.perf_counter()
    if way != "there":
        engine.onload(PARAMS, behind=way == "behind")
    logprobs = engine.forward(batch)
    return time.perf_counter() - begun, logprobs


def measure(engine: Any, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of every round by way. Raises RuntimeError where numbers differ."""
    ids = torch.randint(3, 1000, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    batch = dict(input_ids=ids, attention_mask=torch.ones(1, tokens, dtype=torch.bool))
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        said = {}
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            seconds, said[way] = timed(engine, way, batch)
            if number:
                found[way].append(seconds)
        if not all(torch.equal(said["there"], each) for each in said.values()):
            raise RuntimeError(f"{tokens} tokens: the ways disagree")
    return found


def row(tokens: int, found: dict[str, list[float]]) -> str:
    rounds = list(zip(*found.values(), strict=True))
    there, before, behind = (statistics.median(found[way]) for way in WAYS)
    hidden = statistics.median((b - c) / (b - a) for a, b, c in rounds)
    ratio = statistics.median(b / c for _, b, c in rounds)
    times = " | ".join(f"{seconds:.3f}" for seconds in (there, before, behind))
    return f"| {tokens} | {times} | {ratio:.2f} | {100 * hidden:.0f} % |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=7, help="after one to warm up")
    args = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MEGARL_DEVICE="cpu")
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    torch.set_num_threads(1)
    logging.getLogger("megarl").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        make_model(SIZES["135m"], Path(folder))
        engine = make(Path(folder))
        print(f"fp32, CPU, medians of {args.rounds} rounds\n")
        print("| tokens | weights there, s | onload before | behind | before / behind | hidden |")
        print("|---|---|---|---|---|---|", flush=True)
        for tokens in args.tokens:
            print(row(tokens, measure(engine, tokens, args.rounds)), flush=True)
        engine.destroy()


if __name__ == "__main__":
    main()
