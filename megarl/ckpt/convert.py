"""Converts weights between Hugging Face directories and dist checkpoints, in one process on CPU.

No tensor is ever whole in memory: rows go from file to file in chunks. A dist checkpoint is
megatron-core's own (torch_dist), here cut by rows, and loads on any layout. Norms that Transformer
Engine's layers have under another name than the local ones stand there under both, stored once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.ckpt.convert_files import as_bytes, matrix
from megarl.ckpt.convert_source import (
    COMPANIONS,
    DIST,
    HF,
    DistSource,
    HfSource,
    Run,
    Source,
    main_dtype,
    row_runs,
    runs_by,
)
from megarl.ckpt.convert_work import Buffer, Job, Limits, make_directory
from megarl.ckpt.dist import complete, describe_model
from megarl.ckpt.hf import MAX_SHARD_BYTES, write_config, write_sidecars
from megarl.ckpt.safetensors import plan_shards, shard_header, write_index
from megarl.models.gather import export_dtype
from megarl.models.names import checkpoint_keys
from megarl.models.piece_table import LocalParam
from megarl.parallel import mcore  # noqa: F401  before megatron
from megarl.parallel.layout import Layout
from megarl.wire.buckets import Member

import megatron.core  # isort: skip

PART_BYTES = 512 << 20  # of a dist checkpoint's files, a parameter at least in each
Add = Callable[[int], None]


def hf2dist(
    hf: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    part_bytes: int = PART_BYTES,
    **limits: Unpack[Limits],
) -> None:
    """Writes the dist checkpoint `out` of the model directory `hf`, without optimizer state.

    dtype: the weights'; None keeps each tensor's own. part_bytes: size of a file, at least one
    parameter each. limits: workers (threads), max_memory (bytes of the whole process), quiet.
    Tokenizer and chat template go along. Raises ValueError if `hf` is not whole or does not fit its
    config, if `out` is there already, or if max_memory is too little.
    """
    source = HfSource(Path(hf))
    dtypes = _param_dtypes(source, dtype)
    runs = runs_by(source.table, lambda run: run.param)
    jobs = {
        f"__0_{i}.distcp": Job(
            nbytes=sum(_nbytes(p, dtypes) for p in params),
            write=partial(_write_part, source, params, runs, dtypes),
        )
        for i, params in enumerate(_plan_parts(source, dtypes, part_bytes))
    }

    def finish(staging: Path, chunks: dict[str, Any]) -> None:
        _write_metadata(staging, source, dtypes, chunks)
        (staging / COMPANIONS).mkdir(exist_ok=True)
        write_sidecars(staging / COMPANIONS, source.companions, None)
        complete(staging, _info(source, main_dtype(_all(source, dtype), source)))

    input_ = _input(DIST, source, dtype, part_bytes)
    with _without_checksums():
        make_directory(Path(out), jobs, finish, input_=input_, **limits)


def dist2hf(
    dist: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    **limits: Unpack[Limits],
) -> None:
    """Writes the weights of the dist checkpoint `dist`, of any layout, as model directory `out`.

    base: the model directory that config and tokenizer come from; None takes the checkpoint's own
    (a checkpoint of training has the config alone). The other arguments are as in `hf2dist`.
    Raises ValueError if `dist` is not whole, is of another model than `base` or holds adapters, if
    `out` is there already, or if max_memory is too little.
    """
    source = DistSource(Path(dist), None if base is None else Path(base))
    dtypes = _all(source, dtype)
    members = [
        Member(t.name, t.shape, dtypes[t.name], 0, t.numel * dtypes[t.name].itemsize)
        for t in source.table.tensors
    ]
    shards = plan_shards(members, max_shard_bytes)

    jobs = {
        name: Job(nbytes=sum(m.nbytes for m in shard), write=partial(_write_shard, source, shard))
        for name, shard in shards.items()
    }

    def finish(staging: Path, _: dict[str, Any]) -> None:
        if len(shards) > 1:
            write_index(staging, shards)
        write_sidecars(staging, source.companions, None)
        write_config(staging, source.model.raw, main_dtype(dtypes, source))

    input_ = _input(HF, source, dtype, max_shard_bytes)
    make_directory(Path(out), jobs, finish, input_=input_, **limits)


@contextmanager
def _without_checksums() -> Iterator[None]:
    """Lets torch.save leave out its checksums: they cost half its time, and torch.load never looks
    at them."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _input(kind: str, source: Source, dtype: torch.dtype | None, size: int) -> dict[str, Any]:
    files = source.fingerprint()
    path = str(source.path.absolute())
    return {"to": kind, "from": path, "files": files, "dtype": str(dtype), "size": size}


def _all(source: Source, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Returns the dtype to write for each HF name: `dtype`, or the stored one; fp32 for buffers."""
    return {
        t.name: export_dtype(t, source.dtypes if dtype is None else dtype)
        for t in source.table.tensors
    }


def _param_dtypes(source: Source, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Returns the dtype of each parameter. Raises ValueError if its tensors differ in it."""
    wanted = _all(source, dtype)
    found: dict[str, torch.dtype] = {}
    for run in row_runs(source.table):
        if found.setdefault(run.param, wanted[run.name]) != wanted[run.name]:
            raise ValueError(
                f"{source.path}: {run.name} is {wanted[run.name]}, what it is fused with is "
                f"{found[run.param]}; choose one with --dtype"
            )
    return found


def _nbytes(p: LocalParam, dtypes: Mapping[str, torch.dtype]) -> int:
    rows, width = matrix(p.shape)
    return rows * width * dtypes[p.name].itemsize


def _plan_parts(
    source: Source, dtypes: Mapping[str, torch.dtype], part_bytes: int
) -> list[list[LocalParam]]:
    parts: list[list[LocalParam]] = [[]]
    size = 0
    for p in source.table.params:
        if parts[-1] and size + _nbytes(p, dtypes) > part_bytes:
            parts.append([])
            size = 0
        parts[-1].append(p)
        size += _nbytes(p, dtypes)
    return parts


def _write_part(
    source: Source,
    params: Sequence[LocalParam],
    runs: Mapping[str, Sequence[Run]],
    dtypes: Mapping[str, torch.dtype],
    path: Path,
    buffer: Buffer,
    add: Add,
) -> list[tuple[str, int, int, int, int]]:
    """Writes a file of chunks, each by torch.save; returns for each (parameter, row, rows, offset,
    length), the last two in bytes."""
    chunks = []
    with path.open("wb") as f:
        for p in params:
            (rows, width), dtype = matrix(p.shape), dtypes[p.name]
            lead = (1,) * len(checkpoint_keys(p.name)[1])
            step = buffer.rows(width * dtype.itemsize)
            for row in range(0, rows, step):
                n = min(step, rows - row)
                chunk = buffer.tensor((n, width), dtype)
                _fill(source, runs[p.name], row, chunk)
                offset = f.tell()
                torch.save(chunk.view(*lead, n, *p.shape[1:]), f)
                chunks.append((p.name, row, n, offset, f.tell() - offset))
                add(n * width * dtype.itemsize)
    return chunks


def _fill(source: Source, runs: Sequence[Run], row: int, out: torch.Tensor) -> None:
    """Fills `out` with rows [row, row + n) of a parameter; padding of the vocabulary is zero."""
    filled = 0
    for run in runs:
        low, high = max(row, run.row), min(row + len(out), run.row + run.rows)
        if low < high:
            source.read(run.name, run.hf_row + low - run.row, out[low - row : high - row])
            filled = max(filled, high - row)
    out[filled:].zero_()


def _write_metadata(
    staging: Path,
    source: Source,
    dtypes: Mapping[str, torch.dtype],
    results: Mapping[str, Sequence[Sequence[Any]]],
) -> None:
    """Writes .metadata and common.pt as torch's writer leaves them after one rank has saved."""
    by_param = {p.name: p for p in source.table.params}
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    counts = _leading_counts(source.table.params)
    for file, chunks in results.items():
        for name, row, rows, start, length in chunks:
            p, (keys, lead) = by_param[name], checkpoint_keys(name)
            inner = p.shape[1:]
            offsets = torch.Size((*lead, row, *(0 for _ in inner)))
            sizes = torch.Size((*(1 for _ in lead), rows, *inner))
            for key in keys:
                entry = tensors.setdefault(
                    key,
                    TensorStorageMetadata(
                        properties=TensorProperties(dtype=dtypes[name]),
                        size=torch.Size((*counts.get(key, ()), *p.shape)),
                        chunks=[],
                    ),
                )
                storage[MetadataIndex(key, offsets, len(entry.chunks))] = _StorageInfo(
                    file, start, length
                )
                entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
    torch.save({}, staging / "common.pt")
    metadata = Metadata(dict(tensors), storage_data=storage, storage_meta=StorageMeta())
    with (staging / ".metadata").open("wb") as f:
        pickle.dump(metadata, f)


def _leading_counts(params: Sequence[LocalParam]) -> dict[str, tuple[int, ...]]:
    """Returns for each key how many parameters its leading dimensions hold."""
    found: dict[str, tuple[int, ...]] = {}
    for p in params:
        keys, lead = checkpoint_keys(p.name)
        for key in keys:
            last = found.get(key, (0,) * len(lead))
            found[key] = tuple(max(n, i + 1) for n, i in zip(last, lead, strict=True))
    return found


def _info(source: Source, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the info that an engine writes, for weights that were never trained."""
    return {
        **describe_model(source.model),
        "dtype": str(dtype).removeprefix("torch."),
        "layout": asdict(Layout()),
        "device": "cpu",
        "with_optim": False,
        "optimizer": None,
        "lora": None,
        "versions": {"torch": torch.__version__, "megatron-core": megatron.core.__version__},
        "version": 0,
    }


def _write_shard(
    source: Source, shard: Sequence[Member], path: Path, buffer: Buffer, add: Add
) -> None:
    with path.open("wb") as f:
        f.write(shard_header(shard))
        for m in shard:
            rows, width = matrix(m.shape)
            step = buffer.rows(width * m.dtype.itemsize)
            for row in range(0, rows, step):
                out = buffer.tensor((min(step, rows - row), width), m.dtype)
                source.read(m.name, row, out)
                f.write(as_bytes(out))
                add(out.numel() * m.dtype.itemsize)
