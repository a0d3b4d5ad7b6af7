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
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import plain_kernels
import torch
from megarl_receiver.recording import record, state
from safetensors.torch import load_file
from sglang.benchmark import one_batch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

TP = 2
ANSWER = 12  # tokens


class Job(NamedTuple):
    """name: of the answers. model: the directory that the server starts with. other: another's
    weights. spec: of the tensors that trainers send. buckets: the names that come in one request
    each. backend: of attention, on which some classes insist. prompt: what to answer, where that
    is asked."""

    name: str
    model: str
    other: str
    spec: list[tuple[str, list[int], str]]
    buckets: list[list[str]]
    backend: str
    prompt: list[int]


def build(job: Job, args: ServerArgs, ports: PortArgs, rank: int) -> Any:
    """SGLang's runner of a model with the weights of `job.model`, as a scheduler makes it."""
    world_rank = one_batch.spawn_world_rank(args, tp_rank=rank, pp_rank=0)
    ranks = one_batch.SpawnRanks(world_rank=world_rank, gpu_id=rank)
    publish(args, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    config = ModelConfig.from_server_args(args)
    one_batch.bootstrap.init_parallel_runtime(
        server_args=args, device="cpu", dist_port=ports.nccl_port
    )
    one_batch.bootstrap.init_layer_runtime(model_config=config)
    return one_batch.ModelRunner(
        model_config=config, mem_fraction_static=0.1, gpu_id=rank, nccl_port=ports.nccl_port,
        server_args=args,
    )  # fmt: skip


def answered(runner: Any, prompt: list[int]) -> list[tuple[int, float]]:
    """The tokens of a greedy answer with their logprobs: of a prefill, then token by token."""
    plain_kernels.hook()
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    params = SamplingParams(temperature=0, max_new_tokens=ANSWER)
    ids = array("q", prompt)
    request = one_batch.Req(
        rid="0", origin_input_text="", origin_input_ids=ids, sampling_params=params
    )
    request.full_untruncated_fill_ids, request.extend_end = ids, len(ids)
    request.logprob_start_len = -1
    token, logits, batch = one_batch.extend([request], runner)
    answer = []
    while True:
        answer.append((int(token[0]), float(logits[0].float().log_softmax(-1)[token[0]])))
        if len(answer) == ANSWER:
            return answer
        token, logits = one_batch.decode(token, batch, runner)


def memory(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters' storages, by parameter. What no tensor fills may be NaN."""
    wholes = {name: p.new_empty(0).set_(p.untyped_storage()) for name, p in state(model).items()}
    return {name: whole.nan_to_num() for name, whole in wholes.items()}


@torch.no_grad()
def said(job: Job, runner: Any) -> dict[str, Any]:
    """table: as a server packs it. kept: whether the class holds what it held before after a load
    of the same weights. recorded: whether recording changes nothing. loaded: its memory after one
    load of the others. bucketed: whether loads by buckets give the same. answer: with those."""
    model = runner.model
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
        answer=answered(runner, job.prompt) if job.prompt else [],
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
            max_total_tokens=1024, max_running_requests=4,
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
