"""Measures how a step's batch reaches the ranks that work on it, beside one plain gloo send of the
same bytes, and beside a broadcast of pickled padded tensors to every rank ("old").

    python benchmarks/data_plane.py [--samples 8192] [--mean 2000] [--longest 32000] [--reps 3]
                                    [--old-samples 1024] [--old-longest 8192]

Rank 0 of four processes has drawn all samples; lengths are long-tailed. Prints a Markdown table:

bytes       sent by all ranks, over what the ranks need and do not have
memory      the peak of a rank while rows move, over its share; of rank 0, over what it began with
seconds     over one gloo send, rank 0 to rank 1, of as many bytes (medians of the rounds)
old         the same of the broadcast, at a size that it can carry; its seconds over ours
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.api.batch import Batch, Home, Padded
from megarl.api.tokens import concat_padded
from megarl.parallel import exchange
from megarl.parallel.layout import Layout
from megarl.parallel.packing import Cost, place_rows

RANKS, GROUP = 4, 8  # samples per prompt
LAYOUTS = {"dp4": Layout(dp=4), "dp2 tp2": Layout(dp=2, tp=2)}
WORK = Cost(linear=80_000, quadratic=1)  # of a model of some billion parameters
Figures = dict[str, float]


def draw_lengths(samples: int, mean: int, longest: int) -> list[int]:
    """Draws long-tailed lengths; the median is a third of the mean, and `longest` cuts some."""
    rng = random.Random(0)
    drawn = [rng.lognormvariate(0.0, 1.5) for _ in range(samples)]
    scale = mean * samples / sum(drawn)
    for _ in range(20):  # cutting takes from the mean
        lengths = [min(longest, max(16, round(scale * x))) for x in drawn]
        scale *= mean * samples / sum(lengths)
    return lengths


def episodes(lengths: list[int]) -> list[Padded]:
    """Returns episodes as rollouts return them: padded tensors of each prompt's samples."""
    out = []
    for first in range(0, len(lengths), GROUP):
        part = torch.tensor(lengths[first : first + GROUP])
        shape = (len(part), int(part.max()))
        mask = torch.arange(shape[1]) < part[:, None]
        out.append({
            "input_ids": torch.ones(shape, dtype=torch.long) * mask,
            "attention_mask": mask,
            "loss_mask": mask,
            "logprobs": -0.5 * mask.float(),
            "versions": torch.zeros(shape, dtype=torch.int32),
            "rewards": torch.zeros(len(part)),
            "episode_ids": torch.full((len(part),), first // GROUP),
        })  # fmt: skip
    return out


def token_bytes(batch: Batch) -> int:
    return sum(t.values[:1].nbytes for t in batch.per_token.values()) or 17


class Peak:
    """Measures the peak of resident memory above what it was on entry, in bytes."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        self.before = self._read("VmRSS")
        return self

    def __exit__(self, *exc: object) -> None:
        self.bytes = self._read("VmHWM") - self.before

    @staticmethod
    def _read(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(x.split()[1]) << 10 for x in lines if x.startswith(field))


class Sent:
    """Counts the bytes this rank sends to others while the context is open."""

    def __enter__(self) -> Sent:
        self.bytes, self._isend = 0, dist.isend
        dist.isend = self._count
        return self

    def _count(self, tensor: torch.Tensor, *args: Any, **kw: Any) -> Any:
        self.bytes += tensor.nbytes
        return self._isend(tensor, *args, **kw)

    def __exit__(self, *exc: object) -> None:
        dist.isend = self._isend


def plain_send(count: int) -> float:
    """Times one send of `count` bytes from rank 0 into fresh memory of rank 1, in seconds."""
    data = torch.ones(count if dist.get_rank() == 0 else 0, dtype=torch.uint8)
    dist.barrier()
    start = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(data, 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.empty(count, dtype=torch.uint8), 0)
    dist.barrier()
    return time.perf_counter() - start


def one_round(layout: Layout, lengths: list[int]) -> Figures:
    """Returns this rank's measurements of one placement, from a row's origin to its home."""
    rank = dist.get_rank()
    batch = Batch.from_local(episodes(lengths) if rank == 0 else None)
    each = token_bytes(batch)
    index = place_rows(
        batch.lengths.tolist(), batch.unit_ids, None, dp=layout.dp, cost=WORK, slot=1
    )
    home = Home(tuple(c.dp for c in layout.all_coords), index)
    share = int(batch.lengths[home.rows(rank)].sum()) * each
    total = int(batch.lengths.sum()) * each
    dist.barrier()
    with Peak() as peak, Sent() as sent:
        start = time.perf_counter()
        exchange.place(batch, home)
        dist.barrier()
        seconds = time.perf_counter() - start
    assert len(batch["input_ids"].values) * each == share
    began = total if rank == 0 else 0
    return {
        "needed": 0 if rank == 0 else share, "sent": sent.bytes, "seconds": seconds,
        "memory": (began + peak.bytes) / (began or share),
    }  # fmt: skip


def old_round(lengths: list[int]) -> Figures:
    """Measures the broadcast of every padded tensor, pickled, to every rank."""
    box = [concat_padded(episodes(lengths)) if dist.get_rank() == 0 else None]
    dist.barrier()
    with Peak() as peak:
        start = time.perf_counter()
        dist.broadcast_object_list(box, 0)
        dist.barrier()
        seconds = time.perf_counter() - start
    padded = sum(t.nbytes for t in box[0].values()) if box[0] else 0
    useful = sum(lengths) * 17 * (RANKS - 1)
    share = sum(lengths) * 17 / RANKS
    return {"seconds": seconds, "bytes": padded * (RANKS - 1) / useful,
            "memory": peak.bytes / share if dist.get_rank() else 0.0}  # fmt: skip


def everyones(mine: Figures) -> list[Figures]:
    found: list[Figures] = [{} for _ in range(RANKS)]
    dist.all_gather_object(found, mine)
    return found


def compared(layout: Layout, lengths: list[int], reps: int) -> Figures:
    rounds = [everyones(one_round(layout, lengths)) for _ in range(reps)]
    needed, sent = (int(sum(f[k] for f in rounds[0])) for k in ("needed", "sent"))
    plain = statistics.median(plain_send(sent) for _ in range(reps))
    seconds = statistics.median(r[0]["seconds"] for r in rounds)
    memory = [max(statistics.median(r[k]["memory"] for r in rounds) for k in ks)
              for ks in (range(1, RANKS), range(1))]  # fmt: skip
    return {"MB": sent / 1e6, "bytes": sent / needed, "memory": memory[0], "rank 0": memory[1],
            "seconds": seconds, "plain": plain, "ratio": seconds / plain}  # fmt: skip


def work(rank: int, store: str, args: argparse.Namespace, out: Any) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    lengths = draw_lengths(args.samples, args.mean, args.longest)
    few = draw_lengths(args.old_samples, args.old_longest // 9, args.old_longest)
    one_round(LAYOUTS["dp4"], few)  # connects
    table: list[tuple[str, Figures]] = []
    for name, layout in LAYOUTS.items():
        table.append((name, compared(layout, lengths, args.reps)))
    table.append((f"dp4, {args.old_samples} samples", compared(LAYOUTS["dp4"], few, args.reps)))
    old = [everyones(old_round(few)) for _ in range(args.reps)]
    table.append(("old, the same samples", {
        "seconds": statistics.median(r[0]["seconds"] for r in old), "bytes": old[0][1]["bytes"],
        "memory": max(f["memory"] for f in old[-1]),
    }))  # fmt: skip
    if rank == 0:
        out.put((sum(lengths), table))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in dict(samples=8192, mean=2000, longest=32_000, reps=3, old_samples=1024,
                              old_longest=8192).items():  # fmt: skip
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    args = parser.parse_args()
    ctx = mp.get_context("spawn")
    out = ctx.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            ctx.Process(target=work, args=(r, f"{folder}/store", args, out)) for r in range(RANKS)
        ]
        for process in ranks:
            process.start()
        tokens, table = out.get(timeout=1800)
        for process in ranks:
            process.join()
    print(f"{args.samples} samples, {tokens} tokens, {RANKS} processes on {os.cpu_count()} cores")
    columns = ("MB", "bytes", "memory", "rank 0", "seconds", "plain", "ratio")
    print("| | " + " | ".join(columns) + " |\n|" + " --- |" * (len(columns) + 1))
    for name, figures in table:
        shown = (f"{figures[c]:.3g}" if c in figures else "" for c in columns)
        print(f"| {name} | " + " | ".join(shown) + " |")


if __name__ == "__main__":
    main()
