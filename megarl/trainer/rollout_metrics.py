"""Figures of a rollout batch and of an evaluation: pure functions of padded batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megarl.models.flops import train_flops
from megarl.observability.utilization import this_device_peak, utilization
from megarl.trainer.transcript import turns
from megarl.utils.batch import Batch, seqlens


def rollout_metrics(batch: Batch, *, version: int) -> dict[str, float]:
    """Rewards, response lengths and staleness of a training batch ([B,S], CONTRACTS: rewards [B],
    loss_mask, versions [B,S]). `version` is the trainer's.
    """
    rewards, mask = batch["rewards"].float(), batch["loss_mask"].bool()
    lengths = mask.sum(1).float()
    groups = group_means(rewards, batch["group_ids"])
    metrics = {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(unbiased=False).item(),
        "reward/pass_at_group": (groups["max"] >= 1).float().mean().item(),
        "reward/groups_all_equal": (groups["max"] == groups["min"]).float().mean().item(),
        "response_len/mean": lengths.mean().item(),
        "response_len/max": lengths.max().item(),
    } | batch_metrics(batch)
    if "truncated" in batch:
        metrics["response_len/truncated"] = batch["truncated"].float().mean().item()
    if "versions" in batch and mask.any():
        staleness = (version - batch["versions"])[mask].float()
        metrics |= {
            "staleness/mean": staleness.mean().item(),
            "staleness/max": staleness.max().item(),
        }
    return metrics


def batch_metrics(batch: Batch) -> dict[str, float]:
    """The size of a training batch [B,S]: sequences, tokens under loss_mask, tokens."""
    return {
        "tokens/sequences": float(len(batch["input_ids"])),
        "tokens/trained": float(batch["loss_mask"].sum()),
        "tokens/total": float(batch["attention_mask"].sum()),
    }


def update_speed(
    engine: Any, batch: Batch, *, seconds: float, peak_tflops: float | None
) -> dict[str, float]:
    """perf/tflops_per_gpu and, where the peak is given or known, perf/mfu of `seconds` that went
    into training `engine` on every sequence of the batch once.
    """
    return utilization(
        train_flops(engine.model_config, seqlens(batch)),
        seconds=seconds,
        devices=dist.get_world_size(),
        peak=peak_tflops or this_device_peak(engine.dtype),
    )


def group_means(values: torch.Tensor, group_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """min and max of `values` [B] per group."""
    _, inverse = group_ids.unique(return_inverse=True)
    n = int(inverse.max()) + 1
    out = {}
    for name, op in (("min", "amin"), ("max", "amax")):
        start = values.new_zeros(n)
        out[name] = start.scatter_reduce(0, inverse, values, op, include_self=False)
    return out


def completions(batch: Batch, tokenizer: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record per row that has samples: prompt, completion, answer and reward of its first.

    batch["group_ids"] [B] says of which of `rows` a sample is; a rejected row has none.
    """
    first: dict[int, int] = {}
    for k, group in enumerate(batch["group_ids"].tolist()):
        first.setdefault(group, k)
    records = []
    for group, k in first.items():
        row = rows[group]
        ids = batch["input_ids"][k][batch["loss_mask"][k].bool()].tolist()
        records.append(
            {
                "prompt": row["prompt"],
                "completion": tokenizer.decode(ids, skip_special_tokens=True),
                "answer": str(row["answer"]),
                "reward": batch["rewards"][k].item(),
            }
            | turns(batch, k, tokenizer)  # where it has several
        )
    return records
