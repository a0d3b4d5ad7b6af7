"""Streaming weights to a server, beside one plain gloo broadcast of the same bytes.

    python benchmarks/weight_sync.py [--mib 400] [--tp 2] [--servers 1] [--bucket-mib 64] [--reps 5]

Both run in turn, in the same processes and on the same machine, so their ratio means something
where their rates do not: 1.0 would be a sync that costs nothing beyond the broadcast. It also pays
for gathering the shards, for the servers' loading, and for their control calls.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from megarl.api.records import WeightUpdateMeta
from megarl.models import build_piece_table, read_hf_config
from megarl.parallel.layout import Layout
from megarl.utils.http import HttpError, call_json
from megarl.weight_sync import WeightSender
from megarl.weight_sync.process_group import destroy_update_group, init_update_group

LAYERS, VOCAB = 8, 32_000
START_TIMEOUT = 120.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def make_model(path: Path, mib: int) -> None:
    """A random Qwen3 of about `mib` MiB in bf16."""
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
    """Embedded servers, healthy. Their weights are loaded in bf16."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    addresses, processes = [], []
    try:
        for _ in range(count):
            port = free_port()
            command = ["-m", "megarl.rollout.server", "--model-path", str(model), "--port",
                       str(port), "--threads", "1", "--log-level", "warning"]  # fmt: skip
            processes.append(subprocess.Popen([sys.executable, *command], env=env))
            addresses.append(f"127.0.0.1:{port}")
        for address, process in zip(addresses, processes, strict=True):
            wait_healthy(address, process)
        yield tuple(addresses)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_healthy(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        try:
            call_json("GET", address, "/health", timeout=5)
            return
        except HttpError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def receive(rank: int, world_size: int, port: int, nbytes: int, reps: int) -> None:
    """The other end of the plain broadcast."""
    torch.set_num_threads(1)
    data = torch.empty(nbytes, dtype=torch.uint8)
    group = init_update_group(
        master_address="127.0.0.1", master_port=port, rank=rank, world_size=world_size,
        group_name="plain", backend="gloo", timeout=300,
    )  # fmt: skip
    for _ in range(reps):
        dist.broadcast(data, src=0, group=group)
    dist.barrier(group=group)
    destroy_update_group(group)


def train(rank: int, args: argparse.Namespace, model: Path, port: int, plain_port: int,
          addresses: tuple[str, ...]) -> None:  # fmt: skip
    """A trainer rank: uploads `reps` times; rank 0 broadcasts plainly before each."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.tp
    )
    layout = Layout(tp=args.tp)
    table = build_piece_table(read_hf_config(model), layout)
    params = {
        n: torch.randn(p.shape).bfloat16()
        for n, p in table.local_params(layout.coords(rank)).items()
    }
    sender = WeightSender(table, layout, rank, params)
    nbytes, plain, results = 2 * sum(t.numel for t in table.tensors), [], []
    if rank == 0:
        data = torch.zeros(nbytes, dtype=torch.uint8)
        group = init_update_group(
            master_address="127.0.0.1", master_port=plain_port, rank=0,
            world_size=1 + len(addresses), group_name="plain", backend="gloo", timeout=300,
        )  # fmt: skip
    for version in range(1, args.reps + 1):
        if rank == 0:
            start = time.monotonic()
            dist.broadcast(data, src=0, group=group)
            plain.append(time.monotonic() - start)
        dist.barrier()
        meta = WeightUpdateMeta(
            type="distributed", version=version, addresses=addresses, timeout=300,
            bucket_bytes=args.bucket_mib << 20, flattened=not args.per_tensor,
        )  # fmt: skip
        results.append(sender.upload(meta))
    if rank == 0:
        dist.barrier(group=group)
        destroy_update_group(group)
        report(nbytes, plain, results)
    sender.close()
    dist.destroy_process_group()


def report(nbytes: int, plain: list[float], results: list[dict[str, float]]) -> None:
    """Leaves out the first round, which connects and faults pages in."""
    syncs = results[1:] or results
    buckets = int(syncs[0]["weight_sync/buckets"])
    print(f"{nbytes / 1e6:.0f} MB in {buckets} buckets, {len(syncs)} rounds")
    for name, pick in (("best", min), ("median", statistics.median)):
        alone = pick(plain[1:] or plain)
        sync = pick(r["weight_sync/total_s"] for r in syncs)
        print(
            f"{name:6}  plain broadcast {nbytes / alone / 1e9:5.2f} GB/s,  "
            f"weight sync {nbytes / sync / 1e9:5.2f} GB/s,  ratio {alone / sync:.2f}"
        )
    print("seconds of a sync, median (gather overlaps broadcast and load_wait):")
    for key in (k for k in syncs[0] if k.endswith("_s") and not k.endswith("per_s")):
        print(f"  {key:28} {statistics.median(r[key] for r in syncs):7.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=400, help="size of the model in bf16")
    parser.add_argument("--tp", type=int, default=2, help="trainer ranks")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--per-tensor", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        make_model(model, args.mib)
        table = build_piece_table(read_hf_config(model), Layout())
        nbytes = 2 * sum(t.numel for t in table.tensors)
        with servers(model, args.servers) as addresses:
            port, plain_port = free_port(), free_port()
            jobs = [
                context.Process(target=train, args=(r, args, model, port, plain_port, addresses))
                for r in range(args.tp)
            ] + [
                context.Process(
                    target=receive, args=(r + 1, args.servers + 1, plain_port, nbytes, args.reps)
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
