"""Times syncs by slices beside syncs of whole tensors, into a stock SGLang server of tp 2.

    python benchmarks/slices.py [--mib 500] [--bucket-mib 64] [--reps 7] [--dtype bfloat16]
                                [--changed 0.003 0.03]

Two trainer ranks (tp 2) and the two ranks of the server share the cores. The ways take turns, and
each is first in every other round, so that other load changes the rates of both. SGLang's
interpreter is MEGARL_SGLANG_PYTHON, or that of .venv-sglang (`make install-sglang`).

Prints a Markdown table, a row for each way: bytes that a server rank receives (the one with most),
also as a part of the model; seconds of the wall clock; processor seconds of both trainers, of all
the server's processes, and of all of them. They are medians over the rounds; the first round, which
connects and faults pages in, is left out. The row `ratio` has the medians of the rounds' own
ratios. Then a row for each share of `--changed`: before every sync the last bit of that share of
the numbers is flipped, and `weight_sync.options.delta` sends what differs, by slices.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.weight_sync import make_model
from megarl.api.records import WeightUpdateMeta
from megarl.models.hf_config import read_hf_config
from megarl.models.piece_table import PieceTable, build_piece_table
from megarl.parallel.layout import Layout
from megarl.rollout.server_process import ServerProcess, start_server
from megarl.utils.env import ensure_job_token, free_port
from megarl.weight_sync.transports import WeightSender, WeightSource
from tests.sglang.servers import ENV, OPTIONS, START_TIMEOUT, config
from tests.tiny_tokenizer import save_tokenizer

LAYOUT = Layout(tp=2)
SLICES = "slices"
WAYS = {"whole tensors": "off", SLICES: "on"}
COLUMNS = (
    "way", "MB into a rank", "of the model", "wall s", "trainers' CPU s", "server's CPU s", "CPU s",
)  # fmt: skip


@dataclass
class Sample:
    """One sync: bytes into the server rank with most, seconds of the wall clock, and processor
    seconds of the trainers, of the server, and of both."""

    nbytes: float
    wall: float
    trainers: float
    server: float
    both: float


@contextlib.contextmanager
def server(model: Path, dtype: str) -> Iterator[ServerProcess]:
    """Yields a healthy SGLang server of tp 2, on a core for each rank."""
    env = ENV | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    process = start_server(
        config(tp=2, options=OPTIONS), model_path=str(model), dtype=dtype,
        log_path=model / "server.log", env=env, setup_timeout=None,
    )  # fmt: skip
    try:
        process.wait_healthy(START_TIMEOUT)
        yield process
    finally:
        process.stop()


def server_seconds(pid: int) -> float:
    """Returns the processor seconds used so far by the processes of the session that `pid` leads:
    a server and all that it has started."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == pid:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def total(seconds: float) -> float:
    """Returns the sum over the trainer ranks. Collective."""
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found)
    return float(found)


def measure(upload: Callable[[], dict[str, float]], pid: int) -> Sample:
    """Returns what a sync costs. Collective."""
    dist.barrier()
    used, server_used, start = time.process_time(), server_seconds(pid), time.monotonic()
    figures = upload()
    wall, trainers = time.monotonic() - start, total(time.process_time() - used)
    theirs = server_seconds(pid) - server_used
    sliced = figures["weight_sync/sharded"]
    nbytes = figures["weight_sync/slice_bytes" if sliced else "weight_sync/bytes"]
    return Sample(nbytes, wall, trainers, theirs, trainers + theirs)


def train(rank: int, args: argparse.Namespace, model: Path, port: int, address: str,
          pid: int) -> None:  # fmt: skip
    """Runs a trainer rank, through a sender of its own for each way, which keeps its group."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=LAYOUT.world_size
    )
    table = build_piece_table(read_hf_config(model), LAYOUT)
    shapes = table.local_params(LAYOUT.coords(rank))
    dtype = getattr(torch, args.dtype)
    params = {n: torch.full(p.shape, 0.01, dtype=dtype) for n, p in shapes.items()}
    source = WeightSource(table, LAYOUT, rank, params)
    upload = Uploads(args, address, pid)
    senders = {way: WeightSender(source) for way in WAYS}
    samples: dict[str, list[Sample]] = {way: [] for way in WAYS}
    for turn in range(args.reps + 1):
        for way in list(WAYS) if turn % 2 else reversed(WAYS):
            sample = upload(senders[way], sharded=WAYS[way])
            samples[way] += [sample] if turn else []
    changes = {share: [] for share in args.changed}
    for share, found in changes.items():
        upload(senders[SLICES], sharded="on", delta=True)  # everything, which is kept
        for turn in range(args.reps):
            flip(params, share, turn)
            found.append(upload(senders[SLICES], sharded="on", delta=True))
    if rank == 0:
        report(args, table, dtype.itemsize, samples, changes)
    for sender in senders.values():
        sender.close()
    dist.destroy_process_group()


class Uploads:
    """Times uploads to a server, each of a version of its own."""

    def __init__(self, args: argparse.Namespace, address: str, pid: int) -> None:
        self.args, self.address, self.pid, self.version = args, address, pid, 0

    def __call__(self, sender: WeightSender, **how: Any) -> Sample:
        self.version += 1
        meta = WeightUpdateMeta(
            type="distributed", version=self.version, addresses=(self.address,), timeout=600,
            bucket_bytes=self.args.bucket_mib << 20, **how,
        )  # fmt: skip
        return measure(lambda: sender.upload(meta), self.pid)


def flip(params: dict[str, torch.Tensor], share: float, turn: int) -> None:
    """Flips the last bit of a share of the numbers, of those that ranks have in common alike."""
    for number, param in enumerate(params.values()):
        rng = torch.Generator().manual_seed(1000 * turn + number)
        bits = param.view({2: torch.int16, 4: torch.int32}[param.itemsize])
        bits ^= torch.rand(param.shape, generator=rng) < share


def report(
    args: argparse.Namespace,
    table: PieceTable,
    itemsize: int,
    samples: dict[str, list[Sample]],
    changes: dict[float, list[Sample]],
) -> None:
    whole = itemsize * sum(t.numel for t in table.tensors)
    kept = itemsize * sum(t.numel for t in table.tensors if len(t.shape) == 1)
    print(
        f"{whole / 1e6:.1f} MB of {args.dtype}, of which every rank keeps {kept / 1e6:.2f} MB, in "
        f"buckets of {args.bucket_mib} MiB, {args.reps} rounds; half of the model and what every "
        f"rank keeps: {(whole + kept) / 2e6:.1f} MB\n"
    )
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    for way, found in samples.items():
        print(row(way, found, whole))
    first, second = (list(columns(found)) for found in samples.values())
    ratios = [
        f"{statistics.median(b / a for a, b in zip(*pair, strict=True)):.2f}"
        for pair in zip(first, second, strict=True)
    ]
    print(f"| ratio | {ratios[0]} | | " + " | ".join(ratios[1:]) + " |", flush=True)
    for share, found in changes.items():
        print(row(f"changes of {100 * share:g} %", found, whole), flush=True)


def row(way: str, samples: list[Sample], whole: int) -> str:
    nbytes, *seconds = (statistics.median(column) for column in columns(samples))
    cells = [way, f"{nbytes / 1e6:.1f}", f"{nbytes / whole:.3f}"]
    return "| " + " | ".join(cells + [f"{s:.2f}" for s in seconds]) + " |"


def columns(samples: list[Sample]) -> Iterator[tuple[float, ...]]:
    """Yields each figure of all samples."""
    return zip(*map(astuple, samples), strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=500, help="size of the model in bf16")
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--changed", type=float, nargs="*", default=(0.003, 0.03))
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ensure_job_token()
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        make_model(model, args.mib)
        save_tokenizer(model)
        with server(model, args.dtype) as process:
            given = (args, model, free_port(), process.address, process.pid)
            jobs = [
                context.Process(target=train, args=(rank, *given))
                for rank in range(LAYOUT.world_size)
            ]
            for job in jobs:
                job.start()
            for job in jobs:
                job.join()
    sys.exit(max(abs(job.exitcode or 0) for job in jobs))


if __name__ == "__main__":
    main()
