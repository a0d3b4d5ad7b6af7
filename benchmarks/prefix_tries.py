"""Measures a step that computes shared prefixes once (mb_spec.share_prefixes) beside a flat one.

    python benchmarks/prefix_tries.py [--sizes 5m 20m] [--rounds 5] [--threads 2] [--quick]

Two engines start from the same weights and train on the same batches, one on whole sequences, one
on their tries, in turns within one process, with one token budget for micro-batches. Every round
compares losses and gradient norms, so that the work is the same. Five sets of sequences:

grpo      groups of 16 samples with a prompt as long as an answer
little    the same with a prompt of an eighth
agent     episodes of 10 turns, each of which goes on where the one before ended
thinking  the same, but what a turn thought is left out of the history of the next: a fork a turn
apart     sequences that share nothing: what looking for prefixes costs

Prints Markdown: tokens of the sequences for each that a step computes, the steps' speed against the
flat ones, the share of the ratio that becomes speed, how many micro-batches each needs, and memory
by count: the bytes of all tensors that a micro-batch's forward leaves to its backward (weights,
gradients and optimizer state are there before), summed over micro-batches and of the largest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.train_batch import SIZES, make_model, policy_gradient

Batch = dict[str, torch.Tensor]
BUDGET = 4096  # tokens of a micro-batch
SAMPLES, TURNS = 16, 10


@dataclass(frozen=True)
class Spent:
    """Holds the seconds that a piece of work took, by the clock and of the processors."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Found:
    """Holds what every round took, by engine, and what one step computes."""

    flat: list[Spent] = field(default_factory=list)
    tries: list[Spent] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    micro_batches: list[tuple[int, int]] = field(default_factory=list)
    held: dict[bool, list[int]] = field(default_factory=dict)  # bytes of each micro-batch, by share


def timed(work: Callable[[], Any]) -> tuple[Spent, Any]:
    """Returns what `work` takes, and what it returns."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu), result


def grpo(new: Any, unit: int) -> list[list[int]]:
    prompt = new(4 * unit)
    return [prompt + new(4 * unit) for _ in range(SAMPLES)]


def little(new: Any, unit: int) -> list[list[int]]:
    prompt = new(unit)
    return [prompt + new(7 * unit) for _ in range(SAMPLES)]


def agent(new: Any, unit: int) -> list[list[int]]:
    """Every turn has an answer and an observation of one unit each."""
    history, rows = new(2 * unit), []
    for _ in range(TURNS):
        rows.append(history + new(unit))
        history = rows[-1] + new(unit)
    return rows


def thinking(new: Any, unit: int) -> list[list[int]]:
    """Every turn thinks and answers, half a unit each; two units of observation follow."""
    history, rows = new(4 * unit), []
    for _ in range(TURNS):
        answer = new(unit // 4)
        rows.append(history + new(unit // 4) + answer)
        history = history + answer + new(2 * unit - unit // 4)
    return rows


def apart(new: Any, unit: int) -> list[list[int]]:
    return [new(8 * unit) for _ in range(SAMPLES)]


# name -> how a group or an episode is made, and how many there are
SETS = {
    "grpo": (grpo, 2),
    "little": (little, 2),
    "agent": (agent, 3),
    "thinking": (thinking, 3),
    "apart": (apart, 1),
}


def batch_of(name: str, vocab: int, unit: int, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)

    def new(n: int) -> list[int]:
        return torch.randint(3, vocab, (n,), generator=g).tolist()

    make, groups = SETS[name]
    found = [make(new, unit) for _ in range(groups)]
    rows = [row for group in found for row in group]
    width = max(map(len, rows))
    mask = torch.arange(width) < torch.tensor([len(r) for r in rows])[:, None]
    loss_mask = mask.clone()
    loss_mask[:, 0] = False
    return dict(
        input_ids=torch.tensor([[*r, *[0] * (width - len(r))] for r in rows]),
        attention_mask=mask,
        loss_mask=loss_mask,
        advantages=torch.randn(len(rows), generator=g),
        group_ids=torch.repeat_interleave(torch.arange(groups), len(rows) // groups),
    )


def make_engine(path: Path, share: bool) -> Any:
    from megarl.config.engine import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
    from megarl.engine import MegatronEngine

    engine = MegatronEngine(
        TrainEngineConfig(
            path=str(path),
            dtype="float32",
            mb_spec=MicroBatchSpec(max_tokens_per_mb=BUDGET, share_prefixes=share),
            optimizer=OptimizerConfig(lr=1e-5),
        )
    )
    engine.initialize(None)
    return engine


def step(engine: Any, batch: Batch, calls: list[int]) -> Any:
    def loss(outputs: Batch, b: Batch) -> Any:
        calls.append(len(b["input_ids"]))
        with torch.profiler.record_function("loss"):
            return policy_gradient(outputs, b)

    return engine.train_batch(batch, loss, lambda b: float(b["loss_mask"].sum()))


def bytes_held(work: Callable[[], Any]) -> list[int]:
    """Returns the bytes that `work` has allocated and not freed as each loss begins."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        work()
    held, found = 0, []
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
        elif event.name() == "loss":
            found.append(held)
    return found


def measure(path: Path, name: str, vocab: int, unit: int, rounds: int) -> Found:
    """Returns what `rounds` rounds take after one to warm up. Raises RuntimeError where the two
    steps' losses or gradient norms differ by more than rounding."""
    engines = {share: make_engine(path, share) for share in (False, True)}
    found = Found()
    for number in range(rounds + 1):
        batch, spent, stats, calls = batch_of(name, vocab, unit, number), {}, {}, {}
        for share in (number % 2 == 0, number % 2 == 1):
            calls[share] = []
            work = engines[share], batch, calls[share]
            spent[share], stats[share] = timed(lambda work=work: step(*work))
        for key in ("loss", "grad_norm"):
            a, b = (stats[share][key] for share in (False, True))
            if abs(a - b) > 1e-4 * max(1.0, abs(a)):
                raise RuntimeError(f"{name} round {number}: {key} {a} and {b}: not the same work")
        if number:
            found.flat.append(spent[False])
            found.tries.append(spent[True])
            found.ratio.append(stats[True]["prefix_ratio"])
            found.micro_batches.append((len(calls[False]), len(calls[True])))
    for share, engine in engines.items():
        found.held[share] = bytes_held(lambda e=engine: step(e, batch, []))
    for engine in engines.values():
        engine.destroy()
    return found


def row(size: str, name: str, tokens: int, found: Found) -> str:
    def speed(kind: str) -> list[float]:
        pairs = zip(found.flat, found.tries, strict=True)
        return sorted(getattr(a, kind) / getattr(b, kind) for a, b in pairs)

    ratio = statistics.median(found.ratio)
    wall, cpu = speed("wall"), speed("cpu")
    flat, tries = found.micro_batches[0]
    cells = [size, name, f"{tokens}", f"{tokens / ratio:.0f}", f"{ratio:.2f}"]
    cells += [f"{statistics.median(s):.2f} ({s[0]:.2f}-{s[-1]:.2f})" for s in (wall, cpu)]
    cells += [f"{statistics.median(cpu) / ratio:.2f}", f"{flat} / {tries}"]
    for of in (sum, max):
        a, b = (of(found.held[share]) for share in (False, True))
        cells.append(f"{a / 2**20:.0f} / {b / 2**20:.0f} ({a / b:.2f})")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["5m", "20m"], choices=list(SIZES))
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=list(SETS))
    parser.add_argument("--unit", type=int, default=32, help="tokens of a turn's answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="after one to warm up")
    parser.add_argument("--quick", action="store_true", help="5m only, short sequences")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.unit = ["5m"], 8
    os.environ.update(OMP_NUM_THREADS=str(args.threads), MEGARL_DEVICE="cpu")
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", THP_MEM_ALLOC_ENABLE="1")
    torch.set_num_threads(args.threads)
    print(f"fp32, CPU, {args.threads} threads, micro-batches of {BUDGET} tokens, median (min-max) "
          f"of {args.rounds} rounds\n")  # fmt: skip
    print("| model | set | tokens | computed | ratio | speed, wall | CPU | CPU speed / ratio "
          "| micro-batches | MiB held, all of them | the largest |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            model, vocab = Path(folder) / size, SIZES[size].config["vocab_size"]
            make_model(SIZES[size], model)
            for name in args.sets:
                tokens = int(batch_of(name, vocab, args.unit, 0)["attention_mask"].sum())
                found = measure(model, name, vocab, args.unit, args.rounds)
                print(row(size, name, tokens, found), flush=True)


if __name__ == "__main__":
    main()
