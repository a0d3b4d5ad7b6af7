"""Writes dist checkpoints and Hugging Face directories by rows, some files at a time."""

from __future__ import annotations

import fcntl
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

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

from megarl.ckpt.convert.rows import (
    MAX_MEMORY,
    Block,
    Buffer,
    Rows,
    as_bytes,
    chunk_bytes,
    chunks,
    matrix,
    moved,
)
from megarl.ckpt.convert.source import (
    COMPANIONS,
    Source,
    model_directory,
    open_dist,
    open_hf,
    row_runs,
    stored_params,
)
from megarl.ckpt.dist import complete, describe_model
from megarl.ckpt.hf import MAX_SHARD_BYTES, copy_beside, write_beside, write_config, write_sidecars
from megarl.ckpt.safetensors import SINGLE, main_dtype, plan_shards, shard_header, write_index
from megarl.models.params import checkpoint_keys
from megarl.parallel import mcore  # noqa: F401  before megatron
from megarl.parallel.layout import Layout
from megarl.utils.files import clean_up, human, put_in_place, stage
from megarl.wire.buckets import Member

import megatron.core

PART_BYTES = 512 << 20  # of a dist checkpoint's files, a parameter at least in each
Part = tuple[Member, int, int, int, int]  # of a parameter: row, rows, and offset, length in bytes


def hf2dist(
    hf: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    part_bytes: int = PART_BYTES,
    workers: int = 2,
    max_memory: int = MAX_MEMORY,
) -> None:
    """Writes the dist checkpoint `out` of the model directory `hf`, without optimizer state.

    dtype: the weights'; None keeps each tensor's own. part_bytes: size of a file, at least one
    parameter each. workers: threads. max_memory: bytes of the whole process.
    Tokenizer and chat template go along. Raises ValueError if `hf` is not whole or does not fit its
    config, if `out` is there already, or if max_memory or the disk's room is too little.
    """
    source = open_hf(Path(hf))
    params = _params(source, dtype)
    blocks = moved(source.blocks, row_runs(source.table))
    for p in source.table.params:
        low, high = p.padding
        if low < high:
            zeros = Block(None, 0, torch.float32, low, high - low, 0, matrix(p.shape)[1])
            blocks[p.name].append(zeros)
    files = {
        f"__0_{i}.distcp": partial(_write_part, blocks, part)
        for i, part in enumerate(plan_shards(params, part_bytes).values())
    }

    def finish(staging: Path, parts: Mapping[str, Sequence[Part]]) -> None:
        _write_metadata(staging, parts)
        (staging / COMPANIONS).mkdir()
        write_sidecars(staging / COMPANIONS, source.companions, None)
        copy_beside(staging / COMPANIONS / SINGLE, source.table, source.path)
        complete(staging, _info(source, main_dtype(source.members(dtype))))

    with _without_checksums():
        _make(Path(out), files, finish, sum(p.nbytes for p in params), workers, max_memory)


def dist2hf(
    dist: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    workers: int = 2,
    max_memory: int = MAX_MEMORY,
) -> None:
    """Writes the weights of the dist checkpoint `dist`, of any layout, as model directory `out`.

    base: the model directory that config and tokenizer come from; None takes the checkpoint's own
    (a checkpoint of training has the config alone). The other arguments are as in `hf2dist`.
    Raises ValueError if `dist` is not whole, is of another model than `base` or holds adapters, if
    `out` is there already, or if max_memory or the disk's room is too little.
    """
    source = open_dist(model_directory(Path(dist)), None if base is None else Path(base))
    members = source.members(dtype)
    shards = plan_shards(members, max_shard_bytes)
    files = {name: partial(_write_shard, source, shard) for name, shard in shards.items()}

    def finish(staging: Path, _: object) -> None:
        whole = write_beside(staging, source.table, source.companions, shards)
        if len(whole) > 1:
            write_index(staging, whole)
        write_sidecars(staging, source.companions, None)
        write_config(staging, source.table.model.raw, main_dtype(members))

    _make(Path(out), files, finish, sum(m.nbytes for m in members), workers, max_memory)


def _make(
    target: Path,
    files: Mapping[str, Callable[[Path, Buffer], Any]],
    finish: Callable[[Path, dict[str, Any]], None],
    nbytes: int,
    workers: int,
    max_memory: int,
) -> None:
    """Makes a directory of `files` (by name), as many at a time as there are workers, and lets
    `finish` complete it. It is there whole or not at all; what a killed run left goes first."""
    target = target.absolute()
    size = chunk_bytes(max_memory, workers)
    with _locked(target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"{target} is there already: remove it, or choose another --out")
        clean_up(target.parent, target.name)
        staging = stage(target)
        try:
            if nbytes > (free := shutil.disk_usage(staging).free):
                raise ValueError(
                    f"{target}: {human(nbytes)} are needed, the disk has {human(free)} free; make "
                    "room there, or choose another --out"
                )
            with ThreadPoolExecutor(workers) as pool:
                results = pool.map(lambda name: files[name](staging / name, Buffer(size)), files)
                finish(staging, dict(zip(files, results, strict=True)))
            put_in_place(staging, target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Keeps other conversions from `target` inside. Raises ValueError where one is under way."""
    lock = target.with_name(f".{target.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.path.samefile(lock, file.fileno())  # one that just ended took it away
        except (BlockingIOError, PermissionError, FileNotFoundError):  # the second from SMB
            free = False
        except OSError:  # a file system without locks
            free = True
        if not free:
            raise ValueError(
                f"{target}: another conversion works there; wait for it, or choose another --out"
            )
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


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


def _params(source: Source, dtype: torch.dtype | None) -> list[Member]:
    """Returns every parameter with the dtype to write. Raises ValueError if the tensors that are
    fused in one differ in it."""
    wanted = {m.name: m.dtype for m in source.members(dtype)}
    dtypes: dict[str, torch.dtype] = {}
    for run in row_runs(source.table):
        if dtypes.setdefault(run.target, wanted[run.source]) != wanted[run.source]:
            raise ValueError(
                f"{source.path}: {run.source} is {wanted[run.source]}, what it is fused with is "
                f"{dtypes[run.target]}; choose one with --dtype"
            )
    return [
        Member(p.name, p.shape, dtypes[p.name], 0, math.prod(p.shape) * dtypes[p.name].itemsize)
        for p in stored_params(source.table)
    ]


def _write_part(
    blocks: Mapping[str, Sequence[Rows]], params: Sequence[Member], path: Path, buffer: Buffer
) -> list[Part]:
    """Writes a file of chunks, each by torch.save; returns where they are."""
    parts = []
    with path.open("wb") as f:
        for p in params:
            lead = (1,) * len(checkpoint_keys(p.name)[1])
            for row, chunk in chunks(blocks[p.name], p, buffer):
                offset = f.tell()
                torch.save(chunk.view(*lead, len(chunk), *p.shape[1:]), f)
                parts.append((p, row, len(chunk), offset, f.tell() - offset))
    return parts


def _write_metadata(staging: Path, parts: Mapping[str, Sequence[Part]]) -> None:
    """Writes .metadata and common.pt as torch's writer leaves them after one rank has saved."""
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    counts = _leading_counts(p.name for part in parts.values() for p, *_ in part)
    for file, chunks_ in parts.items():
        for p, row, rows, start, length in chunks_:
            keys, lead = checkpoint_keys(p.name)
            inner = p.shape[1:]
            offsets = torch.Size((*lead, row, *(0 for _ in inner)))
            sizes = torch.Size((*(1 for _ in lead), rows, *inner))
            for key in keys:
                size = torch.Size((*counts[key], *p.shape))
                entry = tensors.setdefault(
                    key, TensorStorageMetadata(TensorProperties(dtype=p.dtype), size, [])
                )
                index = MetadataIndex(key, offsets, len(entry.chunks))
                storage[index] = _StorageInfo(file, start, length)
                entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
    torch.save({}, staging / "common.pt")
    metadata = Metadata(dict(tensors), storage_data=storage, storage_meta=StorageMeta())
    with (staging / ".metadata").open("wb") as f:
        pickle.dump(metadata, f)


def _leading_counts(names: Iterator[str]) -> dict[str, tuple[int, ...]]:
    """Returns for each key how many parameters its leading dimensions hold."""
    counts: dict[str, tuple[int, ...]] = {}
    for name in names:
        keys, lead = checkpoint_keys(name)
        for key in keys:
            last = counts.get(key, (0,) * len(lead))
            counts[key] = tuple(max(n, i + 1) for n, i in zip(last, lead, strict=True))
    return counts


def _info(source: Source, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the info that an engine writes, for weights that were never trained."""
    return {
        **describe_model(source.table.model),
        "dtype": str(dtype).removeprefix("torch."),
        "layout": asdict(Layout()),
        "device": "cpu",
        "with_optim": False,
        "optimizer": None,
        "lora": None,
        "versions": {"torch": torch.__version__, "megatron-core": megatron.core.__version__},
        "version": 0,
    }


def _write_shard(source: Source, shard: Sequence[Member], path: Path, buffer: Buffer) -> None:
    with path.open("wb") as f:
        f.write(shard_header(shard))
        for m in shard:
            for _, rows in chunks(source.blocks[m.name], m, buffer):
                f.write(as_bytes(rows))
