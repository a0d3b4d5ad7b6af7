"""Measures trained tokens/s of MegatronEngine.train_batch beside transformers + torch AdamW.

    python benchmarks/train_batch.py [--quick] [--sizes 5m 20m 135m] [--threads 2] [--rounds 5]

Both sides train the same random model on the same batches, in fp32 on the CPU, with the same loss
(the policy gradient of GRPO's first update), token budget per micro-batch, clipping and AdamW, each
side in its own process. They take turns, step by step, so that the ratio holds where other load
changes the rates; every round compares losses and gradient norms, so that the work is the same.

The HF loop pads to the longest sequence of each micro-batch. "sorted" takes the sequences by
length, the best order for such a loop; "unsorted" takes them in the order of the batch.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

Batch = dict[str, torch.Tensor]
LR, BETAS, EPS, DECAY, CLIP = 1e-5, (0.9, 0.95), 1e-8, 0.01, 1.0
STEP_TIMEOUT = 1200.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and the batch it is trained on: `sequences` of up to `longest` tokens."""

    family: str
    config: dict[str, Any]
    sequences: int
    longest: int
    budget: int  # tokens per micro-batch


SIZES = {
    "5m": Size(
        family="qwen3", sequences=64, longest=256, budget=4096,
        config=dict(
            vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=6,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
        ),
    ),
    "20m": Size(
        family="qwen3", sequences=32, longest=256, budget=2048,
        config=dict(
            vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=6,
            num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
        ),
    ),
    "135m": Size(  # the shape of SmolLM2-135M
        family="llama", sequences=16, longest=256, budget=1024,
        config=dict(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
            rope_theta=100_000.0,
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    size: str
    lengths: str  # "equal" or "ragged"
    model: Path
    threads: int
    quick: bool
    given_budget: int | None = None

    @property
    def budget(self) -> int:
        """Returns the tokens per micro-batch."""
        return self.given_budget or SIZES[self.size].budget

    def batch(self, step: int) -> Batch:
        """Returns sequences of max/2 tokens each, or of lognormal lengths between 16 and max."""
        size = SIZES[self.size]
        rows = size.sequences // 4 if self.quick else size.sequences
        g = torch.Generator().manual_seed(step)
        if self.lengths == "equal":
            lens = torch.full((rows,), size.longest // 2)
        else:
            spread = torch.exp(0.8 * torch.randn(rows, generator=g))
            lens = (spread * size.longest / 3).long().clamp(16, size.longest)
        width = int(lens.max())
        mask = torch.arange(width)[None] < lens[:, None]
        ids = torch.randint(3, size.config["vocab_size"], (rows, width), generator=g)
        loss_mask = mask.clone()
        loss_mask[:, 0] = False  # nothing predicts the first token
        advantages = torch.randn(rows, generator=g)
        return dict(
            input_ids=ids * mask, attention_mask=mask, loss_mask=loss_mask, advantages=advantages
        )


def make_model(size: Size, path: Path) -> None:
    import transformers as T

    name = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama"}[size.family]
    config = getattr(T, name + "Config")(
        **size.config, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    getattr(T, name + "ForCausalLM")(config).float().save_pretrained(path)


def loss_weight(batch: Batch) -> float:
    return float(batch["loss_mask"].sum())


def policy_gradient(outputs: Batch, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns -sum advantage * log p, whose gradient is GRPO's while the ratio is one."""
    logp = outputs["logprobs"] * batch["loss_mask"]
    return -(batch["advantages"][:, None] * logp).sum(), {}


# ---- the two sides: Case -> a function of the batch that trains one step ------------------------


def megarl_side(case: Case, parallel: dict[str, Any] | None = None) -> Any:
    from megarl.config.engine import (
        MicroBatchSpec,
        OptimizerConfig,
        ParallelConfig,
        TrainEngineConfig,
    )
    from megarl.engine import MegatronEngine

    engine = MegatronEngine(
        TrainEngineConfig(
            path=str(case.model),
            dtype="float32",
            parallel=ParallelConfig(**(parallel or {})),
            mb_spec=MicroBatchSpec(max_tokens_per_mb=case.budget),
            optimizer=OptimizerConfig(
                lr=LR, weight_decay=DECAY, beta1=BETAS[0], beta2=BETAS[1], eps=EPS,
                gradient_clipping=CLIP,
            ),
        )
    )  # fmt: skip
    engine.initialize()

    def step(batch: Batch) -> tuple[float, float]:
        stats = engine.train_batch(batch, policy_gradient, loss_weight)
        return stats["loss"], stats["grad_norm"]

    return step


def hf_side(case: Case, *, by_length: bool) -> Any:
    import transformers as T

    model = T.AutoModelForCausalLM.from_pretrained(
        case.model, dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            dict(params=[p for p in params if p.ndim > 1], weight_decay=DECAY),
            dict(params=[p for p in params if p.ndim == 1], weight_decay=0.0),
        ],
        lr=LR, betas=BETAS, eps=EPS, fused=True,
    )  # fmt: skip

    def step(batch: Batch) -> tuple[float, float]:
        total, weight = 0.0, loss_weight(batch)
        for mb in padded_micro_batches(batch, case.budget, by_length=by_length):
            logits = model(
                input_ids=mb["input_ids"], attention_mask=mb["attention_mask"], use_cache=False
            ).logits[:, :-1]
            # log_softmax and gather in one: the fastest of the usual ways on a CPU
            logp = -F.cross_entropy(
                logits.flatten(0, 1), mb["input_ids"][:, 1:].flatten(), reduction="none"
            )
            logp = F.pad(logp.view(logits.shape[:2]), (1, 0))
            loss = policy_gradient({"logprobs": logp}, mb)[0] / weight
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total, float(norm)

    return step


def padded_micro_batches(batch: Batch, budget: int, *, by_length: bool) -> Iterator[Batch]:
    """Yields consecutive sequences, trimmed, cut before rows * longest exceeds the budget."""
    lens = batch["attention_mask"].sum(1).tolist()
    order = sorted(range(len(lens)), key=lambda i: -lens[i]) if by_length else range(len(lens))
    rows: list[int] = []
    for i in [*order, None]:
        if rows and (i is None or max(lens[j] for j in [*rows, i]) * (len(rows) + 1) > budget):
            width = max(lens[j] for j in rows)
            yield {k: v[rows][:, :width] if v.ndim > 1 else v[rows] for k, v in batch.items()}
            rows = []
        if i is not None:
            rows.append(i)


SIDES = {
    "megarl": megarl_side,
    "HF sorted": lambda case: hf_side(case, by_length=True),
    "HF unsorted": lambda case: hf_side(case, by_length=False),
}


def serve(side: str, case: Case, pipe: Connection) -> None:
    """Runs a side's process: receives step numbers, sends measurements, ends at None."""
    torch.set_num_threads(case.threads)
    serve_steps(SIDES[side](case), case, pipe)


def serve_steps(step: Any, case: Case, pipe: Connection) -> None:
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        batch = case.batch(number)
        wall, cpu = time.perf_counter(), time.process_time()
        loss, norm = step(batch)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        pipe.send(dict(
            wall=wall, cpu=cpu, tokens=loss_weight(batch), loss=loss, norm=norm, rss_gib=rss
        ))  # fmt: skip


# ---- the comparison -----------------------------------------------------------------------------


@contextmanager
def running(side: str, case: Case) -> Iterator[Connection]:
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=serve, args=(side, case, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ask(ours, side) == "ready"
        yield ours
        ours.send(None)
        process.join(30)
    finally:
        process.kill()
        process.join()


def ask(pipe: Connection, side: str, *message: Any) -> Any:
    for m in message:
        pipe.send(m)
    if not pipe.poll(STEP_TIMEOUT):
        raise TimeoutError(f"{side} did not answer within {STEP_TIMEOUT:.0f} s")
    return pipe.recv()


def compare(case: Case, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Returns by side the measurements of every round after the warm-up."""
    sides = [s for s in SIDES if case.lengths == "ragged" or s != "HF unsorted"]
    figures: dict[str, list[dict[str, float]]] = {s: [] for s in sides}
    with ExitStack() as stack:
        pipes = {s: stack.enter_context(running(s, case)) for s in sides}
        for number in range(rounds + 1):
            answers = {s: ask(pipes[s], s, number) for s in sides}
            for side in sides[1:]:
                check_same_work(answers["megarl"], answers[side], f"{case.size} {side} {number}")
            if number:
                for side in sides:
                    figures[side].append(answers[side])
    return figures


def check_same_work(a: dict[str, float], b: dict[str, float], where: str) -> None:
    for key in ("loss", "norm"):
        bound = 1e-3 * max(1.0, abs(b[key]))
        if abs(a[key] - b[key]) > bound:
            raise RuntimeError(f"{where}: {key} {a[key]} and {b[key]} differ: not the same work")


def row(case: Case, figures: dict[str, list[dict[str, float]]], other: str) -> str:
    ours, theirs = figures["megarl"], figures[other]

    def ratio(key: str) -> str:
        r = sorted(t[key] / o[key] for o, t in zip(ours, theirs, strict=True))
        return f"{statistics.median(r):.2f} ({r[0]:.2f}-{r[-1]:.2f})"

    def median(rounds: list[dict[str, float]], f: Any) -> float:
        return statistics.median(map(f, rounds))

    def rate(f: dict[str, float]) -> float:
        return f["tokens"] / f["wall"]

    return (
        f"| {case.size} | {case.lengths} | {other} | {median(ours, rate):.0f} "
        f"| {median(theirs, rate):.0f} | {ratio('wall')} | {ratio('cpu')} "
        f"| {ours[-1]['rss_gib']:.1f} / {theirs[-1]['rss_gib']:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--lengths", nargs="+", default=["equal", "ragged"])
    parser.add_argument("--threads", type=int, default=2, help="of each side; they take turns")
    parser.add_argument("--rounds", type=int, default=5, help="after one to warm up")
    parser.add_argument("--quick", action="store_true", help="small batches, two rounds, 5m only")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.rounds = ["5m"], 2
    os.environ.update(
        OMP_NUM_THREADS=str(args.threads), MEGARL_DEVICE="cpu", CUDA_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1",
        THP_MEM_ALLOC_ENABLE="1",  # megarl sets it by itself, and it helps both
    )  # fmt: skip
    print(f"fp32, CPU, {args.threads} threads, median (min-max) of {args.rounds} rounds\n")
    print("| model | lengths | against | megarl tokens/s | HF tokens/s | ratio of wall time "
          "| ratio of CPU time | peak GiB |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            model = Path(folder) / size
            make_model(SIZES[size], model)
            for lengths in args.lengths:
                case = Case(
                    size=size, lengths=lengths, model=model, threads=args.threads, quick=args.quick
                )
                figures = compare(case, args.rounds)
                for other in list(figures)[1:]:
                    print(row(case, figures, other), flush=True)


if __name__ == "__main__":
    main()
