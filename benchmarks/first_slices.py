"""Sends slices to a server, over NCCL from GPU to GPU: the probe `slices` of first_day.py.

One or two trainer ranks on the first GPUs, a server on the last: SGLang, where this interpreter or
MEGARL_SGLANG_PYTHON has it (of tp 2 where there are four GPUs), else megarl's own. After each sync
all weights of the server are compared. What passed is noted for `sharded=auto`.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.weight_sync import make_model
from megarl.api.records import WeightUpdateMeta
from megarl.config.rollout import ServerConfig
from megarl.parallel.worlds import comm_backend
from megarl.rollout.server_process import ServerProcess, start_server
from megarl.utils.env import ensure_job_token, free_port, set_nccl_default
from megarl.weight_sync.proof import proof_file, why_unproved, write_proof
from megarl.weight_sync.servers import Deadline, Servers
from megarl.weight_sync.transports import WeightSender, WeightSource
from tests.dist.uploads import sharded
from tests.tiny_tokenizer import save_tokenizer

MIB, MIB_SMALL = 1000, 4  # of weights in bf16
SYNCS = 4
START, SYNC = 240.0, 60.0  # seconds
SGLANG = {"mem_fraction_static": 0.3, "disable_cuda_graph": True}


def run(small: bool) -> Iterator[tuple[Any, ...]]:
    """Yields rows (what, seconds, GB/s) of every sync, then where it is noted that they passed.
    small: over gloo, and noted in a folder that goes."""
    gpus = 3 if small else torch.cuda.device_count()
    if gpus < 2:
        yield f"needs 2 GPUs, here is {gpus}: nothing is noted", "", ""
        return
    ensure_job_token()
    set_nccl_default(os.environ)
    python = os.environ.get("MEGARL_SGLANG_PYTHON", sys.executable)
    sglang = not small and not subprocess.run([python, "-c", "import sglang"]).returncode
    tp = 2 if sglang and gpus >= 4 else 1
    device = torch.device("cpu" if small else "cuda:0")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = Path(folder)
        if small:
            os.environ["XDG_CACHE_HOME"] = folder
        proof_file().unlink(missing_ok=True)
        make_model(model, MIB_SMALL if small else MIB)
        save_tokenizer(model)
        process = start_server(
            ServerConfig(
                type="sglang" if sglang else "embedded",
                tp=tp,
                python=python,
                options=SGLANG if sglang else {},
            ),
            model_path=str(model),
            dtype="bfloat16",
            log_path=model / "server.log",
            env={"CUDA_VISIBLE_DEVICES": ",".join(str(gpus - n) for n in range(tp, 0, -1))},
            setup_timeout=START,
        )
        stack.callback(process.stop)
        for number, (seconds, nbytes) in enumerate(syncs(min(2, gpus - tp), model, process)):
            yield f"sync {number + 1}", f"{seconds:.2f}", f"{1e-9 * nbytes / seconds:.1f}"
        server = Servers([process.address]).info(Deadline(SYNC))[process.address].version
        file = write_proof(device, server)
        if why := why_unproved(device, [server]):
            raise RuntimeError(why)
        yield f"noted for servers of {server} in {file}", "", ""


def syncs(ranks: int, model: Path, server: ServerProcess) -> list[tuple[float, float]]:
    """Returns the seconds and bytes of every sync from trainer ranks of their own."""
    context = mp.get_context("spawn")
    found, port = context.SimpleQueue(), free_port()
    jobs = [
        context.Process(target=train, args=(rank, ranks, model, port, server.address, found))
        for rank in range(ranks)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    if any(job.exitcode for job in jobs):
        raise RuntimeError(f"trainer ranks ended with {[job.exitcode for job in jobs]}")
    return [found.get() for _ in range(SYNCS)]


def train(rank: int, ranks: int, model: Path, port: int, address: str, found: Any) -> None:
    """Sends weights with other signs at each sync, from one rank of tp `ranks`."""
    backend = comm_backend()
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
    if backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        torch.cuda.set_device(device)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=ranks)
    table, layout, _, params = sharded(model, {"tp": ranks}, torch.bfloat16)
    params = {name: p.to(device) for name, p in params.items()}
    sender = WeightSender(WeightSource(table, layout, rank, params))
    for version in range(1, SYNCS + 1):
        for p in params.values():
            p.neg_()
        meta = WeightUpdateMeta(
            type="distributed", version=version, addresses=(address,), timeout=SYNC,
            sharded="on", verify="full",
        )  # fmt: skip
        begun = time.perf_counter()
        figures = sender.upload(meta)
        if figures["weight_sync/verified"] != 1:
            raise RuntimeError(f"the weights of version {version} were not all compared")
        if rank == 0:
            found.put((time.perf_counter() - begun, figures["weight_sync/bytes"]))
    sender.close()
    dist.destroy_process_group()
