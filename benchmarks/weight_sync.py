"""Times streaming weights to a server beside one plain gloo broadcast of the same bytes.

    python benchmarks/weight_sync.py [--mib 400] [--servers 1] [--bucket-mib 64] [--reps 5]
                                     [--only tp1 tp2pp2]

Both run in turn, in the same processes, so that the ratio holds where other load changes the rates:
1.0 would be a sync that costs nothing beyond the broadcast. A sync also gathers the shards, and the
servers load the weights and answer control calls. A broadcast of the same bytes in pieces as large
as the buckets, one after another, shows what gloo itself is slower by in pieces. Processor time per
GB, of trainer and server together, is the cost of a sync where the processors are busy anyway.

Prints a Markdown table: one row for each layout of the trainer, then with fingerprints of a few
tensors and of all. Seconds are medians over the rounds; the
first one, which connects and faults pages in, is left out. A second table says what each part takes
alone, and how near a sync could come to the plain broadcast: by the pieces, and the calls before
and after them, if all else hid behind these.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from megarl.api.records import WeightUpdateMeta
from megarl.config.rollout import ServerConfig
from megarl.models.hf_config import read_hf_config
from megarl.models.piece_table import build_piece_table
from megarl.parallel.layout import Layout
from megarl.rollout.server_process import start_server
from megarl.utils.env import free_port
from megarl.utils.http import call_json
from megarl.weight_sync.plan import plan_sync
from megarl.weight_sync.transports import WeightSender, WeightSource
from megarl.wire.process_group import destroy_update_group, init_update_group

LAYERS, VOCAB = 8, 32_000
START_TIMEOUT = 120.0


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: Layout
    verify: str = "off"


CASES = {
    "tp1": Case(layout=Layout()),
    "tp2": Case(layout=Layout(tp=2)),
    "pp2": Case(layout=Layout(pp=2)),
    "tp2pp2": Case(layout=Layout(tp=2, pp=2)),
    "tp1-sampled": Case(layout=Layout(), verify="sample"),
    "tp1-verified": Case(layout=Layout(), verify="full"),
}


@dataclass
class Sample:
    """One round: seconds of wall clock and of processor, and the sender's metrics."""

    plain: tuple[float, float]
    pieces: tuple[float, float]
    sync: tuple[float, float]
    figures: dict[str, float]


def make_model(path: Path, mib: int) -> None:
    """Saves a random Qwen3 of about `mib` MiB in bf16."""
    numel = mib * 2**19
    hidden = 128
    while VOCAB * hidden * 2 + LAYERS * 15 * hidden * hidden < numel:
        hidden += 128
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=4 * hidden, head_dim=64,
        num_hidden_layers=LAYERS, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128, tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).bfloat16().save_pretrained(path)


@contextlib.contextmanager
def servers(model: Path, count: int) -> Iterator[tuple[str, ...]]:
    """Yields healthy embedded servers, which load their weights in bf16."""
    config = ServerConfig(threads=1, options={"log_level": "warning"})
    with contextlib.ExitStack() as stack:
        started = []
        for i in range(count):
            log = model / f"server{i}.log"
            path, env = str(model), {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            started.append(
                start_server(
                    config,
                    model_path=path,
                    dtype="bfloat16",
                    log_path=log,
                    env=env,
                    setup_timeout=None,
                )
            )
            stack.callback(started[-1].stop)
        for process in started:
            process.wait_healthy(START_TIMEOUT)
        yield tuple(process.address for process in started)


def processor_seconds() -> float:
    """Returns the processor seconds used so far by this process and its siblings."""
    parent, ticks = os.getppid(), 0
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def timed(fn: Callable[[], Any]) -> tuple[float, float]:
    """Returns the seconds of wall clock and of processor that `fn` takes."""
    used, start = processor_seconds(), time.monotonic()
    fn()
    return time.monotonic() - start, processor_seconds() - used


def plain_broadcast(data: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> None:
    """Sends pieces of these sizes in turn. Returns when all have arrived, not only left."""
    for piece in data.split(sizes):
        dist.broadcast(piece, src=0, group=group)
    dist.barrier(group=group)


def bucket_sizes(model: Path, bucket_mib: int) -> list[int]:
    """Returns the bytes of the buckets that a sync from one rank sends."""
    table = build_piece_table(read_hf_config(model), Layout())
    plan = plan_sync(table, torch.bfloat16, bucket_mib << 20)
    return [bucket.nbytes for bucket in plan.buckets]


def receive(rank: int, world_size: int, port: int, sizes: list[int], rounds: int) -> None:
    """Runs the receiving end of the plain broadcasts."""
    torch.set_num_threads(1)
    data = torch.ones(sum(sizes), dtype=torch.uint8)
    group = init_update_group(
        master_address="127.0.0.1", master_port=port, rank=rank, world_size=world_size,
        group_name="plain", backend="gloo", timeout=600,
    )  # fmt: skip
    for _ in range(rounds):
        plain_broadcast(data, [sum(sizes)], group)
        plain_broadcast(data, sizes, group)
    destroy_update_group(group)


def train(rank: int, args: argparse.Namespace, model: Path, port: int, plain_port: int,
          addresses: tuple[str, ...]) -> None:  # fmt: skip
    """Runs a trainer rank; ranks beyond a case's layout wait."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size(args.only)
    )
    plain: Callable[[list[int]], None] | None = None
    sizes = bucket_sizes(model, args.bucket_mib)
    if rank == 0:
        group = init_update_group(
            master_address="127.0.0.1", master_port=plain_port, rank=0,
            world_size=1 + len(addresses), group_name="plain", backend="gloo", timeout=600,
        )  # fmt: skip
        data = torch.ones(sum(sizes), dtype=torch.uint8)
        plain = functools.partial(plain_broadcast, data, group=group)
    results = {}
    for name in args.only:
        ranks = list(range(CASES[name].layout.world_size))
        members = dist.new_group(ranks)
        if rank in ranks:
            results[name] = measure(
                CASES[name], rank, members, args, model, addresses, plain, sizes
            )
        dist.barrier()
    if rank == 0:
        report(args, sizes, results)
        report_parts(sizes, results, addresses[0])
        destroy_update_group(group)
    dist.destroy_process_group()


def measure(
    case: Case, rank: int, group: dist.ProcessGroup, args: argparse.Namespace, model: Path,
    addresses: tuple[str, ...], plain: Callable[[list[int]], None] | None, sizes: list[int],
) -> list[Sample]:  # fmt: skip
    """Uploads 1 + `reps` times, after the plain broadcasts each; returns the samples on rank 0."""
    table = build_piece_table(read_hf_config(model), case.layout)
    shapes = table.local_params(case.layout.coords(rank))
    params = {n: torch.full(p.shape, 0.01, dtype=torch.bfloat16) for n, p in shapes.items()}
    sender = WeightSender(WeightSource(table, case.layout, rank, params, group))
    samples = []
    for version in range(1, args.reps + 2):
        meta = WeightUpdateMeta(
            type="distributed", version=version, addresses=addresses, timeout=600,
            bucket_bytes=args.bucket_mib << 20, verify=case.verify, sharded="off",
        )  # fmt: skip
        if plain:
            before = [timed(functools.partial(plain, s)) for s in ([sum(sizes)], sizes)]
        dist.barrier(group=group)
        figures: dict[str, float] = {}
        if plain:
            took = timed(lambda: figures.update(paused_upload(sender, meta)))  # noqa: B023
            samples.append(Sample(*before, took, figures))
        else:
            sender.upload(meta)
    sender.close()
    return samples[1:]


def paused_upload(sender: WeightSender, meta: WeightUpdateMeta) -> dict[str, float]:
    """Uploads between pause and continue, as a training loop does; adds the pause in seconds."""
    start = time.monotonic()
    for address in meta.addresses:
        call_json("POST", address, "/pause_generation", {"mode": "abort"}, timeout=60)
    figures = sender.upload(meta)
    for address in meta.addresses:
        call_json("POST", address, "/continue_generation", {}, timeout=60)
    return figures | {"weight_sync/paused_s": time.monotonic() - start}


COLUMNS = (
    "trainer", "plain GB/s", "in pieces GB/s", "sync GB/s", "ratio", "plain CPU s/GB",
    "sync CPU s/GB", "paused s", "connect s", "session s", "gather s", "of it pack s",
    "broadcast s", "load wait s", "verify s", "extra MB",
)  # fmt: skip


def report(args: argparse.Namespace, sizes: list[int], results: dict[str, list[Sample]]) -> None:
    nbytes = sum(sizes)
    print(f"{nbytes / 1e6:.0f} MB of bf16 in buckets of {args.bucket_mib} MiB, "
          f"{args.servers} server(s), {args.reps} rounds\n")  # fmt: skip
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
    for name, samples in results.items():
        print("| " + " | ".join(row(name, nbytes / 1e9, samples)) + " |", flush=True)


def row(name: str, gb: float, samples: list[Sample]) -> Iterator[str]:
    def median(pick: Callable[[Sample], float]) -> float:
        return statistics.median(map(pick, samples))

    plain, total = median(lambda s: s.plain[0]), figure(samples, "total_s")
    yield name
    yield from (f"{gb / plain:.2f}", f"{gb / median(lambda s: s.pieces[0]):.2f}")
    yield from (f"{gb / total:.2f}", f"{plain / total:.2f}")
    yield f"{median(lambda s: s.plain[1]) / gb:.2f}"
    yield f"{median(lambda s: s.sync[1]) / gb:.2f}"
    for phase in (
        "paused", "connect", "session", "gather", "pack", "broadcast", "load_wait",
        "verify",
    ):  # fmt: skip
        yield f"{figure(samples, phase + '_s'):.3f}"
    yield f"{figure(samples, 'peak_extra_bytes') / 1e6:.0f}"


def figure(samples: list[Sample], key: str) -> float:
    """Returns the median of a metric of the syncs, 0 where they have none."""
    return statistics.median(s.figures.get(f"weight_sync/{key}", 0.0) for s in samples)


def report_parts(sizes: list[int], results: dict[str, list[Sample]], address: str) -> None:
    """Prints what the parts of a sync take alone, and what it would take if only the broadcast in
    pieces and the calls around it were left, beside the sync."""
    gb, cores = sum(sizes) / 1e9, len(os.sched_getaffinity(0))
    copy = statistics.median(timed(functools.partial(pack, sizes))[0] for _ in range(5))
    ask = functools.partial(call_json, "GET", address, "/model_info", timeout=60)
    call = statistics.median(timed(ask)[0] for _ in range(20))
    said = f"copying {gb / copy:.2f} GB/s, a control call {1e3 * call:.1f} ms, {cores} cores"
    columns = ("trainer", "buckets", "plain s", "in pieces s", "packing alone s", "calls s")
    columns += ("sync s", "at best s", "ratio at best", "ratio")
    print(f"\nAlone: {said}\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for name, samples in results.items():
        plain = statistics.median(s.plain[0] for s in samples)
        pieces = statistics.median(s.pieces[0] for s in samples)
        calls = sum(figure(samples, phase) for phase in ("session_s", "connect_s"))
        total, best = figure(samples, "total_s"), pieces + calls
        cells = [name, f"{figure(samples, 'buckets'):.0f}"]
        cells += [f"{s:.3f}" for s in (plain, pieces, copy, calls, total, best)]
        print(f"| {' | '.join(cells)} | {plain / best:.2f} | {plain / total:.2f} |", flush=True)


def pack(sizes: list[int]) -> None:
    """Copies as many bytes as all buckets have, as packing does, into one of two buckets."""
    source, room = _memory(sum(sizes)), _memory(max(sizes))
    for piece in source.split(sizes):
        room[: len(piece)].copy_(piece)


@functools.cache
def _memory(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


def world_size(names: list[str]) -> int:
    return max(CASES[n].layout.world_size for n in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=400, help="size of the model in bf16")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        make_model(model, args.mib)
        rounds = (args.reps + 1) * len(args.only)
        with servers(model, args.servers) as addresses:
            port, plain_port = free_port(), free_port()
            jobs = [
                context.Process(target=train, args=(r, args, model, port, plain_port, addresses))
                for r in range(world_size(args.only))
            ]
            sizes = bucket_sizes(model, args.bucket_mib)
            jobs += [
                context.Process(
                    target=receive, args=(r + 1, args.servers + 1, plain_port, sizes, rounds)
                )
                for r in range(args.servers)
            ]
            for job in jobs:
                job.start()
            for job in jobs:
                job.join()
    sys.exit(max(abs(job.exitcode or 0) for job in jobs))


if __name__ == "__main__":
    main()
