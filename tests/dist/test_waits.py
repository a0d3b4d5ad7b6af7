"""What a step waits for on a GPU, counted on a CPU (tests/waits.py), does not depend on the number
of its micro-batches and layers, but for what megatron-core waits for itself. Copies to the device
are out of pinned memory, and none is waited for.

This is a GPU without Transformer Engine, whose layers have no stand-in: with it the waits of
SANCTIONED are one a layer, the first. Code for CUDA alone (FlexAttention, activations in pinned
memory, Triton) is not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.engine import LoRAConfig
from tests.dist.engine_jobs import RECOMPUTE, Parallel, Tensors, batch
from tests.dist.waits_jobs import LOADS, NORM, RANKS, RESULT, SANCTIONED, SUMS, Pass, passes
from tests.dist.world import World
from tests.tiny import save_tiny

DENSE = ("qwen3", "qwen3_5_text")
MOE_LAYERS = 3  # of the tiny models' four; two experts a token
TOKENS = (60, 20)  # of a micro-batch: few and many of them

# ---- what the CPU's stand-ins do, not a GPU
CPU_ONLY = (
    "megarl/parallel/cpu_kernels.py:",
    # gloo's copies, at the end of what is coalesced or where it is waited for
    "megarl/parallel/mcore.py:manager",
    "megatron/core/distributed/param_and_grad_buffer.py:finish_grad_sync",
)

OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True)
LORA = LoRAConfig(r=2)
# name -> (family, processes, parallel, settings)
CASES: dict[str, tuple[str, int, Parallel, dict[str, Any]]] = {
    "dense": ("qwen3", 1, {}, {}),
    "dense recomputed": ("qwen3", 1, {}, RECOMPUTE),
    "dense dp2": ("qwen3", 2, {}, {}),
    "dense dp2 overlapped": ("qwen3", 2, {}, dict(optimizer=OVERLAP)),
    "dense adapters": ("qwen3", 1, {}, dict(lora=LORA)),
    "dense pp2": ("qwen3", 2, dict(pp=2), {}),
    "tries": ("qwen3", 1, {}, dict(share_prefixes=True)),
    "states": ("qwen3_5_text", 1, {}, {}),
    "moe": ("qwen3_moe", 1, {}, {}),
    "moe ep2": ("qwen3_moe", 2, dict(ep=2), {}),
    "mla": ("deepseek_v3", 1, {}, {}),
    "mla recomputed": ("deepseek_v3", 1, {}, RECOMPUTE),
    "r3": ("qwen3_moe", 1, {}, dict(router_replay="rollout")),
    "r3 tries": ("qwen3_moe", 1, {}, dict(router_replay="rollout", share_prefixes=True)),
}


def with_routes(b: Tensors) -> Tensors:
    """Returns the batch with the first two experts for every token, and none known of some."""
    routes = torch.arange(2).expand(*b["input_ids"].shape, MOE_LAYERS + 1, 2).clone()
    routes[:, -3:] = -1
    return {**b, "routed_experts": routes}


def expected(name: str, rank: int, verb: str, outputs: int) -> Counter[str]:
    """Returns the waits of a pass by line, but for those of a micro-batch."""
    _, processes, parallel, _ = CASES[name]
    waits = Counter(RANKS if processes > 1 else {})
    if verb == "forward":
        return waits + Counter({RESULT: outputs})
    last = rank == processes - 1 or "pp" not in parallel
    return (
        waits
        + Counter(NORM)
        + Counter(SUMS if last else {})
        + Counter(LOADS if outputs > 1 else {})
    )


def sanctioned(name: str, verb: str, found: Pass) -> Counter[str]:
    """Returns megatron-core's own waits of a pass, at most (0.19 has fewer); recomputing repeats
    those of forward."""
    family, _, _, settings = CASES[name]
    if family in DENSE:
        return Counter()
    times = MOE_LAYERS * found.micro_batches
    times *= 2 if verb == "train" and settings is RECOMPUTE else 1
    return Counter({place: n * times for place, n in SANCTIONED.items()})


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_as_often_however_many_micro_batches_it_has(
    name: str, worlds: Callable[[int], World], tmp_path: Path
) -> None:
    family, processes, parallel, settings = CASES[name]
    path = str(save_tiny(tmp_path / "model", family))
    b = with_routes(batch()) if "router_replay" in settings else batch()
    outputs = ("logprobs",) if family in DENSE else ("logprobs", "routed_experts")
    counts = []
    for tokens in TOKENS:
        ranks = worlds(processes).run(
            passes, path, parallel, b, outputs, max_tokens=tokens, **settings
        )
        counts.append(ranks[0]["train"].micro_batches)
        for rank, verbs in enumerate(ranks):
            for verb, found in verbs.items():
                waits = Counter[str]()
                for place, times in found.waits.items():
                    if not place.name.startswith(CPU_ONLY):
                        waits[place.name] += times
                own = expected(name, rank, verb, len(outputs))
                assert not own - waits, (rank, verb)
                assert waits - own <= sanctioned(name, verb, found), (rank, verb)
                assert sum(own.values()) <= (5 if family in DENSE else 6)
    few, many = counts
    assert many >= 2 * few
