"""Loads and saves Hugging Face model directories, sharded over any layout.

Both follow the piece table: loading, every rank reads only its own slices; saving, tensors are
gathered bucket by bucket to rank 0, which streams them to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ckpt.hf_dir import check_target, staged_directory, write_config, write_sidecars
from megarl.ckpt.safetensors_files import SafetensorsDir, ShardWriter, plan_shards
from megarl.models.fill import draw, fill_params
from megarl.models.gather import Bucket, BucketGatherer, plan_buckets
from megarl.models.piece_table import HfTensor, PieceTable
from megarl.observability.logging import get_logger
from megarl.parallel.layout import Layout

log = get_logger(__name__)

BUCKET_BYTES = 512 << 20
MAX_SHARD_BYTES = 5 << 30  # Hugging Face's own default


def load_hf(
    path: str | Path,
    table: PieceTable,
    layout: Layout,
    rank: int,
    params: Mapping[str, Tensor],
    *,
    head_seed: int | None = None,
) -> None:
    """Fills this rank's `params` (canonical name -> tensor) from the safetensors of `path`.

    Values are cast to the parameters' dtype, vocabulary padding becomes zero. No communication.
    ValueError, naming file, tensor and fix, if a tensor is missing, has another shape, or is one
    the model does not have. A value head that the directory's model does not have (new_head) starts
    at zero, or, with `head_seed`, random by it.
    """
    with SafetensorsDir(path) as files:
        _check_tensors(files, table)
        if any(t.name not in files for t in table.tensors):
            start = "zero" if head_seed is None else f"random numbers (seed {head_seed})"
            log.info("%s has no value head: it starts as %s", path, start)

        def read(tensor: HfTensor, box: tuple[slice, ...]) -> Tensor:
            if tensor.name in files:
                return files.read(tensor.name, box)
            if head_seed is None:
                return torch.zeros(tensor.shape)[box]
            return draw(tensor, head_seed, table.model.initializer_range)[box]

        fill_params(table, layout.coords(rank), params, read)


def _check_tensors(files: SafetensorsDir, table: PieceTable) -> None:
    for t in table.tensors:
        if t.name not in files:
            if _is_new(t.name, table):
                continue
            hint = "its config.json does not belong to these weights, or files are missing"
            if t.name == "lm_head.weight":
                hint = "set tie_word_embeddings=true in config.json if the model has no output head"
            raise ValueError(f"{files.path}: tensor {t.name} {list(t.shape)} is missing; {hint}")
        if (found := files.shape(t.name)) != t.shape:
            raise ValueError(
                f"{files.file_of(t.name)}: tensor {t.name} has shape {list(found)}, config.json "
                f"asks for {list(t.shape)}; use the config.json that belongs to these weights"
            )
    if further := [n for n in files.names() if _predicts_further(n, table)]:
        log.info(
            "%s: %d tensors of the layers that predict further tokens (num_nextn_predict_layers) "
            "are left out: neither trained nor saved",
            files.path,
            len(further),
        )
    unknown = [n for n in files.names() if n not in table.by_name and not _ignorable(n, table)]
    if unknown:
        raise ValueError(
            f"{files.file_of(unknown[0])}: {len(unknown)} tensors are not part of a "
            f"{table.model.family} model with this config.json, the first is {unknown[0]}; "
            "use the config.json that belongs to these weights"
        )


def _ignorable(name: str, table: PieceTable) -> bool:
    """Tensors that may be in the files without being read: rotary frequencies, which old
    checkpoints stored and the config determines, and the copy of a tied embedding. A value model
    made from a language model has no use for its head. Layers that predict further tokens."""
    if name.endswith("rotary_emb.inv_freq") or _predicts_further(name, table):
        return True
    return name == "lm_head.weight" and (table.model.tie_word_embeddings or table.model.new_head)


def _predicts_further(name: str, table: PieceTable) -> bool:
    """Multi-token prediction (DeepSeek-V3, 2024, section 2.2): layers behind the last."""
    m = table.model
    layers = range(m.num_layers, m.num_layers + m.mtp_layers)
    return name.startswith(tuple(f"model.layers.{i}." for i in layers))


def _is_new(name: str, table: PieceTable) -> bool:
    return table.model.new_head and name.startswith("score.")


def save_hf(
    path: str | Path,
    table: PieceTable,
    layout: Layout,
    rank: int,
    params: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    base_model_path: str | Path | None = None,
    tokenizer: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Writes a directory that AutoModelForCausalLM.from_pretrained loads. Collective.

    group:           spans the layout's ranks; None is the default group.
    dtype:           of the files; None is that of the parameters.
    base_model_path: where generation config, tokenizer and chat template are copied from;
                     config.json is always the one the model was built from.
    tokenizer:       its save_pretrained() replaces the copied tokenizer files.

    The directory is written beside `path` and renamed into place when it is whole, so a failed save
    leaves an older model as it was. Rank 0 holds at most about two buckets. A failure on rank 0 is
    raised on every rank.
    """
    target = Path(path)
    first = next(iter(params.values()))
    dtype = dtype or first.dtype
    buckets = plan_buckets(table, dtype, bucket_bytes)
    gatherer = BucketGatherer(
        table, layout, rank, params, buckets, owner=0, group=group, device=first.device
    )
    gathered = ((bucket, gatherer.gather(bucket)) for bucket in buckets)

    def write(staging: Path) -> None:
        _write_weights(staging, gathered, buckets, max_shard_bytes)
        write_sidecars(staging, base_model_path, tokenizer)
        write_config(staging, table.model.raw, dtype)

    write_directory(target, write, gathered, rank=rank, group=group, device=first.device)


Gathered = Iterator[tuple[Bucket, Tensor | None]]


def write_directory(
    target: Path,
    write: Callable[[Path], None],
    gathered: Gathered,
    *,
    rank: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    marker: str = "config.json",
) -> None:
    """Rank 0 writes what is `gathered`, by `write(staging)`; the other ranks send it. Collective.

    A directory without `marker` is none of ours, and not replaced.
    """
    failure: Exception | None = None
    if rank == 0:
        try:
            check_target(target, marker)
        except (OSError, ValueError) as e:
            failure = e
    _raise_if_failed(failure, group, device)
    if rank == 0:
        try:
            with staged_directory(target) as staging:
                write(staging)
        except Exception as e:  # whatever it is, the other ranks must hear of it first
            failure = e
    for _ in gathered:  # other ranks send here; rank 0 takes what a failed save left to take
        pass
    _raise_if_failed(failure, group, device)


def _write_weights(
    directory: Path,
    gathered: Gathered,
    buckets: Sequence[Bucket],
    max_shard_bytes: int,
) -> None:
    shards = plan_shards([m for b in buckets for m in b.members], max_shard_bytes)
    with ShardWriter(directory, shards) as writer:
        for bucket, flat in gathered:
            assert flat is not None
            for name, tensor in bucket.views(flat):
                writer.write(name, tensor)


def _raise_if_failed(
    failure: Exception | None, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Collective: rank 0's exception on rank 0, a RuntimeError with its message elsewhere."""
    message: list[str | None] = [f"{type(failure).__name__}: {failure}" if failure else None]
    dist.broadcast_object_list(message, group=group, device=device, group_src=0)
    if failure is not None:
        raise failure
    if message[0] is not None:
        raise RuntimeError(f"saving failed on rank 0: {message[0]}")
