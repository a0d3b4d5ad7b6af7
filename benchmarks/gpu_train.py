"""Measures how much of a GPU train_batch uses, and what the chunked LM head saves.

    python benchmarks/gpu_train.py [--shapes 0.5b 7b] [--tokens 32768] [--longest 4096] [--smoke]

MFU is the model's arithmetic (megarl.models.flops.train_flops: matrix products, causal attention by
half, nothing for recomputation or padding) per second of a step, divided by the rate of the fastest
matrix product measured on the same device just before. The benchmark runs in bfloat16, in one
process, on random weights and lognormal lengths, with the policy gradient of GRPO's first update.

A shape's weights, gradients and AdamW state take 18 bytes a parameter. Where these, a micro-batch's
activations and all of its logits do not fit (7B on one GPU), layers are left out until they do; the
remaining layers and the embedding have the shape's sizes. `--recompute full` fits more layers.
Memory is the allocator's peak; the head's rows are the same step with logits of --chunk tokens at a
time, and with the logits of a whole micro-batch kept for backward.

`--smoke` runs the same code with a tiny shape on the CPU; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from train_batch import Batch, loss_weight, policy_gradient

from megarl.config.engine import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from megarl.engine import MegatronEngine
from megarl.models.flops import train_flops
from megarl.parallel import mcore

BYTES_PER_PARAMETER = 18  # bf16 weight, fp32 gradient, fp32 weight and two moments
USABLE = 0.9  # of the GPU's memory; the rest is the CUDA context, workspaces and fragments
WARM_UP, ROUNDS = 2, 5
# Qwen2.5's config.json
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": dict(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "7b": dict(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
    ),
    "tiny": dict(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step's work: `tokens` in sequences of up to `longest`, micro-batches of `budget` tokens."""

    tokens: int
    longest: int
    budget: int
    chunk: int


def write_config(
    shape: str, folder: Path, work: Work, *, memory: float | None, recompute: str = "none"
) -> int:
    """Writes config.json of `shape` with as many layers as fit in `memory` bytes for `work`.
    Returns their number; SystemExit where not even one fits.
    """
    config = SHAPES[shape] | dict(
        model_type="qwen2", architectures=["Qwen2ForCausalLM"], rms_norm_eps=1e-6,
        rope_theta=1e6, max_position_embeddings=work.longest, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    if memory is not None:
        embedding = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
        kv = config["num_key_value_heads"] / config["num_attention_heads"]
        layer = hidden * (hidden * (2 + 2 * kv) + 3 * config["intermediate_size"])
        whole, kept = activation_bytes(config, work.budget, recompute)
        fixed = BYTES_PER_PARAMETER * embedding + logit_bytes(config, work.budget) + whole
        fits = int((USABLE * memory - fixed) / (BYTES_PER_PARAMETER * layer + kept))
        if fits < 1:
            raise SystemExit(
                f"{shape}: not one layer fits beside {fixed / 2**30:.0f} GiB of embedding, logits "
                f"and activations: use a smaller --budget than {work.budget}, or --shapes 0.5b"
            )
        layers = min(layers, fits)
    (folder / "config.json").write_text(json.dumps(config | dict(num_hidden_layers=layers)))
    return layers


def activation_bytes(config: dict[str, Any], tokens: int, recompute: str) -> tuple[float, float]:
    """Returns the bytes of bf16 activations of `tokens`: of the layer at work, and of each layer
    that waits for its backward.

    A layer keeps the inputs of its norms and linear maps, q and k before and after rope, v, the
    attention's output, and of the MLP both halves and their product.
    """
    kv = config["num_key_value_heads"] / config["num_attention_heads"]
    hidden = config["hidden_size"]
    whole = 2.0 * tokens * (hidden * (7 + 3 * kv) + 3 * config["intermediate_size"])
    return (whole, 2.0 * tokens * hidden) if recompute == "full" else (0.0, whole)


def logit_bytes(config: dict[str, Any], tokens: int) -> float:
    """Returns the bytes of fp32 logits of `tokens` and of their exponentials ("logits kept")."""
    return 2 * 4.0 * tokens * config["vocab_size"]


def batch(work: Work, vocab: int, seed: int) -> Batch:
    """Returns sequences of lognormal lengths, whose mean is a third of the longest."""
    g = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < work.tokens:
        n = int(torch.exp(0.8 * torch.randn((), generator=g)) * work.longest / 4)
        lengths.append(min(max(n, 16), work.longest, max(16, work.tokens - sum(lengths))))
    lens = torch.tensor(lengths)
    mask = torch.arange(int(lens.max()))[None] < lens[:, None]
    ids = torch.randint(3, vocab, mask.shape, generator=g) * mask
    loss_mask = mask.clone()
    loss_mask[:, 0] = False
    advantages = torch.randn(len(lens), generator=g)
    return dict(input_ids=ids, attention_mask=mask, loss_mask=loss_mask, advantages=advantages)


def seconds(fn: Callable[[], Any]) -> float:
    if mcore.on_cuda():
        torch.cuda.synchronize()
    start = time.perf_counter()
    fn()
    if mcore.on_cuda():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def matmul_ceiling(sizes: tuple[int, ...]) -> float:
    """Measures the FLOP/s of the fastest square bf16 product of `sizes`."""
    best = 0.0
    for n in sizes:
        a, b = (torch.randn(n, n, device=mcore.device(), dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)

        def products(a: Any = a, b: Any = b, out: Any = out) -> None:
            for _ in range(10):
                torch.mm(a, b, out=out)

        products()
        best = max(best, 10 * 2 * n**3 / min(seconds(products) for _ in range(5)))
    return best


def reset_peak() -> None:
    if mcore.on_cuda():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float:
    """Returns the allocator's peak since `reset_peak`; on the CPU, the process's peak so far."""
    if mcore.on_cuda():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(path: Path, work: Work, *, chunked: bool, recompute: str) -> dict[str, float]:
    """Measures a step: seconds (median over ROUNDS), tokens, FLOPs and peak memory."""
    head: dict[str, Any] = dict(lm_head_chunk_tokens=work.chunk, lm_head_keep_mb=0)
    if not chunked:
        head = dict(lm_head_chunk_tokens=2 * work.budget, lm_head_keep_mb=1 << 20)
    engine = MegatronEngine(
        TrainEngineConfig(
            path=str(path), init_from_scratch=True, dtype="bfloat16",
            optimizer=OptimizerConfig(lr=1e-6), recompute_granularity=recompute,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=work.budget), options=head,
        )
    )  # fmt: skip
    engine.initialize()
    vocab, times, rates = engine.model_config.vocab_size, [], []
    for number in range(WARM_UP + ROUNDS):
        if number == WARM_UP:
            reset_peak()
        b = batch(work, vocab, number)
        spent = seconds(lambda b=b: engine.train_batch(b, policy_gradient, loss_weight))
        if number >= WARM_UP:
            lengths = b["attention_mask"].sum(1).tolist()
            times.append(spent / sum(lengths))
            rates.append(train_flops(engine.model_config, lengths) / spent)
    engine.destroy()
    return dict(
        tokens=1 / statistics.median(times), flops=statistics.median(rates), memory=peak_gib()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["0.5b", "7b"], choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=131072, help="of a step")
    parser.add_argument("--longest", type=int, default=4096, help="sequence")
    parser.add_argument("--budget", type=int, default=16384, help="tokens per micro-batch")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens per chunk of the LM head")
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, on the CPU too")
    args = parser.parse_args()
    work = Work(tokens=args.tokens, longest=args.longest, budget=args.budget, chunk=args.chunk)
    sizes: tuple[int, ...] = (4096, 8192, 16384)
    if args.smoke:
        args.shapes, sizes = ["tiny"], (256,)
        work = Work(tokens=256, longest=64, budget=128, chunk=32)
    elif not mcore.on_cuda():
        parser.error("no CUDA device: MFU is measured on a GPU (--smoke runs the code on a CPU)")
    memory = torch.cuda.mem_get_info()[1] if mcore.on_cuda() else None
    device = torch.cuda.get_device_name() if mcore.on_cuda() else "CPU"
    ceiling = matmul_ceiling(sizes)
    print(f"{device}, bf16, matrix products at {ceiling / 1e12:.2f} TFLOP/s\n")
    print("| shape | layers | LM head | tokens/s | TFLOP/s | MFU of the ceiling | peak GiB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            path = Path(folder)
            layers = write_config(shape, path, work, memory=memory, recompute=args.recompute)
            for chunked in (True, False):
                m = measure(path, work, chunked=chunked, recompute=args.recompute)
                print(
                    f"| {shape} | {layers}/{SHAPES[shape]['num_hidden_layers']} "
                    f"| {f'{work.chunk} tokens at a time' if chunked else 'logits kept'} "
                    f"| {m['tokens']:.0f} | {m['flops'] / 1e12:.3g} | {m['flops'] / ceiling:.1%} "
                    f"| {m['memory']:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
