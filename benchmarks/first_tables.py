"""Probes of the first day on a GPU that print a table each (first_day.py)."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import glob
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from first_rows import columns, ms, place, row, seconds, synchronize

CHUNK, LAYERS = 4096, 28  # tokens of a chunk of logits; of a model whose head it is
PAGEABLE_MEMORY_ACCESS = 88  # of CUdevice_attribute
MODULES = ("megatron.core", "transformer_engine", "deep_ep", "flash_attn", "apex", "sglang")
HEADERS = ("cudnn.h", "nccl.h")  # without them Transformer Engine does not compile
FAMILIES = ("qwen3", "glm4", "deepseek_v3", "qwen3_moe")  # fused rotary, half, latent, experts
MICRO_BATCHES = 2  # of the probe `syncs`
CLOSE = 1e-5  # between two Adams in fp32 after three steps of 0.1
# a stream sleeps for 2e9 cycles (about a second), another waits for it, the main one has work
HELD_UP = """
import time, torch
sleeper, waiter = torch.cuda.Stream(), torch.cuda.Stream()
x = torch.ones(1 << 20, device="cuda")
x * 2
with torch.cuda.stream(waiter):
    x * 3  # memory that is asked for later might stop the device
torch.cuda.synchronize()
with torch.cuda.stream(sleeper):
    torch.cuda._sleep(2_000_000_000)
    event = sleeper.record_event()
waiter.wait_event(event)
with torch.cuda.stream(waiter):
    x * 3
begun = time.perf_counter()
x * 2
torch.cuda.current_stream().synchronize()
main = time.perf_counter() - begun
torch.cuda.synchronize()
print(f"{1e3 * main:.1f} ms of {1e3 * (time.perf_counter() - begun):.0f}")
"""


def env(small: bool) -> None:
    """Prints what is there. Where a kernel may read pageable host memory (HMM), a tensor on the
    wrong device passes unseen."""
    columns("what", "here")
    row("python", sys.version.split()[0])
    for package in ("torch", "triton", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            row(package, importlib.metadata.version(package))
    row("CUDA of torch", torch.version.cuda)
    if not small and torch.cuda.is_available():
        gpu()
    for module in MODULES:
        row(f"import {module}", imported(module))
    for command in ("nvcc", "gcc", "ninja"):
        row(command, version(command))
    for header in HEADERS:
        row(header, next(found(header), "missing"))
    row("cores", len(os.sched_getaffinity(0)))
    for folder in ("/tmp", "/dev/shm"):
        row(f"free in {folder}", f"{shutil.disk_usage(folder).free / 2**30:.0f} GiB")


def gpu() -> None:
    """Prints the rows of env about the GPU."""
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    row("GPU", f"{name}, compute capability {capability[0]}.{capability[1]}")
    free, total = torch.cuda.mem_get_info()
    row("memory", f"{free / 2**30:.1f} GiB of {total / 2**30:.1f} are free")
    row("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    value = ctypes.c_int()  # torch has started CUDA by now
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuDeviceGetAttribute(ctypes.byref(value), PAGEABLE_MEMORY_ACCESS, 0)
    row("kernels may read pageable host memory", "yes" if value.value else "no")


def imported(module: str) -> str:
    """Returns where `module` lies, or the last line of what its import says."""
    command = [sys.executable, "-c", f"import {module} as m; print(m.__file__)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "no end after 60 s"
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return lines[-1].strip()[:150] if lines else f"exit status {done.returncode}"


def version(command: str) -> str:
    if not shutil.which(command):
        return "missing"
    printed = subprocess.run([command, "--version"], capture_output=True, text=True).stdout
    number = re.search(r"\d+\.\d[\w.]*", printed)
    return number[0] if number else printed.strip()[:150]


def found(header: str) -> Iterator[str]:
    """Yields the places of a header where a compiler looks."""
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    folders = [*filter(None, os.environ.get("CPATH", "").split(":")), f"{toolkit}/include"]
    for folder in [*folders, "/usr/include", *glob.glob("/usr/include/*-linux-gnu")]:
        if os.path.isfile(path := os.path.join(folder, header)):
            yield path


def adam(small: bool) -> None:
    """Compares CpuFusedAdam, which engines take where Transformer Engine and apex are missing, with
    AdamW. Raises RuntimeError where they differ."""
    from megarl.parallel.cpu_kernels import CpuFusedAdam

    device, _ = place(small)
    ours, theirs = (
        torch.nn.Parameter(torch.linspace(-1, 1, 1000, device=device)) for _ in range(2)
    )
    pairs = (
        (ours, CpuFusedAdam([ours], lr=0.1)),
        (theirs, torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.0)),
    )
    columns("step", "largest difference from AdamW")
    for step in range(3):
        for param, optimizer in pairs:
            param.grad = torch.sin(3 * param.detach())
            optimizer.step()
        difference = float((ours - theirs).detach().abs().max())
        row(step + 1, f"{difference:.1e}")
        if not difference < CLOSE:
            raise RuntimeError(f"Adam differs from AdamW by {difference}, more than {CLOSE}")


def syncs(small: bool) -> None:
    """Counts where the host waits for the device in a forward pass and a training step of tiny
    models with four layers, by source line, beside what tests/dist/test_waits.py counts on a CPU.
    Waits of a backward count at the line that began it."""
    from tests.dist.engine_jobs import batch, loss_fn, make_engine, weight_fn
    from tests.tiny import save_tiny

    outputs = ("logprobs", "entropy")
    over: dict[str, Any] = dict(dtype="float32" if small else "bfloat16", max_tokens=60)
    columns("family", "recompute", "waits", "expected", "line")
    for family in FAMILIES:
        for recompute in ("none", "full"):
            with tempfile.TemporaryDirectory() as folder:
                path = str(save_tiny(Path(folder) / "m", family))
                engine = make_engine(path, {}, recompute_granularity=recompute, **over)

            def work(engine: Any = engine) -> None:
                engine.forward(batch())
                engine.train_batch(batch(), loss_fn, weight_fn, outputs=outputs)

            work()
            places = waits(work)
            row(family, recompute, sum(places.values()), expected(engine, recompute), "all")
            for line, times in places.most_common(12):
                row(family, recompute, times, "", line)
            engine.destroy()


def expected(engine: Any, recompute: str) -> int:
    """Returns the waits of `syncs` that a CPU counts: a result, the sums of a loss, a norm; with
    experts their loads, and what megatron-core asks in each layer and micro-batch."""
    from tests.dist.waits_jobs import LOADS, NORM, SANCTIONED, SUMS

    count = 1 + sum(SUMS.values()) + sum(NORM.values())
    if engine.model_config.moe is None:
        return count
    layers = engine.model_config.num_layers - len(engine.model_config.moe.dense_layers)
    passes = MICRO_BATCHES * (3 if recompute == "full" else 2)
    fused = importlib.util.find_spec("transformer_engine") is not None
    asked = 1 if fused else sum(SANCTIONED.values())
    return count + sum(LOADS.values()) + layers * passes * asked


def waits(work: Callable[[], None]) -> collections.Counter[str]:
    """Returns how often each line of `work` waits for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_initialized():
            torch.cuda.set_sync_debug_mode("warn")
        work()
        if torch.cuda.is_initialized():
            torch.cuda.set_sync_debug_mode("default")
    return collections.Counter(
        f"{'/'.join(w.filename.split('/')[-3:])}:{w.lineno}"
        for w in caught
        if "synchroniz" in str(w.message)
    )


def head(small: bool) -> None:
    """Measures the LM head by Triton's kernels and by torch: its passes over the logits come on top
    of its matrix products. With --small the kernels are interpreted."""
    vocab, tokens, widths = (512, 32, (64,)) if small else (151936, 16384, (1024, 4096))
    if small:
        os.environ["TRITON_INTERPRET"] = "1"  # read as triton is imported
    device, dtype = place(small)
    labels = torch.randint(vocab, (tokens,), device=device)
    columns(
        "hidden", "outputs", "by", "forward ms", "and backward ms", "its products ms", "over them",
        f"of a step of {LAYERS} layers", "peak GiB",
    )  # fmt: skip
    for width in widths:
        x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
        weight = torch.randn(vocab, width, device=device, dtype=dtype) * width**-0.5
        weight.requires_grad_()
        least, layers = head_products(x, weight)
        for outputs in (("logprobs",), ("logprobs", "entropy")):
            for by in ("kernels", "torch"):
                forward, both, peak = head_costs(x, weight, labels, outputs, by)
                row(
                    width, ", ".join(outputs), by, f"{forward:.2f}", f"{both:.2f}", f"{least:.2f}",
                    f"{both / least:.2f}", f"{both / (both + layers):.0%}", f"{peak:.2f}",
                )  # fmt: skip


def head_products(x: torch.Tensor, weight: torch.Tensor) -> tuple[float, float]:
    """Returns ms of the head's four products, forward and backward (logits twice), by chunks, and
    those of a dense model's LAYERS: three times 12 * hidden * hidden numbers a layer and token."""
    with torch.no_grad():
        layer = x.new_empty(12 * x.shape[1], x.shape[1]).normal_()
        of_a_layer = ms(lambda: torch.mm(x, layer.t()))
        g = torch.mm(x[:CHUNK], weight.t())

        def products() -> None:
            for part in x.split(CHUNK):
                torch.mm(part, weight.t())
                torch.mm(part, weight.t())
                torch.mm(g[: len(part)], weight)
                torch.mm(g[: len(part)].t(), part)

        return ms(products), 3 * LAYERS * of_a_layer


def head_costs(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, outputs: tuple[str, ...], by: str
) -> tuple[float, float, float]:
    """Returns ms without and with backward, and the peak in GiB."""
    from megarl.parallel import vocab_parallel

    shard = vocab_parallel.VocabShard(start=0, rows=len(weight), vocab_size=len(weight))
    if by == "kernels" and not vocab_parallel.by_kernels(x):
        raise RuntimeError("triton is not installed")

    def run() -> torch.Tensor:
        return vocab_parallel.token_outputs(
            x, weight, labels, shard=shard, outputs=outputs, temperature=0.9, chunk_tokens=CHUNK
        )

    with contextlib.ExitStack() as stack:
        if by == "torch":
            stack.enter_context(mock.patch.object(vocab_parallel, "by_kernels", lambda x: False))
        if x.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            forward = ms(run)
        both = ms(lambda: run().sum().backward())
    return forward, both, torch.cuda.max_memory_allocated() / 2**30 if x.is_cuda else 0.0


def connections(small: bool) -> None:
    """Measures how long work of the main stream waits while another stream waits, with one hardware
    queue (what trainers get) and with eight."""
    columns("CUDA_DEVICE_MAX_CONNECTIONS", "the main stream waited")
    for queues in ("1", "8"):
        if small:
            row(queues, "needs a GPU")
            continue
        done = subprocess.run(
            [sys.executable, "-c", HELD_UP],
            env=os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": queues},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        row(queues, done.stdout.strip())


def offload(small: bool) -> None:
    """Measures copies to and from pinned host memory, and passes of a frozen model that rests
    there."""
    if not small:
        columns("GiB", "pinned in s", "to the device GB/s", "back GB/s")
        for gib in (1, 3):
            row(gib, *copies(gib << 30))
        print()
    columns("weights of a frozen model", "GiB", "a pass ms")
    for rests in (False, True):
        row("rest in host memory" if rests else "stay", *frozen(small, rests))


def copies(size: int) -> tuple[str, str, str]:
    """Returns the seconds of pinning `size` bytes, and GB/s of their copies up and down."""
    begun = time.perf_counter()
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pinned = time.perf_counter() - begun
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    up = ms(lambda: there.copy_(host, non_blocking=True))
    down = ms(lambda: host.copy_(there, non_blocking=True))
    return f"{pinned:.2f}", f"{1e-6 * size / up:.1f}", f"{1e-6 * size / down:.1f}"


def frozen(small: bool, rests: bool) -> tuple[str, str]:
    """Returns the GiB of weights of a frozen model of random weights, and the ms of its pass."""
    from gpu_train import Work, batch, write_config

    from megarl.config.engine import MicroBatchSpec, TrainEngineConfig
    from megarl.engine import MegatronEngine

    if small:
        shape, memory = "tiny", None
        work = Work(tokens=256, longest=64, budget=128, chunk=32)
    else:
        total = torch.cuda.mem_get_info()[1]
        shape, memory = "7b" if total > 70e9 else "0.5b", 0.75 * total
        work = Work(tokens=32768, longest=4096, budget=8192, chunk=2048)
    with tempfile.TemporaryDirectory() as folder:
        write_config(shape, Path(folder), work, memory=memory)
        engine = MegatronEngine(
            TrainEngineConfig(
                path=folder, init_from_scratch=True, offload=rests,
                dtype="float32" if small else "bfloat16",
                mb_spec=MicroBatchSpec(max_tokens_per_mb=work.budget),
            )
        )  # fmt: skip
        engine.initialize()
    sequences = batch(work, engine.model_config.vocab_size, 0)
    size = sum(p.nbytes for p in engine.state.params.values())
    spent = ms(lambda: engine.forward(sequences), 3)
    engine.destroy()
    return f"{size / 2**30:.2f}", f"{spent:.0f}"


def tries(small: bool) -> None:
    """Measures attention over the trie of a prompt and eight answers, forward and backward, beside
    torch's over the eight whole rows. A trie of another size may compile anew."""
    from megarl.models.trie_attention import prepare
    from megarl.parallel.packing import Segment

    device, _ = place(small)
    prompt, answer, heads, width = (64, 32, 4, 16) if small else (2048, 1024, 16, 128)
    begins = [prompt + n * answer for n in range(8)]
    columns("attention", "tokens", "first s", "then ms")
    for last in (answer, answer, answer - (8 if small else 64)):
        ends = [*begins[1:], begins[-1] + last]
        segments = [Segment(0, prompt, None), *(Segment(b, e, 0) for b, e in zip(begins, ends))]
        q, k, v = (leaf(small, ends[-1], n, width) for n in (heads, heads // 4, heads // 4))
        begun = time.perf_counter()
        attend = prepare(segments, device)

        def by_trie(attend: Any = attend, qkv: Any = (q, k, v)) -> None:
            attend(*qkv, width**-0.5).sum().backward()

        by_trie()
        synchronize()
        row("of the trie", ends[-1], f"{time.perf_counter() - begun:.1f}", f"{ms(by_trie):.2f}")
    tokens = prompt + answer
    q, k, v = (leaf(small, 8, n, tokens, width) for n in (heads, heads // 4, heads // 4))
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def by_rows() -> None:
        sdpa(q, k, v, is_causal=True, enable_gqa=True).sum().backward()

    first = seconds(by_rows)
    row("of 8 whole rows", 8 * tokens, f"{first:.1f}", f"{ms(by_rows):.2f}")


def slices(small: bool) -> None:
    """Sends slices to a server, which is compared after each sync. What passed is noted for
    `weight_sync.options.sharded=auto`."""
    from first_slices import run

    columns("slices", "s", "GB/s")
    for cells in run(small):
        row(*cells)


def leaf(small: bool, *shape: int) -> torch.Tensor:
    device, dtype = place(small)
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
