"""A batch, a loss over its tokens and sequences, and an engine to train with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.api.records import FinetuneSpec, SaveLoadMeta
from megarl.config.engine import MicroBatchSpec, OptimizerConfig, ParallelConfig, TrainEngineConfig
from tests.tiny import random_batch, save_tiny

Tensors = dict[str, torch.Tensor]
Parallel = dict[str, Any]
SP: Parallel = dict(tp=2, sequence_parallel=True)
ZERO: dict[str, Any] = dict(optimizer={})
PLAIN: dict[str, Any] = dict(optimizer={"distributed": False})
RECOMPUTE: dict[str, Any] = dict(recompute_granularity="full")
TEMPERATURE = 0.8
# with a large epsilon Adam's first step is not the mere sign of gradients near zero
OPTIMIZER: dict[str, Any] = dict(lr=1e-2, weight_decay=0.1, beta2=0.95, eps=1e-3)


def batch() -> Tensors:
    """Returns ragged sequences, each with its own weight, so that no two count alike."""
    b = dict(random_batch(n=7, seed=3))
    b["advantages"] = torch.linspace(-1.0, 1.5, len(b["input_ids"]))
    return b


def loss_fn(outputs: Tensors, b: Tensors) -> tuple[torch.Tensor, dict[str, Any]]:
    mask = b["loss_mask"].float()
    pg = -(b["advantages"][:, None] * outputs["logprobs"] * mask).sum()
    entropy = (outputs["entropy"] * mask).sum()
    # this term is not a sum over tokens: it needs whole sequences
    means = (outputs["logprobs"] * mask).sum(1) / mask.sum(1).clamp(min=1)
    stats = {"entropy": (entropy.detach(), mask.sum()), "rows": (len(mask), 1.0)}
    return pg - 0.1 * entropy + means.square().sum(), stats


def weight_fn(b: Tensors) -> float:
    return 0.37 * float(b["loss_mask"].sum())


def make_engine(
    path: str, parallel: dict[str, Any], *, trained: bool = True, world: Any = None, **over: Any
) -> Any:
    from megarl.engine import MegatronEngine

    optimizer = OptimizerConfig(**{**OPTIMIZER, **over.pop("optimizer", {})}) if trained else None
    cfg = TrainEngineConfig(
        path=path, parallel=ParallelConfig(**parallel), optimizer=optimizer,
        mb_spec=MicroBatchSpec(
            max_tokens_per_mb=over.pop("max_tokens", 40),
            forward_max_tokens_per_mb=over.pop("forward_max_tokens", None),
            share_prefixes=over.pop("share_prefixes", False),
        ),
        options={"lm_head_chunk_tokens": 16, **over.pop("options", {})},
        **over,
    )  # fmt: skip
    engine = MegatronEngine(cfg, world=world)
    engine.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=1))
    return engine


def state(engine: Any, **kw: Any) -> Tensors:
    """Returns copies on the host, where the references are."""
    return {n: t.detach().cpu().clone() for n, t in engine.hf_state(**kw)}


# the first half of the layers is dense: with pp=2 the first stage has no experts
DENSE_FIRST: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(mlp_only_layers=[0, 1]),
    "qwen2_moe": dict(mlp_only_layers=[0, 1, 2], decoder_sparse_step=1),
    "deepseek_v3": dict(first_k_dense_replace=2),
}


def save_model(root: Path, kind: str, tie: bool) -> str:
    """Saves a tiny model once. kind: one of tests/tiny.py, optionally with "-dense-first"."""
    path = root / f"{kind}-{'tied' if tie else 'untied'}"
    if not path.exists():
        family = kind.removesuffix("-dense-first")
        save_tiny(path, family, tie=tie, **(DENSE_FIRST[family] if family != kind else {}))
    return str(path)


def run_save(path: str, parallel: Parallel, out: str) -> None:
    engine = make_engine(path, parallel, trained=False)
    engine.save(SaveLoadMeta(path=out, weight_format="hf"))
    engine.destroy()
