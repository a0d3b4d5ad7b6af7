"""Reads slices out of a model directory of safetensors files, and writes one from many ranks.

Reading goes through the safetensors library, so a rank touches only the bytes it needs. Writing is
our own, as the format is eight bytes of header length, a JSON header and the data: since names,
shapes and dtypes are known beforehand, tensors are streamed to disk and a shard never has to fit in
memory. Each file has a rank that writes it, to which its tensors are gathered bucket by bucket.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megarl.ckpt.files import staged
from megarl.models.hf_config import adapter_given
from megarl.models.piece_table import PieceTable
from megarl.models.shapes import Wrapper, is_beside, plain_name
from megarl.parallel.ranks import Ranks
from megarl.parallel.worlds import device
from megarl.transfer.gather import BucketGatherer, Dtypes, plan_buckets
from megarl.utils.files import put_in_place
from megarl.wire.buckets import Bucket, Member

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER = 100 << 20  # bytes; the library's own limit
# what reading a header of anything else ends with
_DAMAGE = (
    OSError,
    struct.error,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """The place of a tensor: row-major, `nbytes` from byte `offset` of `file` on. `name` is that in
    the file, `dtype` the format's name for it."""

    file: Path
    name: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class SafetensorsDir:
    """Opens the tensors of a model directory, in one file or in shards; of another directory, in
    `file`. A context manager.

    Files are mapped to memory when a tensor is read. It raises ValueError, naming file, tensor and
    fix, for every problem a user can have with the files.
    """

    def __init__(self, path: str | Path, file: str | None = None) -> None:
        self.path, self._file = Path(path), file
        self._open = ExitStack()
        self._handles: dict[Path, Any] = {}  # safe_open
        self._stored: dict[str, Stored] = {}

    def __enter__(self) -> SafetensorsDir:
        for file in [self._file] if self._file else self._files():
            self._stored |= _read_header(self.path / file)
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors."""
        return self._stored.keys()

    def stored(self, name: str) -> Stored:
        """Returns where a tensor lies."""
        return self._stored[name]

    def drop_beside(self, wrapper: Wrapper) -> None:
        """Drops the tensors beside the language model within `wrapper`."""
        self._stored = {n: s for n, s in self._stored.items() if not is_beside(n, wrapper)}

    def rename(self, names: Iterable[str]) -> None:
        """Gives each tensor the name in `names` that has the same plain name, if there is one."""
        own = {plain_name(name): name for name in names}
        self._stored = {own.get(plain_name(n), n): s for n, s in self._stored.items()}

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Returns the box of a tensor, in the file's dtype; only its bytes are read."""
        stored = self._stored[name]
        file = stored.file
        try:
            if file not in self._handles:
                handle = safe_open(str(file), framework="pt", device="cpu")
                self._handles[file] = self._open.enter_context(handle)
            tensor: Tensor = self._handles[file].get_slice(stored.name)[box]
        except SafetensorError as e:
            raise ValueError(f"{file}: cannot read {name}{list(box)} ({e})") from e
        return tensor

    def copy(self, names: Sequence[str], target: Path) -> list[Member]:
        """Copies the tensors of `names` to the new file `target`, if there are any; returns them as
        members of bytes. Only bytes are moved, so a tensor may have any dtype of the format."""
        stored = {name: self._stored[name] for name in names}
        members = [Member(n, s.shape, torch.uint8, 0, s.nbytes) for n, s in stored.items()]
        if members:
            with target.open("wb") as out:
                out.write(shard_header(members, {n: s.dtype for n, s in stored.items()}))
                for s in stored.values():
                    with s.file.open("rb") as f:
                        f.seek(s.offset)
                        out.write(f.read(s.nbytes))
        return members

    def _files(self) -> list[str]:
        index, single = self.path / INDEX, self.path / SINGLE
        if index.is_file():
            try:
                listed = sorted({*map(str, json.loads(index.read_text())["weight_map"].values())})
            except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as e:
                raise ValueError(
                    f"{index}: not a safetensors index ({type(e).__name__}: {e}); "
                    "download or save the model again"
                ) from e
            if single.is_file() and listed != [SINGLE]:
                raise ValueError(
                    f"{self.path}: both {SINGLE} and {INDEX} (of {len(listed)} files) are there; "
                    "transformers reads the first, servers the second: delete the one that is old"
                )
            for name in listed:
                if not (self.path / name).is_file():
                    raise ValueError(
                        f"{self.path / name} is missing but {INDEX} lists it; download the model "
                        "again"
                    )
            return listed
        if single.is_file():
            return [SINGLE]
        if (self.path / "adapter_model.safetensors").is_file():
            raise ValueError(adapter_given(self.path))
        hint = "download the model again"
        if list(self.path.glob("*.bin")):
            hint = (
                "it holds pytorch .bin weights: convert them with "
                "AutoModelForCausalLM.from_pretrained(path).save_pretrained(path)"
            )
        raise ValueError(f"{self.path}: neither {SINGLE} nor {INDEX} there; {hint}")


def _read_header(file: Path) -> dict[str, Stored]:
    """Returns what a file holds, by name. Raises ValueError unless it is whole."""
    size, tensors = 0, {}
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > min(size - 8, _MAX_HEADER):
                raise ValueError(f"a header of {length} bytes")
            entries = json.loads(f.read(length))
        end = 0
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            (start, stop), shape = entry["data_offsets"], tuple(entry["shape"])
            dtype = DTYPES.get(entry["dtype"])
            if dtype is not None and stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} {list(shape)} has {stop - start} bytes")
            tensors[name] = Stored(
                file, name, 8 + length + start, entry["dtype"], shape, stop - start
            )
            end = max(end, stop)
        if 8 + length + end != size:
            raise ValueError(f"{8 + length + end} are expected")
    except _DAMAGE as e:
        raise ValueError(
            f"{file}: not a whole safetensors file ({e}; {size} bytes); download or save the model "
            "again"
        ) from e
    return tensors


def plan_shards(members: Sequence[Member], max_shard_bytes: int) -> dict[str, list[Member]]:
    """Returns the tensors of each file, in order, by the file's name; a tensor larger than a shard
    gets its own."""
    shards: list[list[Member]] = [[]]
    size = 0
    for m in members:
        if shards[-1] and size + m.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(m)
        size += m.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    n = len(shards)
    return {f"model-{i + 1:05d}-of-{n:05d}.safetensors": s for i, s in enumerate(shards)}


def main_dtype(members: Iterable[Member]) -> torch.dtype:
    """Returns the dtype of most numbers."""
    numbers: Counter[torch.dtype] = Counter()
    for m in members:
        numbers[m.dtype] += math.prod(m.shape)
    return numbers.most_common(1)[0][0]


def write_index(directory: Path, shards: Mapping[str, Sequence[Member]]) -> None:
    """Writes the index that names the file of every tensor."""
    total = sum(m.nbytes for members in shards.values() for m in members)
    weight_map = {m.name: file for file, members in shards.items() for m in members}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def shard_header(members: Sequence[Member], dtypes: Mapping[str, str] | None = None) -> bytes:
    """Returns the bytes of a safetensors file before those of `members`. dtypes: the format's name
    of each tensor's dtype, where the members have another one."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for m in members:
        entries[m.name] = {
            "dtype": dtypes[m.name] if dtypes else _DTYPE_NAMES[m.dtype],
            "shape": list(m.shape),
            "data_offsets": [end, end + m.nbytes],
        }
        end += m.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """Says which rank writes which file.

    files: the tensors of each file, by the file's name. writer_of: the rank that writes each file.
    buckets: in the order of gathering, each gathered to the rank at its index in `writers` and
    written to the file at its index in `file_of`.
    """

    files: dict[str, list[Member]]
    writer_of: dict[str, int]
    buckets: list[Bucket]
    writers: list[int]
    file_of: list[str]


def plan_files(
    table: PieceTable,
    dtype: Dtypes,
    *,
    writers: Sequence[int],
    max_shard_bytes: int,
    bucket_bytes: int,
) -> FilePlan:
    """Shares the files out to `writers`.

    A file goes to a writer of the pipeline stage that holds most of it, to the one with the least
    to write so far; among equals, data-parallel replicas come last. Writers take turns in
    gathering, so that all of them write at the same time. Sizes are in bytes.
    """
    whole = (m for bucket in plan_buckets(table, dtype, bucket_bytes) for m in bucket.members)
    files = plan_shards(list(whole), max_shard_bytes)
    load = dict.fromkeys(writers, 0)
    coords = {w: table.layout.coords(w) for w in writers}
    writer_of: dict[str, int] = {}
    turns: list[tuple[int, int, str, Bucket]] = []  # (how many its writer has before, writer, ...)
    count = dict.fromkeys(writers, 0)
    for file, members in files.items():
        stage = _stage_of(members, table)
        near = [w for w in writers if coords[w].pp == stage] or list(writers)
        writer = min(near, key=lambda w: (load[w], coords[w].tp, coords[w].cp, coords[w].dp))
        load[writer] += sum(m.nbytes for m in members)
        writer_of[file] = writer
        part = replace(table, tensors=tuple(table.by_name[m.name] for m in members))
        for bucket in plan_buckets(part, dtype, bucket_bytes):
            turns.append((count[writer], writer, file, bucket))
            count[writer] += 1
    turns.sort(key=lambda turn: turn[:2])
    return FilePlan(
        files=files,
        writer_of=writer_of,
        buckets=[replace(bucket, index=i) for i, (*_, bucket) in enumerate(turns)],
        writers=[writer for _, writer, _, _ in turns],
        file_of=[file for _, _, file, _ in turns],
    )


def _stage_of(members: Sequence[Member], table: PieceTable) -> int:
    """Returns the pipeline stage that holds most bytes of these tensors."""
    stages: Counter[int] = Counter()
    for m in members:
        stages[table.by_name[m.name].pieces[0].place.pp] += m.nbytes
    return stages.most_common(1)[0][0]


def save_tensors(
    path: str | Path,
    table: PieceTable,
    rank: int,
    params: Mapping[str, Tensor],
    finish: Callable[[Path, dict[str, list[Member]]], None],
    *,
    marker: str,
    dtype: Dtypes,
    group: dist.ProcessGroup | None,
    max_shard_bytes: int,
    bucket_bytes: int,
) -> None:
    """Writes the table's tensors to a directory, which is renamed to `path` when it is whole.
    Collective; all or nothing: a failure on any rank is raised on every rank.

    finish: completes the directory, on rank 0; it is given the tensors of each file. marker: the
    file without which a directory at `path` is not replaced. Ranks that see the directory share the
    files out; on storage of rank 0's own it writes all. A writer holds at most two buckets, one of
    which is being written, and the messages of one.
    """
    target, what, ranks = Path(path), f"saving {path}", Ranks.of(group)
    with staged(target, "model", marker, group) as staging:
        sees = ranks.gather(staging.is_dir())

        def share_out() -> FilePlan:
            return plan_files(
                table,
                dtype,
                writers=[writer for writer, there in enumerate(sees) if there],
                max_shard_bytes=max_shard_bytes,
                bucket_bytes=bucket_bytes,
            )

        plan = ranks.together(share_out, what=what)
        where = next((p.device for p in params.values()), device())
        gatherer = BucketGatherer(table, rank, params, plan.buckets, plan.writers, group, where)
        ranks.together(_write_files, staging, plan, gatherer, rank, what=what)

        def put_whole() -> None:
            if rank == 0:
                finish(staging, plan.files)
                put_in_place(staging, target)

        ranks.together(put_whole, what=what)


def _write_files(staging: Path, plan: FilePlan, gatherer: BucketGatherer, rank: int) -> None:
    """Writes this rank's files, by a thread while the next bucket is gathered. Collective.

    A failure to write is raised at the end: the other ranks go on gathering, and need this one.
    """
    rooms = [torch.empty(0, dtype=torch.uint8, device=gatherer.device)] * 2
    writing: Future[None] | None = None
    failure: BaseException | None = None
    with ThreadPoolExecutor(1) as thread:
        for bucket, writer, name in zip(plan.buckets, plan.writers, plan.file_of, strict=True):
            if writer != rank:
                gatherer.gather(bucket)
                continue
            rooms.reverse()  # the other one is being written
            if rooms[0].numel() < bucket.nbytes:
                rooms[0] = torch.empty(bucket.nbytes, dtype=torch.uint8, device=gatherer.device)
            flat = gatherer.gather(bucket, rooms[0])
            assert flat is not None
            failure = failure or (writing.exception() if writing else None)
            if failure is None:
                writing = thread.submit(_append, staging / name, plan.files[name], bucket, flat)
        if failure := failure or (writing.exception() if writing else None):
            raise failure


def _append(file: Path, members: Sequence[Member], bucket: Bucket, flat: Tensor) -> None:
    """Writes the next bucket of a file, in row-major bytes; the file is synced to disk once all of
    its `members` are there."""
    with file.open("ab") as f:
        if bucket.members[0].name == members[0].name:
            f.write(shard_header(members))
        for _, tensor in bucket.views(flat):
            numbers: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
            f.write(numbers)
        if bucket.members[-1].name == members[-1].name:
            f.flush()
            os.fsync(f.fileno())
            size = len(shard_header(members)) + sum(m.nbytes for m in members)
            assert f.tell() == size, f"{file} has {f.tell()} bytes, not {size}"
