"""Writes and reads the batches of a run's steps: <run>/record/batches/step_000123.safetensors.

A file holds the batch as it was handed out to the step, before anything was computed of it:
"lengths" [B], "sample/<name>" [B] and "token/<name>" [T, ...], the rows one after the other. Its
metadata say of which step and version it is, and how long the data set was.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from megarl.api.batch import Batch, Padded, Tokens
from megarl.config.errors import ConfigError
from megarl.config.run import batch_path, recorded_steps
from megarl.utils.files import full_disk_named, write_whole

_LENGTHS, _SAMPLE, _TOKEN = "lengths", "sample/", "token/"


def whole(batch: Batch) -> Batch:
    """Returns the batch, all of whose rows rank 0 holds. Collective."""
    if len(batch.home.rows(0)) == len(batch):
        return batch
    return Batch.from_padded(batch.fetch(range(len(batch))), comm=batch.comm)


def as_tensors(batch: Batch) -> dict[str, Tensor]:
    """Returns the tensors of a file. On a rank that holds all rows."""
    found = {_LENGTHS: batch.lengths}
    found |= {_SAMPLE + name: values for name, values in batch.per_sample.items()}
    found |= {_TOKEN + name: tokens.values for name, tokens in batch.per_token.items()}
    return {name: values.contiguous() for name, values in found.items()}


def write_batch(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, int]) -> None:
    """Writes a file, whole or not at all. Raises DiskFull where there is no room."""
    content = save(dict(tensors), {name: str(value) for name, value in about.items()})
    with full_disk_named(f"recording {path.name}", path.parent, len(content)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)


def record_batch(
    run_dir: Path,
    tensors: Mapping[str, Tensor],
    about: Mapping[str, int],
    keep: int | None,
) -> None:
    """Writes the batch of step about["step"]; then the newest `keep` (None: all) stay. Raises
    DiskFull where there is no room."""
    step = about["step"]
    write_batch(batch_path(run_dir, step), tensors, about)
    for old in recorded_steps(run_dir):
        if keep is not None and old <= step - keep:
            batch_path(run_dir, old).unlink(missing_ok=True)


def read_batch(path: Path) -> tuple[list[Padded], dict[str, int]]:
    """Returns the rows of a file, each padded [1, n], and its metadata. Raises ConfigError for a
    file that cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            about = {name: int(value) for name, value in file.metadata().items()}
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except Exception as e:  # safetensors has an error of its own for every kind of damage
        raise ConfigError([f"{path} cannot be read: {type(e).__name__}: {e}"]) from e
    lengths = tensors.pop(_LENGTHS)
    tokens = {n: Tokens(v, lengths) for n, v in tensors.items() if n.startswith(_TOKEN)}
    rows: list[Padded] = []
    for i, length in enumerate(lengths.tolist()):
        row = {name.removeprefix(_TOKEN): field.row(i)[None] for name, field in tokens.items()}
        row |= {
            name.removeprefix(_SAMPLE): values[i : i + 1]
            for name, values in tensors.items()
            if name.startswith(_SAMPLE)
        }
        rows.append(row | {"attention_mask": torch.ones(1, length, dtype=torch.bool)})
    return rows, about
