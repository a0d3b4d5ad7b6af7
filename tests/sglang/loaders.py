"""Runs in SGLang's interpreter: builds its classes as its server does, without the server, and says
what their loaders do with HF tensors.

`python loaders.py JOBS OUT`; JOBS: a list of jobs in JSON, see `Job`. Each rank of each job writes
OUT/NAME-RANK: a dict of torch.save, see `said`. Imports, which take longest, are made once.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megarl_receiver.recording import record, state
from safetensors.torch import load_file
from sglang.benchmark import one_batch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import PortArgs, ServerArgs

TP = 2


class Job(NamedTuple):
    """name: of the answers. model: the directory that the server starts with. other: another's
    weights. spec: of the tensors that trainers send. buckets: the names that come in one request
    each. backend: of attention, which some classes insist on."""

    name: str
    model: str
    other: str
    spec: list[tuple[str, list[int], str]]
    buckets: list[list[str]]
    backend: str


def build(job: Job, args: ServerArgs, ports: PortArgs, rank: int) -> torch.nn.Module:
    """SGLang's model with the weights of `job.model`, as the first steps of a scheduler make it."""
    world_rank = one_batch.spawn_world_rank(args, tp_rank=rank, pp_rank=0)
    ranks = one_batch.SpawnRanks(world_rank=world_rank, gpu_id=rank)
    publish(args, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    config = ModelConfig.from_server_args(args)
    one_batch.bootstrap.init_parallel_runtime(
        server_args=args, device="cpu", dist_port=ports.nccl_port
    )
    one_batch.bootstrap.init_layer_runtime(model_config=config)
    runner = one_batch.ModelRunner(
        model_config=config, mem_fraction_static=0.1, gpu_id=rank, nccl_port=ports.nccl_port,
        server_args=args,
    )  # fmt: skip
    return runner.model


def memory(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters' storages, by parameter. What no tensor fills may be NaN."""
    wholes = {name: p.new_empty(0).set_(p.untyped_storage()) for name, p in state(model).items()}
    return {name: whole.nan_to_num() for name, whole in wholes.items()}


@torch.no_grad()
def said(job: Job, model: torch.nn.Module) -> dict[str, Any]:
    """table: as a server packs it. kept: whether the class holds what it held before after a load
    of the same weights. recorded: whether recording changes nothing. loaded: its memory after one
    load of the others. bucketed: whether loads by buckets give the same."""
    one, two = (load_file(Path(d, "model.safetensors")) for d in (job.model, job.other))
    first = memory(model)

    def same(other: dict[str, torch.Tensor]) -> list[str]:
        now = memory(model)
        return [name for name, value in other.items() if not torch.equal(value, now[name])]

    table = zlib.compress(json.dumps(vars(record(model, job.spec))).encode())
    recorded = same(first)
    model.load_weights((n, two[n]) for n, _, _ in job.spec)
    loaded = memory(model)
    for names in job.buckets:
        model.load_weights((n, one[n]) for n in names)
    kept = same(first)
    for names in job.buckets:
        model.load_weights((n, two[n]) for n in names)
    return dict(
        table=table, recorded=recorded, kept=kept, loaded=loaded, bucketed=same(loaded),
        built=type(model).__name__,
    )  # fmt: skip


def answer(job: Job, args: ServerArgs, ports: PortArgs, rank: int, out: Path) -> None:
    """In a process of its own, whose words go into a file beside its answer."""
    target = out / f"{job.name}-{rank}"
    log = os.open(target.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        torch.save(said(job, build(job, args, ports, rank)), target)
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def main(jobs: list[Job], out: Path) -> None:
    for job in jobs:
        args = ServerArgs(
            model_path=job.model, tp_size=TP, device="cpu", dtype="float32", host="127.0.0.1",
            attention_backend=job.backend, context_length=256, disable_overlap_schedule=True,
        )  # fmt: skip
        ports, pids = PortArgs.init_new(args), []
        for rank in range(TP):
            pids.append(os.fork())
            if not pids[-1]:
                answer(job, args, ports, rank, out)
        for pid in pids:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main([Job(*job) for job in json.loads(Path(sys.argv[1]).read_text())], Path(sys.argv[2]))
