"""Measures how full and how balanced micro-batches are: useful tokens / computed tokens, and the
work of the heaviest data-parallel rank / the mean (matrices and causal attention).

    python benchmarks/packing.py

"Balanced by length" is the same plan where only tokens are counted.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.engine.micro_batch import alignment
from megarl.models.flops import sequence_cost
from megarl.models.hf_config import read_hf_config
from megarl.parallel.layout import Layout
from megarl.parallel.packing import TOKENS, Cost, MicroBatchPlan, plan_micro_batches, slot_lengths

BATCH, ROUNDS = 512, 20
QWEN3_8B = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=4096, head_dim=128,
    intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=151936, max_position_embeddings=40960, rope_theta=1e6, rms_norm_eps=1e-6,
)  # fmt: skip
LAYOUTS = {
    "dp8": Layout(dp=8),
    "tp8 sp dp8": Layout(tp=8, dp=8, sequence_parallel=True),
    "tp8 sp cp2 dp4": Layout(tp=8, cp=2, dp=4, sequence_parallel=True),
    "tp2 sp cp4 dp8": Layout(tp=2, cp=4, dp=8, sequence_parallel=True),
}


def gsm8k_like(rng: random.Random) -> int:
    """Draws lengths of a question of about 100 tokens and a worked answer of about 150."""
    return round(rng.lognormvariate(4.6, 0.35)) + round(rng.lognormvariate(5.0, 0.45))


def long_tail(rng: random.Random) -> int:
    """Draws lengths of reasoning: a median of 1500 tokens, a tail cut at 32k."""
    return 100 + min(32_000, round(rng.lognormvariate(7.3, 1.1)))


# lengths and the token budget of one device
DISTRIBUTIONS: dict[str, tuple[Callable[[random.Random], int], int]] = {
    "GSM8K-like": (gsm8k_like, 8192),
    "long tail": (long_tail, 32768),
}


def cost() -> Cost:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(QWEN3_8B))
        return sequence_cost(read_hf_config(directory))


def make_plan(lengths: Sequence[int], layout: Layout, budget: int, by: Cost) -> MicroBatchPlan:
    return plan_micro_batches(
        lengths, dp=layout.dp, max_tokens=budget * layout.cp, align=alignment(layout), cost=by
    )


def efficiency(lengths: Sequence[int], layout: Layout, plan: MicroBatchPlan) -> float:
    """Returns useful tokens / computed tokens; dummies of empty micro-batches count as computed."""
    rows = [slot_lengths([lengths[i] for i in mb], alignment(layout)) for mbs in plan for mb in mbs]
    return sum(lengths) / sum(map(sum, rows))


def imbalance(lengths: Sequence[int], plan: MicroBatchPlan, work: Cost) -> float:
    """Returns the heaviest rank's work / the mean: the others wait for it at the end of a step."""
    loads = [sum(work(lengths[i]) for mb in mbs for i in mb) for mbs in plan]
    return max(loads) * len(loads) / sum(loads)


def main() -> None:
    work = cost()
    print(f"{BATCH} sequences, mean of {ROUNDS} batches, Qwen3-8B's work")
    print(f"{'lengths':12} {'layout':16} {'efficiency':>10} {'imbalance':>10} {'by length':>10}")
    for name, (draw, budget) in DISTRIBUTIONS.items():
        for layout_name, layout in LAYOUTS.items():
            figures = []
            for seed in range(ROUNDS):
                rng = random.Random(seed)
                lengths = [draw(rng) for _ in range(BATCH)]
                plan = make_plan(lengths, layout, budget, work)
                other = make_plan(lengths, layout, budget, TOKENS)
                figures.append((
                    efficiency(lengths, layout, plan), imbalance(lengths, plan, work),
                    imbalance(lengths, other, work),
                ))  # fmt: skip
            full, ours, by_length = (statistics.mean(f) for f in zip(*figures, strict=True))
            print(f"{name:12} {layout_name:16} {full:10.4f} {ours:10.4f} {by_length:10.4f}")


if __name__ == "__main__":
    main()
