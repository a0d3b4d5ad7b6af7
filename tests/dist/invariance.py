"""One table: every family, in every layout, under every loss and way of cutting the work, is the
same model that Hugging Face and torch.optim.AdamW train in fp32.

Tolerances are ratios of norms, per tensor: ||engine - reference|| / ||reference||. Both sides
compute in fp32 (eps = 6e-8) and differ in the order of their sums: over shards, micro-batches,
heads, packed rows. A sum of n terms in another order moves by about sqrt(n) eps, and layers with
weights as large as these amplify the change some ten times each way. The largest ratios seen are a
quarter of the bounds, at biases of keys, whose gradients nearly cancel.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.api.engine import LossFn
from megarl.observability import stats_tracker
from tests.dist.engine_jobs import Tensors, make_engine, state
from tests.dist.losses import LOSSES
from tests.dist.reference import STEPS, hf_model, hf_outputs, hf_steps
from tests.pairwise import Row, all_pairs, drawn
from tests.tiny import (
    HYBRID_MOE_KINDS,
    MLA_KINDS,
    MOE_KINDS,
    OSS_KINDS,
    YARN,
    random_batch,
    save_hf,
)

OUTPUTS = 1e-5  # absolute: log-probabilities and values are of order one
FIGURES = 2e-5  # losses and gradient norms of all steps, relative where they are above one
GRADIENTS = 2e-5
# relative to AdamW's update of the weights, which divides by the gradients' own size
UPDATES = 1e-4

LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16, rope_theta=500.0,
)  # fmt: skip
# family -> settings of its tiny model; llama's one KV head is shared by tensor-parallel ranks
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(rope_parameters=LLAMA3, num_key_value_heads=1),
    # later half of the layers (all of Mistral's); sequences are longer than the window
    "qwen2": dict(use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "qwen3": dict(rope_parameters=YARN | dict(mscale=None)),
    "mistral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "mixtral": {},
    "deepseek_v2": dict(n_routed_experts=8, n_group=4),  # ep=4 wants a multiple of 4
    "deepseek_v3": dict(rope_parameters=YARN | dict(attention_factor=1.3, truncate=False)),
    "glm": dict(rope_parameters=YARN | dict(truncate=False, partial_rotary_factor=0.5)),
    "glm4": {},
    "glm4_moe": {},
    "kimi_k2": {},
    "glm4_moe_lite": {},
    "qwen3_next": dict(seed=1),  # of seed 0 two experts nearly tie
    "qwen3_5_text": dict(num_key_value_heads=1),  # gates are cut where tensor parallelism goes on
    "qwen3_5_moe_text": {},
    "gemma3_text": {},
    "olmo3": dict(num_key_value_heads=1),  # shared by tensor-parallel ranks, under a norm over all
    "minimax_m2": {},
    "gpt_oss": {},
}
# in the pairwise choice, families whose modules all occur in other families meet these layouts only
# (the full product has all layouts)
SOME_LAYOUTS = {
    "mistral": ("dp1", "tp2sp", "pp2vpp2", "cp2"),
    "mixtral": ("dp2", "etp2", "tp2ep2", "pp2"),
    "qwen3_moe": ("dp1", "ep2", "pp2split", "tp2cp2"),
    "glm": ("dp2", "tp2", "cp2", "pp2vpp2"),
    "gpt_oss": ("cp2", "tp2ep2", "pp2vpp2", "tp2cp2"),
    "kimi_k2": ("dp1", "tp2ep2", "tp2pp2", "cp2"),
    "glm4_moe_lite": ("dp2", "etp2", "tp2sp", "pp2split"),
    "qwen3_next": ("dp2", "etp2", "pp2split", "tp2cp2"),
    "qwen3_5_text": ("dp1", "tp2", "pp2vpp2", "cp2"),
    "qwen3_5_moe_text": ("tp2sp", "ep2", "tp2ep2", "pp2"),
    "gemma3_text": ("dp2", "tp2sp", "pp2vpp2", "cp2"),
    "olmo3": ("dp1", "tp2", "tp2sp", "pp2vpp2"),
    "minimax_m2": ("dp2", "pp2split", "tp2ep2", "tp2cp2"),
}
SP: dict[str, Any] = dict(tp=2, sequence_parallel=True)
# name -> (processes, parallel); the remaining degree is data parallelism
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, dict(tp=2)),
    "tp2sp": (2, SP),
    "pp2": (2, dict(pp=2)),
    "pp2split": (2, dict(pp=2, pipeline_split=[1, 3])),
    "pp2vpp2": (2, dict(pp=2, vpp=2)),
    "cp2": (2, dict(cp=2)),
    "ep2": (2, dict(ep=2)),
    "etp2": (2, dict(etp=2)),
    "tp2ep2": (2, dict(**SP, ep=2)),
    "tp2pp2": (4, dict(**SP, pp=2)),
    "tp2cp2": (4, dict(**SP, cp=2)),
}
MORE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp4": (4, dict(tp=4, sequence_parallel=True)),
    "cp4": (4, dict(cp=4)),
    "cp2dp2": (4, dict(cp=2)),
    "pp2vpp2dp2": (4, dict(pp=2, vpp=2)),
    "tp2pp2vpp2": (4, dict(**SP, pp=2, vpp=2)),
    "cp2pp2vpp2": (4, dict(cp=2, pp=2, vpp=2)),
    "ep4": (4, dict(ep=4)),
    "ep2dp2": (4, dict(ep=2)),
    "tp2ep4": (4, dict(**SP, ep=4)),
    "tp2ep2etp2": (4, dict(**SP, ep=2, etp=2)),
    "pp2vpp2ep2": (4, dict(pp=2, vpp=2, ep=2)),
    "tp2pp2ep2": (4, dict(**SP, pp=2, ep=2)),
    "cp2ep2": (4, dict(cp=2, ep=2)),
}
BUDGETS = {"one": 10**6, "many": 12}  # tokens per micro-batch; there are about 50
AXES: dict[str, tuple[Any, ...]] = dict(
    family=tuple(FAMILIES),
    layout=tuple(LAYOUTS),
    loss=tuple(LOSSES),
    budget=tuple(BUDGETS),
    recompute=("none", "full", "selective"),
    tie=(False, True),
    zero=(True, False),
)


def possible(row: Row) -> bool:
    """Only MoE families have experts, and their tensor parallelism needs sequence parallelism;
    experts with biases are not cut."""
    parallel = {**LAYOUTS, **MORE_LAYOUTS}[row["layout"]][1] if "layout" in row else {}
    if "family" not in row:
        return True
    if row["family"] in OSS_KINDS and "etp" in parallel:
        return False
    if row["family"] in (*MOE_KINDS, *MLA_KINDS, *HYBRID_MOE_KINDS, *OSS_KINDS):
        return "tp" not in parallel or "sequence_parallel" in parallel
    return not parallel.keys() & {"ep", "etp"}


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str
    loss: str
    layout: str = "dp1"
    budget: str = "one"
    recompute: str = "none"
    tie: bool = False
    zero: bool = True

    def __str__(self) -> str:
        flags = ["tied"] * self.tie + ["zero"] * self.zero
        names = [self.family, self.layout, self.loss, self.budget, f"recompute_{self.recompute}"]
        return "-".join(names + flags)

    @property
    def processes(self) -> int:
        return {**LAYOUTS, **MORE_LAYOUTS}[self.layout][0]

    @property
    def parallel(self) -> dict[str, Any]:
        return {**LAYOUTS, **MORE_LAYOUTS}[self.layout][1]

    def settings(self) -> dict[str, Any]:
        """Returns the engine's settings."""
        return dict(
            max_tokens=BUDGETS[self.budget], recompute_granularity=self.recompute,
            head=LOSSES[self.loss].head, optimizer={"distributed": self.zero},
        )  # fmt: skip


def pairwise_cases() -> list[Case]:
    def chosen(row: Row) -> bool:
        layouts = SOME_LAYOUTS.get(row.get("family", ""), LAYOUTS)
        return possible(row) and ("layout" not in row or row["layout"] in layouts)

    return [Case(**row) for row in all_pairs(AXES, chosen)]


def all_cases() -> list[Case]:
    """Returns families x layouts x losses x budgets; the other settings take turns."""
    rest = list(product(AXES["recompute"], AXES["tie"], AXES["zero"]))
    first = product(FAMILIES, LAYOUTS | MORE_LAYOUTS, LOSSES, BUDGETS)
    rows = [dict(zip(AXES, values)) for values in first]
    return [
        Case(**row, **dict(zip(("recompute", "tie", "zero"), rest[i * 5 % len(rest)])))
        for i, row in enumerate(filter(possible, rows))
    ]


DRAW = "MEGARL_DRAW"  # the word by which rows of the product are drawn, a commit's hash
DRAWN = 75  # of them, with each megatron-core: some 3 minutes on two cores


def drawn_cases() -> list[Case]:
    """Returns the rows of `all_cases` that DRAW in the environment draws; all, where it is not
    set."""
    word = os.environ.get(DRAW, "")
    return drawn(all_cases(), word, DRAWN) if word else all_cases()


# ---- the two sides


def batch(model: Any) -> Tensors:
    """Returns six ragged sequences in three pairs that do not lie side by side, each with its own
    weight; `old_logp` is near the model's, with some sequences beyond GSPO's clip."""
    b = dict(random_batch(n=6, lo=3, hi=14, seed=3))
    g = torch.Generator().manual_seed(5)
    shape = b["input_ids"].shape
    b["advantages"] = torch.linspace(-1.0, 1.5, len(b["input_ids"]))
    b["group_ids"] = torch.tensor([4, 0, 9, 9, 0, 4])
    b["chosen"] = torch.tensor([True, True, True, False, False, False])
    b["values"], b["returns"] = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    if not hasattr(model, "score"):
        with torch.no_grad():
            take_greedy_tokens(model, b)
            logp = hf_outputs(model, b)["logprobs"]
        ratio = torch.tensor([0.3, -0.1, 0.05, -0.3, 0.35, 0.0])[:, None]
        b["old_logp"] = logp - ratio + 0.02 * torch.randn(shape, generator=g)
        b["ref_logp"] = b["old_logp"]
    return b


def take_greedy_tokens(model: Any, b: Tensors) -> None:
    """Makes every third token the model's likeliest one of at least 3, so that `greedy_match` is
    not zero nearly everywhere. HF's embedding of a padding token (below 3) has no gradient."""
    ids, mask = b["input_ids"].clone(), b["attention_mask"]
    for t in range(1, ids.shape[1]):
        rows = (torch.arange(len(ids)) % 3 == t % 3) & mask[:, t]
        logits = model(ids, attention_mask=mask.long()).logits
        ids[rows, t] = 3 + logits[rows, t - 1, 3:].argmax(-1)
    b["input_ids"] = ids


@cache
def reference(family: str, tie: bool, loss: str) -> tuple[Tensors, dict[str, Any]]:
    """Returns (batch, the result that `train` should have)."""
    model = hf_model(family, tie=tie, head=LOSSES[loss].head, **FAMILIES[family])
    b = batch(model)
    want = hf_steps(model, b, LOSSES[loss])
    assert want["outputs"].get("greedy_match", b["attention_mask"]).any()
    return b, want


def save(root: Path, case: Case) -> str:
    head = LOSSES[case.loss].head
    path = root / f"{case.family}-{'tied' if case.tie else 'untied'}-{head}"
    if not path.exists():
        model = hf_model(case.family, tie=case.tie, head=head, **FAMILIES[case.family])
        save_hf(model, path, case.family)
    return str(path)


def train(path: str, parallel: dict[str, Any], loss: str, b: Tensors, **over: Any) -> Any:
    """Returns on every rank what `hf_steps` returns, from the engine. Tensors are rank 0's."""
    engine, kw = make_engine(path, parallel, **over), LOSSES[loss].kw
    names = ("logprobs", "entropy", "greedy_match") if engine.config.head == "lm" else ("values",)
    out = engine.forward(b, outputs=names, temperature=kw["temperature"])
    result: dict[str, Any] = {"outputs": out if isinstance(out, dict) else {"values": out}}
    stats = []
    for step in range(STEPS):
        stats.append(engine.train_batch(b, recording(LOSSES[loss].fn), LOSSES[loss].weight, **kw))
        if step == 0:
            if engine.config.optimizer.distributed:
                gather_gradients(engine)
            result["grads"] = state(engine, grads=True)
    result["weights"], result["stats"] = state(engine), stats
    engine.destroy()
    ids = b["input_ids"][b["loss_mask"].bool()].double()
    assert stats_tracker.export() == {  # to the bit what one rank records of the whole batch
        "tokens": STEPS * len(ids), "id/avg": float(ids.mean()),
        "id/min": float(ids.min()), "id/max": float(ids.max()),
    }  # fmt: skip
    return result


def recording(fn: LossFn) -> LossFn:
    """Returns a loss that has stats_tracker record figures of its own."""

    def recorded(outputs: Tensors, b: Tensors) -> Any:
        stats_tracker.denominator(tokens=b["loss_mask"].bool())
        stats_tracker.stat(id=b["input_ids"], denominator="tokens")
        return fn(outputs, b)

    return recorded


def gather_gradients(engine: Any) -> None:
    """Gathers the reduced gradients into the buffers: the distributed optimizer leaves each
    data-parallel rank only its part."""
    for chunk in engine.state.chunks:
        for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group = buckets.intra_distributed_optimizer_instance_group
            for bucket in buckets.buckets:
                mine = bucket.grad_data.view(group.size(), -1)[group.rank()]
                dist.all_gather_into_tensor(bucket.grad_data, mine.clone(), group=group)


def worst(got: Tensors, want: Tensors, start: Tensors | None = None) -> tuple[float, str]:
    """Returns the largest ||got - want|| / ||want|| and its tensor's name; `start` is subtracted
    first. A tensor below 1e-7 of all tensors' norm is divided by 1e-3 of that norm: the gradient
    that a loss over pairs gives the bias of a value head is nothing but rounding.
    """
    assert got.keys() == want.keys()
    if start is not None:
        got, want = ({n: x - start[n] for n, x in side.items()} for side in (got, want))
    norms = {n: float(x.float().norm()) for n, x in want.items()}
    total = math.hypot(*norms.values())
    ratios = [
        (float((got[n] - x).norm()) / (norms[n] if norms[n] > 1e-7 * total else 1e-3 * total), n)
        for n, x in want.items()
    ]
    return max(ratios, key=lambda r: (math.isnan(r[0]), *r))


def check(ranks: list[dict[str, Any]], want: dict[str, Any], *, slack: float = 1.0) -> None:
    """Checks every rank's result of `train` against the reference, within `slack` tolerances."""
    got = ranks[0]
    for name, value in got["outputs"].items():
        torch.testing.assert_close(
            value, want["outputs"][name], rtol=0, atol=slack * OUTPUTS, msg=name
        )
    for key, figures in (("loss", "losses"), ("grad_norm", "grad_norms")):
        mine = [s[key] for s in got["stats"]]
        bound = slack * FIGURES
        assert mine == pytest.approx(want[figures], rel=bound, abs=bound), key
    assert all(s["update_successful"] == 1.0 for s in got["stats"])
    assert worst(got["grads"], want["grads"]) < (slack * GRADIENTS,)
    assert worst(got["weights"], want["weights"], want["start"]) < (slack * UPDATES,)
    for other in ranks[1:]:  # results reach every rank
        assert other["stats"] == got["stats"]
        for name, value in got["outputs"].items():
            assert torch.equal(other["outputs"][name], value), name
