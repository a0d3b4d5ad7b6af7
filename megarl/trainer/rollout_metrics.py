"""Metrics of a rollout batch and of an update, and the samples that an evaluation shows."""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.algos.metrics import advantage_spread, gap_by_age, staleness
from megarl.algos.rows import (
    Data,
    as_batch,
    reduce_rows,
    rollouts_of,
    total,
    trained_tokens,
    where_it_lies,
)
from megarl.api.batch import Batch, Padded
from megarl.api.tokens import REWARD_PART, seqlens
from megarl.models.flops import train_flops
from megarl.observability import stats_tracker
from megarl.rollout.rewards.results import LATE

WROTE, READ = "model", "environment"  # who wrote a turn
PASSES = 1.0  # a rollout is right from this reward on

# columns that the data set's messages or megarl make, and no reward compares an answer with
_NO_ANSWERS = (
    *("row_id", "episode_id", "dataset", "messages", "prompt", "prompt_ids"),
    *("tools", "task", "difficulty", "chat_template_kwargs"),
)


@where_it_lies
def rollout_metrics(
    data: Data, *, version: int, limits: tuple[float, float] = (-math.inf, math.inf)
) -> dict[str, float]:
    """Returns the metrics of a training batch's rewards [B], response lengths (loss_mask [B,S]) and
    staleness (versions [B,S]): means over rollouts, however many rows each has. `version` is the
    trainer's. limits: PPOActorConfig.reward_limits; groups that are equal within them count as
    equal. Collective."""
    batch = as_batch(data)
    rollouts, trained = rollouts_of(batch), trained_tokens(batch)
    rewards = rollouts.common(batch["rewards"].float(), "rewards")
    right = rewards >= PASSES
    written = rollouts.sums(trained)
    group_ids = rollouts.of_first(batch["group_ids"])
    groups = group_extremes(rewards, group_ids)
    used = rewards.clamp(*limits)
    used_groups = group_extremes(used, group_ids)
    metrics = {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(unbiased=False).item(),
        "reward/pass_rate": right.float().mean().item(),
        "reward/pass_at_group": (groups["max"] >= PASSES).float().mean().item(),
        "reward/groups_all_right": (groups["min"] >= PASSES).float().mean().item(),
        "reward/groups_all_equal": (used_groups["max"] == used_groups["min"]).float().mean().item(),
        "reward/clipped": (used != rewards).float().mean().item(),
        "response_len/mean": written.mean().item(),
        "response_len/max": written.max().item(),
        "forks/count": float(len(batch) - len(rollouts)),
        "forks/rows_per_rollout": len(batch) / len(rollouts),
        "forks/rows_max": rollouts.sums(torch.ones_like(trained)).max().item(),
    } | _sizes(batch, trained)
    for name in batch:
        if name.startswith(REWARD_PART):
            part = rollouts.common(batch[name], name)
            shown = f"reward/{name.removeprefix(REWARD_PART)}"
            metrics[shown] = part.nanmean().item()
            metrics[f"{shown}/std"] = part[~part.isnan()].std(unbiased=False).item()
            if name == f"{REWARD_PART}{LATE}":  # only answers that are late have it
                metrics["reward/late"] = part.nan_to_num(0.0).mean().item()
    if "truncated" in batch:
        cut = rollouts.any(batch["truncated"])
        metrics["response_len/truncated"] = cut.float().mean().item()
        metrics |= _means(written, {"response_len/cut": cut})
    metrics |= _means(written, {"response_len/right": right, "response_len/wrong": ~right})
    metrics |= staleness(batch, version=version)
    if "routed_experts" in batch and trained.any():
        metrics["moe/routes_known"] = _routes_known(batch, trained)
    return metrics


def _means(values: torch.Tensor, masks: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the mean of `values` [R] under each mask [R] that has a True."""
    return {name: values[mask].mean().item() for name, mask in masks.items() if mask.any()}


@where_it_lies
def trained_metrics(data: Data, *, version: int) -> dict[str, float]:
    """Returns what an update trained on: the spread of the advantages, where there are some, and
    the logprob gap by the tokens' age. `version` is the trainer's. Collective."""
    batch = as_batch(data)
    spread = advantage_spread(batch) if "advantages" in batch else {}
    return spread | gap_by_age(batch, version=version)


def _routes_known(batch: Batch, trained: torch.Tensor) -> float:
    """Returns the share of the trained tokens times layers whose routes the servers told. A token's
    are those of the position before it, where it was predicted. Collective."""

    def shares(part: Padded) -> list[torch.Tensor]:
        at = (part["routed_experts"][..., 0] >= 0).double().mean(1)
        return [at.roll(1).where(part["loss_mask"].bool(), 0.0)]

    return total(reduce_rows(batch, shares, ["routed_experts", "loss_mask"])[:, 0]) / total(trained)


def batch_metrics(data: Data) -> dict[str, float]:
    """Returns the size of a training batch: sequences, trained tokens, tokens. Collective."""
    batch = as_batch(data)
    return _sizes(batch, trained_tokens(batch))


def _sizes(batch: Batch, trained: torch.Tensor) -> dict[str, float]:
    return {
        "tokens/sequences": float(len(batch)),
        "tokens/trained": total(trained),
        "tokens/total": float(batch.lengths.sum()),
    }


def gathered() -> stats_tracker.Entries:
    """Returns what stats_tracker has gathered on all ranks since the last call, and the memory that
    was in use, for stats_tracker.joined. Collective."""
    stats_tracker.peak(**memory_in_use())
    return stats_tracker.take()


def update_speed(
    role: Any, data: Data, *, seconds: float, peak_tflops: float | None
) -> dict[str, float]:
    """Returns perf/tflops_per_gpu and, where the peak is given or known, perf/mfu of an update:
    `seconds` went into training `role` on every sequence of the batch once. peak_tflops: TFLOP/s
    of one device."""
    engine = role.engine
    lengths = data.lengths.tolist() if isinstance(data, Batch) else seqlens(data)
    return utilization(
        train_flops(engine.model_config, lengths),
        seconds=seconds,
        devices=dist.get_world_size(),
        peak=peak_tflops or this_device_peak(engine.dtype),
    )


def group_extremes(values: torch.Tensor, group_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the "min" and "max" of `values` [B] in each group, by ascending group id [groups]."""
    _, inverse = group_ids.unique(return_inverse=True)
    n = int(inverse.max()) + 1
    out = {}
    for name, op in (("min", "amin"), ("max", "amax")):
        start = values.new_zeros(n)
        out[name] = start.scatter_reduce(0, inverse, values, op, include_self=False)
    return out


def expected(row: Mapping[str, Any]) -> str:
    """Returns a row's `answer` as text. If there is none, returns the user's columns and their
    names."""
    own = {name: value for name, value in row.items() if name not in _NO_ANSWERS}
    return str(own.get("answer", ", ".join(f"{name}: {value}" for name, value in own.items())))


def completions(batch: Padded, tokenizer: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one record per row that has samples: prompt, completion, answer and reward of its
    first.

    batch["group_ids"] [B] says to which of `rows` a sample belongs; a rejected row has none."""
    first: dict[int, int] = {}
    for k, group in enumerate(batch["group_ids"].tolist()):
        first.setdefault(group, k)
    records = []
    for group, k in first.items():
        row = rows[group]
        written = _completion(batch, k, tokenizer)
        own = {"prompt": row["prompt"], "completion": written.pop("completion")}
        records.append(own | {"answer": expected(row)} | written)
    return records


def trained_completions(parts: Sequence[Padded], tokenizer: Any, most: int) -> list[dict[str, Any]]:
    """Returns one record for each of the first `most` groups of a training batch, whose padded
    samples [n,S] are `parts`: prompt, completion, reward and its parts of the first sample."""
    records = []
    for part in parts[:most]:
        before = int(part["loss_mask"][0].int().argmax())
        prompt = tokenizer.decode(part["input_ids"][0][:before].tolist(), skip_special_tokens=True)
        names = [name for name in part if name.startswith(REWARD_PART)]
        records.append(
            {"prompt": prompt}
            | _completion(part, 0, tokenizer)
            | {name: part[name][0].item() for name in names}
        )
    return records


def _completion(batch: Padded, k: int, tokenizer: Any) -> dict[str, Any]:
    """Returns what the model wrote in row k, what it earned, and its turns where it has several."""
    ids = batch["input_ids"][k][batch["loss_mask"][k].bool()].tolist()
    return {
        "completion": tokenizer.decode(ids, skip_special_tokens=True),
        "reward": batch["rewards"][k].item(),
    } | turns(batch, k, tokenizer)


def turns(batch: Padded, sample: int, tokenizer: Any) -> dict[str, list[dict[str, str]]]:
    """Returns {"turns": [{"who": "model" | "environment", "text"}]} of row `sample` of a padded
    batch [B,S], from the first token the model wrote; {} where it wrote in one piece and nothing
    follows.

    The model wrote the tokens under loss_mask; the others were given to it: a tool's words, the
    user's next turn."""
    real = batch["attention_mask"][sample].bool()
    ids = batch["input_ids"][sample][real].tolist()
    written = batch["loss_mask"][sample][real].bool().tolist()
    if True not in written:
        return {}
    parts = groupby(range(written.index(True), len(ids)), key=written.__getitem__)
    shown = [
        {
            "who": WROTE if by_model else READ,
            "text": tokenizer.decode([ids[t] for t in places], skip_special_tokens=True),
        }
        for by_model, places in parts
    ]
    shown = [turn for turn in shown if turn["who"] == WROTE or turn["text"].strip()]
    return {"turns": shown} if len(shown) > 1 else {}


# ---- what a step uses of the hardware

# Dense bf16/fp16 tensor-core TFLOP/s by torch.cuda.get_device_name(), from NVIDIA's data sheets
# (those that state them with 2:4 sparsity, halved).
PEAK_TFLOPS = {
    "V100": 125.0,
    "V100 PCIE": 112.0,
    "A10": 125.0,
    "A30": 165.0,
    "A40": 149.7,
    "A100": 312.0,
    "A800": 312.0,
    "L4": 121.0,
    "L40": 181.0,
    "L40S": 362.0,
    "H20": 148.0,
    "H100": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H800": 989.4,
    "H800 PCIe": 756.0,
    "H200": 989.4,
    "H200 NVL": 835.0,
    "GH200": 989.4,
    "B200": 2250.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "GB300": 2500.0,
}


def peak_tflops(device_name: str) -> float | None:
    """Returns the peak of the entry whose words all stand in the device's name, the entry with the
    most words; None if there is none."""
    words = set(device_name.replace("-", " ").split())
    names = [name for name in PEAK_TFLOPS if set(name.split()) <= words]
    return PEAK_TFLOPS[max(names, key=len)] if names else None


def this_device_peak(dtype: torch.dtype) -> float | None:
    """Returns TFLOP/s of the current GPU for `dtype`; None on a CPU and for wider numbers."""
    if dtype.itemsize != 2 or not torch.cuda.is_available():
        return None
    return peak_tflops(torch.cuda.get_device_name())


def utilization(
    flops: float, *, seconds: float, devices: int, peak: float | None
) -> dict[str, float]:
    """Returns the metrics of `flops` of all devices in `seconds`. `peak` is in TFLOP/s of one
    device; without it there is no MFU."""
    reached = flops / seconds / devices / 1e12
    metrics = {"perf/tflops_per_gpu": reached}
    return metrics if peak is None else metrics | {"perf/mfu": reached / peak}


def memory_in_use() -> dict[str, float]:
    """Returns in GiB what this process uses: memory/host_gib, and of its GPU, if it has one, the
    peaks since the last call: memory/gpu_gib of tensors, memory/gpu_reserved_gib with what torch
    keeps for more."""
    used = {"memory/host_gib": _resident() / 2**30}
    if torch.cuda.is_available():
        used["memory/gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
        used["memory/gpu_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        torch.cuda.reset_peak_memory_stats()
    return used


def _resident() -> int:
    """Returns the bytes of host memory that the process holds, or held at most where only that is
    known."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
