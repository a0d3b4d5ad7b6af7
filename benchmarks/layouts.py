"""Measures trained tokens/s and memory of every parallel layout, beside transformers + torch AdamW.

    python benchmarks/layouts.py [--quick] [--models dense moe] [--only tp2 pp2] [--rounds 5]
                                 [--budget 1024]

A layout's processes (up to four, one thread each, fp32 on the CPU, gloo) and one process of Hugging
Face transformers, with as many threads as the layout has processes (or the machine cores), train
the same random model on the same batches with the same loss, token budget, clipping and AdamW
(train_batch.py). Sequences are of equal length, so that nobody pads. The sides take turns, step by
step, so that the ratio means something where the rates do not, and every step's loss and gradient
norm are compared. CPU time, of all processes and threads of a side, is the work; where the ratios
of one process differ, something else ran on the machine. With more processes than cores the ratio
of wall times says what a layout costs in work and waiting, not how it scales.

A pipeline's stages wait for their first micro-batch and after their last. The schedule's bound is
what that leaves of the rate: m v / (m v + p - 1) of the time of p stages of v chunks with m
micro-batches (https://arxiv.org/abs/2104.04473), times the processes that share a core, which work
while others wait. `--budget` sets the tokens of a micro-batch, and so m.

Memory is the peak of resident memory: of the largest process, and of all together.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from train_batch import (
    SIZES,
    STEP_TIMEOUT,
    Case,
    Size,
    ask,
    check_same_work,
    make_model,
    megarl_side,
    running,
    serve_steps,
)

SP: dict[str, Any] = dict(tp=2, sequence_parallel=True)
# name -> (processes, parallel); the remaining degree is data parallelism under ZeRO-1
Layouts = dict[str, tuple[int, dict[str, Any]]]
DENSE: Layouts = {
    "1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, dict(tp=2)),
    "tp2 sp": (2, SP),
    "pp2": (2, dict(pp=2)),
    "pp2 vpp2": (2, dict(pp=2, vpp=2)),
    "cp2": (2, dict(cp=2)),
    "dp4": (4, {}),
    "tp4 sp": (4, dict(tp=4, sequence_parallel=True)),
    "pp4": (4, dict(pp=4)),
    "cp4": (4, dict(cp=4)),
    "tp2 sp, dp2": (4, SP),
    "tp2 sp, pp2": (4, dict(**SP, pp=2)),
    "tp2 sp, cp2": (4, dict(**SP, cp=2)),
    "pp2, dp2": (4, dict(pp=2)),
    "pp2, cp2": (4, dict(pp=2, cp=2)),
    "cp2, dp2": (4, dict(cp=2)),
}
MOE: Layouts = {
    "1": (1, {}),
    "dp2": (2, {}),
    "ep2": (2, dict(ep=2)),
    "etp2": (2, dict(etp=2)),
    "tp2 sp, ep2": (2, dict(**SP, ep=2)),
    "ep4": (4, dict(ep=4)),
    "ep2, dp2": (4, dict(ep=2)),
    "pp2, ep2": (4, dict(pp=2, ep=2)),
    "tp2 sp, ep2, pp2": (4, dict(**SP, ep=2, pp=2)),
    "cp2, ep2": (4, dict(cp=2, ep=2)),
}
MODELS = {"dense": DENSE, "moe": MOE}
EXPERTS: dict[str, Any] = dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=384, norm_topk_prob=True
)


def size(**config: Any) -> Size:
    family = "qwen3_moe" if "num_experts" in config else "qwen3"
    return replace(SIZES["5m"], family=family, config=SIZES["5m"].config | config)


SIZES |= dict(
    dense=size(num_hidden_layers=8),  # four pipeline chunks
    moe=size(num_hidden_layers=4, **EXPERTS),
)


@dataclass(frozen=True)
class Figures:
    """One step's measurements: seconds of wall clock and of CPU, and peak memory in MiB of the
    largest process and of all together."""

    wall: float
    cpu: float
    largest: float
    together: float


class Ranks:
    """The processes of one layout."""

    def __init__(self, case: Case, processes: int, parallel: dict[str, Any]) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(processes):
            ours, theirs = context.Pipe()
            args = (rank, processes, f"{self._folder.name}/store", case, parallel, theirs)
            process = context.Process(target=serve_rank, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers("start")

    def _answers(self, what: str) -> list[Any]:
        deadline = time.monotonic() + STEP_TIMEOUT
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"{what}: rank {rank} gave no answer in {STEP_TIMEOUT:.0f} s")
        return [pipe.recv() for pipe in self._pipes]

    def step(self, number: int) -> tuple[dict[str, float], Figures]:
        for pipe in self._pipes:
            pipe.send(number)
        answers = self._answers(f"step {number}")
        memory = [a["rss_gib"] * 1024 for a in answers]
        wall, cpu = max(a["wall"] for a in answers), sum(a["cpu"] for a in answers)
        return answers[0], Figures(wall, cpu, max(memory), sum(memory))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def serve_rank(
    rank: int, processes: int, store: str, case: Case, parallel: dict[str, Any], pipe: Connection
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes),
        LOCAL_WORLD_SIZE=str(processes), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=processes
    )
    serve_steps(megarl_side(case, parallel), case, pipe)


@contextmanager
def ranks(case: Case, processes: int, parallel: dict[str, Any]) -> Iterator[Ranks]:
    started = Ranks(case, processes, parallel)
    try:
        yield started
    finally:
        started.close()


def compare(
    case: Case, hf: Connection, layout: tuple[int, dict[str, Any]], rounds: int
) -> tuple[list[Figures], list[Figures], float]:
    """Returns (Figures of the layout and of HF for each round but the first, tokens per round)."""
    ours, theirs, tokens = [], [], 0.0
    with ranks(case, *layout) as side:
        for number in range(rounds + 1):
            answer, figures = side.step(number)
            other = ask(hf, "HF", number)
            check_same_work(answer, other, f"{layout} step {number}")
            if number:
                tokens += answer["tokens"]
                memory = other["rss_gib"] * 1024
                ours.append(figures)
                theirs.append(Figures(other["wall"], other["cpu"], memory, memory))
    return ours, theirs, tokens / rounds


def micro_batches(case: Case, layout: tuple[int, dict[str, Any]]) -> int:
    """Returns how many micro-batches a data-parallel replica has in a step."""
    processes, parallel = layout
    size = SIZES[case.size]
    pp, cp = parallel.get("pp", 1), parallel.get("cp", 1)
    rows = len(case.batch(0)["input_ids"]) // (processes // (pp * cp * parallel.get("tp", 1)))
    m = -(-rows // (case.budget * cp // (size.longest // 2)))
    return -(-m // pp) * pp if parallel.get("vpp", 1) > 1 else m


def schedule_bound(case: Case, layout: tuple[int, dict[str, Any]]) -> float:
    """Returns the most of the rate that the pipeline's schedule leaves, 1 without a pipeline."""
    processes, parallel = layout
    p, chunks = parallel.get("pp", 1), micro_batches(case, layout) * parallel.get("vpp", 1)
    return float(min(1.0, processes / case.threads * chunks / (chunks + p - 1)))


def row(model: str, name: str, ours: Sequence[Figures], theirs: Sequence[Figures], tokens: float,
        processes: int, bound: float) -> str:  # fmt: skip
    ratios = sorted(t.wall / o.wall for o, t in zip(ours, theirs, strict=True))
    work = statistics.median(t.cpu / o.cpu for o, t in zip(ours, theirs, strict=True))
    rate = tokens / statistics.median(f.wall for f in ours)
    memory = theirs[-1].largest
    return (
        f"| {model} | {name} | {processes} | {rate:.0f} "
        f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) "
        f"| {bound:.2f} | {work:.2f} "
        f"| {ours[-1].largest:.0f} ({ours[-1].largest / memory:.2f}) "
        f"| {ours[-1].together:.0f} ({ours[-1].together / memory:.2f}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", nargs="+", help="names of layouts")
    parser.add_argument("--rounds", type=int, default=5, help="after one to warm up")
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch")
    parser.add_argument("--quick", action="store_true", help="small batches, two rounds")
    args = parser.parse_args()
    rounds = 2 if args.quick else args.rounds
    os.environ.update(
        MEGARL_DEVICE="cpu", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1",
        TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1", THP_MEM_ALLOC_ENABLE="1",
    )  # fmt: skip
    print(
        f"fp32, {os.cpu_count()} cores, one thread a process, equal lengths; ratios to "
        "transformers (one process, as many threads, at most one a core), median (min-max) of "
        f"{rounds} rounds\n"
    )
    print("| model | layout | processes | tokens/s | tokens/s, ratio | schedule | CPU time, ratio "
          "| MiB of the largest (ratio) | MiB together (ratio) |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            path = Path(folder) / model
            make_model(SIZES[model], path)
            for name, layout in MODELS[model].items():
                if args.only and name not in args.only:
                    continue
                threads = min(layout[0], os.cpu_count() or 1)
                os.environ["OMP_NUM_THREADS"] = str(threads)  # of HF's; ranks set their own
                case = Case(
                    size=model,
                    lengths="equal",
                    model=path,
                    threads=threads,
                    quick=args.quick,
                    given_budget=args.budget,
                )
                with running("HF sorted", case) as hf:
                    ours, theirs, tokens = compare(case, hf, layout, rounds)
                bound = schedule_bound(case, layout)
                print(row(model, name, ours, theirs, tokens, layout[0], bound), flush=True)


if __name__ == "__main__":
    main()
