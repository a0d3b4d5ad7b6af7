"""Checks what a workflow returns against every rule that a training batch must keep.

A workflow is other people's code. A batch that breaks a rule here would train wrong numbers, or
fail far away in words that nobody can trace to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.api.inference import FAILURES
from megarl.api.tokens import is_per_token

# key -> what it holds; the contract's dtypes are int64, bool, float32 and int32
_PER_TOKEN = {
    "input_ids": "integers",
    "attention_mask": "booleans",
    "loss_mask": "booleans",
    "logprobs": "floating-point numbers",
    "versions": "integers",
}
_KINDS = {
    "integers": (torch.int64, torch.int32, torch.int16),
    "booleans": (torch.bool,),
    "floating-point numbers": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
}
# of a rollout's rows: field [n] -> why all of them have one value
_ONE_IN_A_ROLLOUT = {
    "rewards": "an earlier row of its rollout has another; every row has the whole rollout's",
    "unit_ids": "an earlier row of its rollout has another; a rollout stays in one unit",
}
ROUNDING = 1e-3  # a logprob of 0 may come out this much above
_NOT_WRITTEN = (
    "loss_mask marks a token that no weights wrote; mark only tokens of a response, and give them "
    "its output_versions"
)


def check_episode(batch: Any, *, version: int, vocab_size: int | None = None) -> None:
    """Raises TypeError for a result that is no batch and ValueError for a batch that breaks a rule:
    right-padded input_ids, attention_mask, loss_mask, logprobs and versions, all [n,S] with n >= 1,
    rewards [n], and other fields [n] or [n,S,...]. `version` is the newest weights'; `vocab_size`
    the model's, if known."""
    if not isinstance(batch, dict) or not all(isinstance(v, Tensor) for v in batch.values()):
        raise TypeError(f"{_what(batch)}: use a padded batch [n,S] of tensors, or None")
    _check_shapes(batch)
    mask, trained = batch["attention_mask"], batch["loss_mask"]
    ids, logprobs, versions = (batch[k] for k in ("input_ids", "logprobs", "versions"))
    rules = [
        ("attention_mask", ~mask[:, :1], "a sample begins with a real token"),
        ("attention_mask", _after_padding(mask), "a real token stands after padding; pad right"),
        ("input_ids", mask & (ids < 0), "no token has such an id"),
        ("loss_mask", trained & ~mask, "only padding stands there (attention_mask)"),
        ("loss_mask", trained & _first(mask), "nothing comes before it, so it has no logprob"),
        ("logprobs", ~logprobs.isfinite(), "must be a finite number"),
        ("logprobs", trained & (logprobs > ROUNDING), "must not be above 0"),
        ("versions", trained & (versions < 0), _NOT_WRITTEN),
        ("versions", versions > version, f"the newest weights are version {version}"),
        ("rewards", ~batch["rewards"].isfinite(), "must be a finite number"),
    ]
    if vocab_size is not None:
        bad = mask & (ids >= vocab_size)
        rules.append(("input_ids", bad, f"the model's vocabulary has {vocab_size} tokens"))
    if "rollout_ids" in batch:
        rules += [
            (key, _differs(batch[key], batch["rollout_ids"]), why)
            for key, why in _ONE_IN_A_ROLLOUT.items()
            if key in batch
        ]
    for key, bad, why in rules:
        if bad.any():
            place = bad.nonzero()[0].tolist()
            where = ", ".join(f"{name} {i}" for name, i in zip(("sample", "position"), place))
            raise ValueError(f"{key} of {where} is {batch[key][tuple(place)].item()}: {why}")


def check_valid(batch: dict[str, Any]) -> None:
    """Raises TypeError or ValueError for a `valid` that is not [n] booleans, a `failure` that is
    not [n] numbers of api.inference.FAILURES, or rows that cannot be told apart.
    """
    if bad := next((k for k, v in batch.items() if not isinstance(v, Tensor)), None):
        raise TypeError(f"{_what(batch)}: use a padded batch [n,S] of tensors ({bad!r}), or None")
    if "input_ids" not in batch or "attention_mask" not in batch:
        raise ValueError(f"a batch without input_ids or attention_mask (it has {', '.join(batch)})")
    n, valid, kinds = len(batch["input_ids"]), batch["valid"], batch.get("failure")
    if valid.dtype != torch.bool or tuple(valid.shape) != (n,):
        raise ValueError(
            f"valid of {valid.dtype} and shape {tuple(valid.shape)}: use [n={n}] booleans"
        )
    if kinds is not None and (
        tuple(kinds.shape) != (n,)
        or kinds.dtype not in _KINDS["integers"]
        or not set(kinds.tolist()) <= set(range(len(FAILURES)))
    ):
        named = ", ".join(f"{i} {name}" for i, name in enumerate(FAILURES))
        raise ValueError(f"failure {kinds.tolist()}: use [n={n}] of {named}")
    _check_ids(batch)
    if "rollout_ids" in batch and _differs(valid, batch["rollout_ids"]).any():
        raise ValueError(
            f"valid {valid.tolist()} of rollout_ids {batch['rollout_ids'].tolist()}: a rollout "
            "fails as a whole, so valid is the same for all of its rows"
        )


def _check_ids(batch: dict[str, Tensor]) -> None:
    """Raises ValueError for ids that are not [n] integers."""
    n = len(batch["input_ids"])
    for key in ("unit_ids", "rollout_ids"):
        ids = batch.get(key)
        if ids is not None and (tuple(ids.shape) != (n,) or ids.dtype not in _KINDS["integers"]):
            shape = tuple(ids.shape)
            raise ValueError(f"{key} of {ids.dtype} and shape {shape}: use [n={n}] integers")


def _differs(values: Tensor, ids: Tensor) -> Tensor:
    """Returns [n], True where a value is not that of the first row with the same id."""
    _, index = ids.unique(return_inverse=True)
    rows = torch.arange(len(ids))
    first = torch.zeros_like(rows).scatter_reduce(0, index, rows, "amin", include_self=False)
    return values != values[first[index]]


def _check_shapes(batch: dict[str, Tensor]) -> None:
    if missing := [key for key in (*_PER_TOKEN, "rewards") if key not in batch]:
        raise ValueError(f"a batch without {missing[0]!r} (it has {', '.join(batch) or 'nothing'})")
    shape = tuple(batch["input_ids"].shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"input_ids of shape {shape}: use [n,S], one sample and token at least")
    for key, value in batch.items():
        kind, found = _PER_TOKEN.get(key), tuple(value.shape)
        if kind is not None and value.dtype not in _KINDS[kind]:
            raise ValueError(f"{key} of dtype {value.dtype}: it must hold {kind}")
        if kind is not None and found != shape:
            raise ValueError(f"{key} of shape {found}: input_ids has {shape}, make both [n,S]")
        if found[:1] != shape[:1]:
            raise ValueError(f"{key} of shape {found}: its first dimension is n={shape[0]} samples")
        is_per_token(key, value, batch)
    _check_ids(batch)
    if batch["rewards"].ndim != 1:
        found = tuple(batch["rewards"].shape)
        raise ValueError(f"rewards of shape {found}: use [n], one number for each sample")


def _first(mask: Tensor) -> Tensor:
    """Returns [n,S], True at the first position."""
    return torch.arange(mask.shape[1]).expand_as(mask) == 0


def _after_padding(mask: Tensor) -> Tensor:
    """Returns [n,S], True where a real token follows a padded one."""
    return mask & ((~mask).cumsum(1) > 0)


def _what(batch: Any) -> str:
    if not isinstance(batch, dict):
        return type(batch).__name__
    key = next(k for k, v in batch.items() if not isinstance(v, Tensor))
    return f"a dict whose {key!r} is a {type(batch[key]).__name__}"
