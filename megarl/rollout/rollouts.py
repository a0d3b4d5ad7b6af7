"""Checks the rollouts that a workflow returned, tells which failed, and joins those of several
runs of it.

A workflow is other people's code. A batch that breaks a rule here would train wrong numbers, or
fail far away in words that nobody can trace to it.

What failed is made anew in a fresh environment, since leaving it out would favour prompts whose
environments seldom fail. Only as many rollouts are taken as are missing, the first ones: no rule
that looks at what they earned may choose among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.api.batch import Padded
from megarl.api.inference import FAILURES
from megarl.api.tokens import is_per_token, select

Failed = tuple[str, int]  # kind and length in tokens of a rollout that failed

_INTEGERS = (torch.int64, torch.int32, torch.int16)
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# the contract's dtypes are int64, bool, float32 and int32
_KINDS = {
    "integers": _INTEGERS,
    "booleans": (torch.bool,),
    "floating-point numbers": _FLOATS,
    "numbers": _FLOATS + _INTEGERS,
}
# field -> what it holds: of every token [n,S], and of every row [n]
_PER_TOKEN = {
    "input_ids": "integers",
    "attention_mask": "booleans",
    "loss_mask": "booleans",
    "logprobs": "floating-point numbers",
    "versions": "integers",
}
_PER_ROW = {
    "rewards": "numbers",
    "valid": "booleans",
    "failure": "integers",
    "unit_ids": "integers",
    "rollout_ids": "integers",
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
    _check_tensors(batch, *_PER_TOKEN, "rewards")
    shape = tuple(batch["input_ids"].shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"input_ids of shape {shape}: use [n,S], one sample and token at least")
    for key, value in batch.items():
        _check_field(key, value, *shape)
        is_per_token(key, value, batch)
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


def without_failed(batch: Any) -> tuple[Any, list[Failed]]:
    """Returns the batch without the samples whose `valid` [n] is False (None if all are), and
    (kind, length) of each rollout that failed. A failed sample may hold anything: NaN, garbage, no
    token at all. Raises TypeError or ValueError for a `valid` that is not [n] booleans, a `failure`
    that is not [n] numbers of api.inference.FAILURES, or rows that cannot be told apart."""
    _check_tensors(batch)
    if "valid" not in batch:
        return batch, []
    _check_valid(batch)
    batch = dict(batch)
    valid, kinds = batch.pop("valid"), batch.pop("failure", None)
    lengths = batch["attention_mask"].bool().sum(1).tolist()
    ids = rollout_ids(batch).tolist()
    failed: dict[int, Failed] = {}
    for i in (~valid).nonzero().flatten().tolist():
        kind, length = failed.get(ids[i], (FAILURES[0 if kinds is None else int(kinds[i])], 0))
        failed[ids[i]] = kind, length + lengths[i]
    kept = select(batch, valid.nonzero().flatten()) if valid.any() else None
    return kept, list(failed.values())


def by_kind(failed: Sequence[Failed]) -> str:
    """Returns how many rollouts failed of each kind, in words, the most frequent first."""
    return ", ".join(f"{n} {kind}" for kind, n in Counter(k for k, _ in failed).most_common())


def rollout_ids(batch: Padded) -> Tensor:
    """Returns which rollout each row of a batch [n,S] is of, [n]."""
    return batch.get("rollout_ids", torch.arange(len(batch["input_ids"])))


def rewards_of(batch: Padded | None) -> list[float]:
    """Returns the reward of each rollout, however many rows it has, by their first rows; [] for
    None."""
    if batch is None:
        return []
    return list(dict(zip(rollout_ids(batch).tolist(), batch["rewards"].tolist())).values())


def first_rollouts(batch: Padded, n: int) -> Padded:
    """Returns the first `n` rollouts of a batch, by their first rows."""
    ids = rollout_ids(batch)
    first = list(dict.fromkeys(ids.tolist()))[:n]
    keep = torch.isin(ids, torch.tensor(first, dtype=ids.dtype))
    return batch if keep.all() else select(batch, keep.nonzero().flatten())


def numbered_through(parts: Sequence[Padded]) -> list[Padded]:
    """Returns batches [n,S] whose unit_ids and rollout_ids [n], where there are any, are numbered
    through all of them."""
    count = dict.fromkeys(("unit_ids", "rollout_ids"), 0)
    out = []
    for part in parts:
        numbered = dict(part)
        for key in count.keys() & part.keys():
            names, local = part[key].unique(return_inverse=True)
            numbered[key], count[key] = local + count[key], count[key] + len(names)
        out.append(numbered)
    return out


def _check_valid(batch: Padded) -> None:
    _check_tensors(batch, "input_ids", "attention_mask")
    n, valid, kinds = len(batch["input_ids"]), batch["valid"], batch.get("failure")
    for key in ("valid", "failure", "unit_ids", "rollout_ids"):
        if key in batch:
            _check_field(key, batch[key], n)
    if kinds is not None and not set(kinds.tolist()) <= set(range(len(FAILURES))):
        named = ", ".join(f"{i} {name}" for i, name in enumerate(FAILURES))
        raise ValueError(f"failure {kinds.tolist()}: use [n={n}] of {named}")
    if _differs(valid, rollout_ids(batch)).any():
        raise ValueError(
            f"valid {valid.tolist()} of rollout_ids {batch['rollout_ids'].tolist()}: a rollout "
            "fails as a whole, so valid is the same for all of its rows"
        )


def _check_tensors(batch: Any, *needed: str) -> None:
    """Raises TypeError for what is no dict of tensors, ValueError where it lacks one."""
    if not isinstance(batch, dict):
        raise TypeError(f"{type(batch).__name__}: use a padded batch [n,S] of tensors, or None")
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            what = f"a dict whose {key!r} is a {type(value).__name__}"
            raise TypeError(f"{what}: use a padded batch [n,S] of tensors, or None")
    if missing := [key for key in needed if key not in batch]:
        raise ValueError(f"a batch without {missing[0]!r} (it has {', '.join(batch) or 'nothing'})")


def _check_field(key: str, value: Tensor, n: int, width: int | None = None) -> None:
    """Raises ValueError for a field of n rows, of `width` tokens each, that holds something
    else."""
    kind = _PER_TOKEN.get(key) or _PER_ROW.get(key)
    shape = (n, width) if key in _PER_TOKEN else (n,)
    found = tuple(value.shape) if kind else tuple(value.shape[:1])
    if found != shape or (kind and value.dtype not in _KINDS[kind]):
        use = f"[n={n},S={width}]" if key in _PER_TOKEN else f"[n={n}{'' if kind else ',...'}]"
        what = f"{key} of {value.dtype} and shape {tuple(value.shape)}"
        raise ValueError(f"{what}: use {use} {kind or ''}".rstrip())


def _differs(values: Tensor, ids: Tensor) -> Tensor:
    """Returns [n], True where a value is not that of the first row with the same id."""
    _, index = ids.unique(return_inverse=True)
    rows = torch.arange(len(ids))
    first = torch.zeros_like(rows).scatter_reduce(0, index, rows, "amin", include_self=False)
    return values != values[first[index]]


def _first(mask: Tensor) -> Tensor:
    """Returns [n,S], True at the first position."""
    return torch.arange(mask.shape[1]).expand_as(mask) == 0


def _after_padding(mask: Tensor) -> Tensor:
    """Returns [n,S], True where a real token follows a padded one."""
    return mask & ((~mask).cumsum(1) > 0)
