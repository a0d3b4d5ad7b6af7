"""The probes `train*` and `loop*` of first_day.py: training steps one by one, and whole runs."""

from __future__ import annotations

import collections
import gzip
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from first_rows import put, put_detail, seconds

STEPS = 7
WARM = 2  # steps that compile and allocate
MARGIN_S = 8.0  # before the limit, for what follows the steps
# kernels by their names; the first pattern that fits
KINDS = {
    "attention": r"flash|fmha|sdpa|attention",
    "lm head": r"read_kernel|gradient_kernel",
    "gemm": r"gemm|nvjet|cutlass|xmma|splitK|cublas",
    "adam": r"adam|multi_tensor",
    "norm": r"norm",
    "gather, index": r"gather|index|scatter",
    "copy": r"memcpy|memset|copy|CatArray",
    "reduce": r"reduce",
    "triton": r"triton",
    "elementwise": r"elementwise|vectorized",
}
# metrics of a run that the probe `loop` repeats
METRICS = (
    "timing/", "memory/", "weight_sync/", "perf/", "reward/mean", "train_rollout", "first_ratio",
    "rollout/latency",
)  # fmt: skip


def train(small: bool, out: Path, limit: float, *shapes: str, traced: bool = False) -> None:
    """Runs steps of train_batch: the first and later ones, MFU, and memory beside the planner's.

    shapes: of gpu_train. limit: seconds of all. traced: also profiles a step of each shape.
    """
    from gpu_train import Work, matmul_ceiling

    from megarl.parallel import mcore

    end = time.monotonic() + limit - MARGIN_S
    ceiling = matmul_ceiling((256,) if small else (8192,))
    name = torch.cuda.get_device_name() if mcore.on_cuda() else "CPU"
    put(device=name, ceiling_tflops=round(ceiling / 1e12, 1))
    for shape in ("tiny",) if small else shapes:
        budget = 16384 if shape == "0.5b" else 8192
        work = Work(tokens=4 * budget, longest=4096, budget=budget, chunk=4096)
        if small:
            work = Work(tokens=256, longest=64, budget=128, chunk=32)
        train_shape(shape, work, ceiling, end, out if traced else None)


def train_shape(shape: str, work: Any, ceiling: float, end: float, traces: Path | None) -> None:
    """Runs steps of a model of random weights until `end`, and stores what they took."""
    from gpu_train import batch, peak_gib, reset_peak, write_config
    from train_batch import loss_weight, policy_gradient

    from megarl.config.engine import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
    from megarl.engine import MegatronEngine
    from megarl.models.flops import train_flops
    from megarl.parallel import mcore
    from megarl.parallel.layout import Layout
    from megarl.planning.memory import Workload, training_memory

    with tempfile.TemporaryDirectory() as folder:
        memory = torch.cuda.mem_get_info()[1] if mcore.on_cuda() else None
        layers = write_config(shape, Path(folder), work, memory=memory)
        engine = MegatronEngine(
            TrainEngineConfig(
                path=folder, init_from_scratch=True, dtype="bfloat16",
                optimizer=OptimizerConfig(lr=1e-6),
                mb_spec=MicroBatchSpec(max_tokens_per_mb=work.budget),
            )
        )  # fmt: skip
        created_s = seconds(engine.initialize)
    model = engine.model_config
    plan = Workload(batch_tokens=work.tokens, micro_batch_tokens=work.budget, sequence=work.longest)
    planned = max(stage.total for stage in training_memory(model, Layout(), plan))

    def step() -> None:
        engine.train_batch(sequences, policy_gradient, loss_weight)

    steps: list[tuple[float, float, int]] = []  # MFU, seconds, tokens
    for number in range(STEPS):
        sequences = batch(work, model.vocab_size, number)
        lengths = sequences["attention_mask"].sum(1).tolist()
        if number == WARM:
            reset_peak()
        took = seconds(step)
        mfu = train_flops(model, lengths) / took / ceiling
        steps.append((mfu, took, sum(lengths)))
        put_detail(
            shape=shape, step=number, s=round(took, 3), tokens=sum(lengths), mfu=round(mfu, 3)
        )
        if time.monotonic() > end:
            break
    again_s = seconds(step)  # no new shapes
    mfu, best_s, tokens = max(steps[WARM:] or steps)
    put(
        shape=shape, layers=layers, created_s=round(created_s, 1), first_s=round(steps[0][1], 1),
        best_s=round(best_s, 3), same_batch_again_s=round(again_s, 3),
        forward_s=round(seconds(lambda: engine.forward(sequences)), 3),
        tokens_per_s=round(tokens / best_s), mfu=round(mfu, 3), peak_gib=round(peak_gib(), 1),
        planned_gib=round(planned / 2**30, 1),
        reserved_gib=round(torch.cuda.max_memory_reserved() / 2**30, 1) if memory else None,
    )  # fmt: skip
    if traces and time.monotonic() < end:
        trace(step, traces / f"trace_{shape}.json.gz")
    engine.destroy()


def trace(step: Callable[[], None], file: Path) -> None:
    """Profiles a step: ms of kernels by kind, and the busy fraction of the device."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        took = seconds(step)
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(str(raw := Path(folder) / "trace.json"))
        text = raw.read_text()
    events = json.loads(text)["traceEvents"]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels = kernels or [e for e in events if e.get("cat") == "cpu_op"]
    kinds: collections.Counter[str] = collections.Counter()
    names: collections.Counter[str] = collections.Counter()
    busy, until = 0.0, -math.inf  # microseconds
    for event in sorted(kernels, key=lambda e: float(e["ts"])):
        begin, length = float(event["ts"]), float(event.get("dur", 0))
        busy += max(0.0, begin + length - max(begin, until))
        until = max(until, begin + length)
        kinds[kind_of(event["name"])] += length
        names[event["name"][:120]] += length
    put(
        profiled_s=round(took, 3), launches=len(kernels), device_busy=round(busy / 1e6 / took, 3),
        **{f"{kind}_ms": round(us / 1e3, 2) for kind, us in kinds.most_common()},
    )  # fmt: skip
    put_detail(longest_ms={name: round(us / 1e3, 2) for name, us in names.most_common(40)})
    file.write_bytes(gzip.compress(text.encode()))


def kind_of(kernel: str) -> str:
    """Returns the kind of a kernel by its name."""
    fits = (kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.I))
    return next(fits, "other")


def loop(small: bool, out: Path, sync: str, *overrides: str) -> None:
    """Runs GRPO with trainer and server on one device, from a model that learned the format.

    sync: weight_sync.type. overrides: of the configuration. The first loop leaves its model in
    `out` for later ones.
    """
    work = out.resolve() / "work"
    model, start = work / "model", work / "loop" / "sft" / "final"
    where = [f"fileroot={work}", "experiment_name=loop", "evaluator.at_start=false"]
    launch = ["-m", "megarl.launcher.local", "--nproc", "1", "--config"]
    if not start.is_dir():
        sizes = [] if small else ["--hidden", "1024", "--layers", "12"]
        timed("model", "examples/tiny_model.py", str(model), *sizes)
        timed(
            "sft", *launch, "configs/quickstart_sft.yaml", f"model.path={model}", *where,
            f"total_train_steps={8 if small else 40}", "model.optimizer.lr=3e-4",
        )  # fmt: skip
    run = start.parent.parent / f"{sync}_{os.getpid()}"
    try:
        timed(
            "grpo", *launch, "configs/quickstart_grpo.yaml", f"actor.path={start}", *where,
            f"trial_name={run.name}", "saver.final=false", "actor.parallel.tp=1",
            f"weight_sync.type={sync}", f"total_train_steps={2 if small else 6}",
            f"train_dataset.batch_size={16 if small else 128}", *overrides,
        )  # fmt: skip
    finally:
        repeat_metrics(run, out)


def timed(what: str, *command: str) -> None:
    """Runs a program of Python and stores its seconds. Raises CalledProcessError if it fails."""
    took = seconds(lambda: subprocess.run([sys.executable, *command], check=True))
    put(what=what, s=round(took, 1))


def repeat_metrics(run: Path, out: Path) -> None:
    """Stores the metrics of a run, and prints the ends of its servers' logs."""
    stats = run / "stats.jsonl"
    if stats.exists():
        rows = [json.loads(line) for line in stats.read_text().splitlines()]
        shutil.copy(stats, out / f"stats_{run.name}.jsonl")
        for n, row in enumerate(rows, 1):
            kept = {
                k: round(v, 4)
                for k, v in row.items()
                if isinstance(v, float) and k.startswith(METRICS)
            }
            (put if n == len(rows) else put_detail)(step=row.get("step"), **kept)
    for log in run.glob("server_*.log"):
        print(f"--- {log.name}", *log.read_text().splitlines()[-15:], sep="\n", flush=True)
