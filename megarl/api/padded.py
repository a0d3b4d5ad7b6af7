"""Handles padded batches: dict[str, Tensor] of right-padded per-token fields [B,S,...] and
per-sample fields [B]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

Padded = dict[str, torch.Tensor]

# what a padded position holds; everything else pads with 0
PAD = {"versions": -1, "given_ids": -1}


def is_per_token(key: str, value: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether the field `key` is per token: it is where it has several dimensions, for
    [B,k] numbers of a sample could not be told from [B,S] where k is S. Raises ValueError where the
    first two are not those of input_ids [B,S]."""
    shape = tuple(batch["input_ids"].shape[:2])
    if value.ndim >= 2 and tuple(value.shape[:2]) != shape:
        raise ValueError(
            f"{key!r} of shape {tuple(value.shape)}: a field of several dimensions is per token, "
            f"and begins with [B, S] = {list(shape)} as input_ids does; for several numbers of a "
            f"sample use several fields [{shape[0]}]"
        )
    return value.ndim >= 2


def concat_padded(batches: Sequence[Padded]) -> Padded:
    """Joins padded batches of different S along B, padding to the longest S.

    Raises ValueError if the batches do not share the same keys, or for a field that is neither per
    token nor per sample.
    """
    if not batches:
        raise ValueError("concat_padded: nothing to join")
    keys = set(batches[0])
    for i, b in enumerate(batches):
        if set(b) != keys:
            raise ValueError(
                f"concat_padded: batch {i} has keys {sorted(b)}, batch 0 has {sorted(keys)}"
            )
    width = max(b["input_ids"].shape[1] for b in batches)
    out: Padded = {}
    for k in batches[0]:
        parts = []
        for b in batches:
            v = b[k]
            if is_per_token(k, v, b) and v.shape[1] < width:
                pad = [0, 0] * (v.ndim - 2) + [0, width - v.shape[1]]
                v = F.pad(v, pad, value=PAD.get(k, 0))
            parts.append(v)
        out[k] = torch.cat(parts)
    return out


concat_padded_tensors = concat_padded  # the name other systems have


def select(batch: Padded, index: Sequence[int] | torch.Tensor) -> Padded:
    """Returns the rows `index` of every tensor, trimmed to the longest of them."""
    idx = torch.as_tensor(index, dtype=torch.long)
    return trim({k: v[idx] for k, v in batch.items()})


def trim(batch: Padded) -> Padded:
    """Drops columns beyond the last real token of any sequence."""
    mask = batch["attention_mask"]
    width = int(mask.bool().sum(1).max()) if len(mask) else 0
    return {
        k: v[:, :width] if is_per_token(k, v, batch) and k != "attention_mask" else v
        for k, v in batch.items()
        if k != "attention_mask"
    } | {"attention_mask": mask[:, :width]}


def seqlens(batch: Padded) -> list[int]:
    """Returns the real tokens of every sequence, B numbers."""
    return batch["attention_mask"].bool().sum(1).tolist()
