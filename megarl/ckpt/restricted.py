"""Reads the pickles in checkpoints so that nothing in them can run.

A torch_dist checkpoint has three kinds: `.metadata`, common.pt, and objects between the tensors of
the .distcp files (random states). torch and megatron-core read the first and the last with the full
unpickler, which calls whatever a file names. The unpickler here knows only the names that a
checkpoint is made of.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, StorageMeta

from megarl.parallel import mcore  # noqa: F401  before megatron

from megatron.core.dist_checkpointing.strategies import torch as mcore_torch

METADATA = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA, n) for n in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, n) for n in ("BytesStorageMetadata", "ChunkStorageMetadata")),
    *((_METADATA, n) for n in ("TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}


def _memory_format(enum: object, name: str) -> _MEM_FORMAT_ENCODING:
    """Replaces getattr, with which Python 3.11.0 to 3.11.3 pickle the members of an enum."""
    if enum is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("builtins.getattr is allowed for one enum only")
    return _MEM_FORMAT_ENCODING[name]


def _path(*parts: str) -> Path:
    return Path(*parts)


def _layout(name: str) -> torch.layout:
    """Replaces torch's function, whose cache a pickle could set."""
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"{name} is no layout")
    return found


def _set_state(self: object, state: dict[str, Any]) -> None:
    """Sets attributes of an instance as pickle does. Called on a class it raises TypeError."""
    if isinstance(self, Enum):
        raise pickle.UnpicklingError("the members of an enum have no state")
    vars(self).update(state)


# A pickle sets attributes of every class that it names, unless the class has this method.
for _module, _name in _ALLOWED - {("torch", "Size"), ("collections", "OrderedDict")}:
    _class = getattr(importlib.import_module(_module), _name)
    if not hasattr(_class, "__setstate__"):
        _class.__setstate__ = _set_state


# A function stands for a class of Python code, because a pickle can set a class's attributes.
_REPLACED = {
    ("builtins", "getattr"): _memory_format,
    ("torch.serialization", "_get_layout"): _layout,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "Path"): _path,
    ("pathlib._local", "PosixPath"): _path,  # of Python 3.13
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REPLACED:
            return _REPLACED[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _ALLOWED or isinstance(dtype, torch.dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint's metadata")


def read_metadata(path: Path) -> Metadata:
    """Returns the metadata that torch.distributed.checkpoint wrote to directory `path`; raises
    ValueError for anything else."""
    try:
        with (path / METADATA).open("rb") as f:
            metadata = _MetadataUnpickler(f).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    except Exception as e:  # damaged opcodes raise whatever their arguments lead to
        raise ValueError(f"{path}: no readable .metadata ({e}); it is no whole checkpoint") from e
    return metadata


def check_common(path: Path) -> None:
    """Raises ValueError unless common.pt in directory `path` is there and plain data. megatron-core
    reads it by torch.load, where an environment variable can allow more. Without the file 0.19
    reads an object among the tensors, as its own writer leaves it, with no such check."""
    try:
        torch.load(path / "common.pt", map_location="cpu", weights_only=True)
    except FileNotFoundError as e:
        raise ValueError(
            f"{path} holds no common.pt, like checkpoints that megatron-core writes from 0.19 on; "
            "give one that megarl saved, or weights in Hugging Face's format"
        ) from e
    except pickle.UnpicklingError as e:
        lines = [line for line in str(e).splitlines() if "unsupported" in line.lower()]
        why = lines[0] if lines else "it is damaged"
        raise ValueError(f"{path}/common.pt is not read: {why}; load another checkpoint") from e


class _Reader(FileSystemReader):
    _metadata: Metadata | None = None  # megatron-core asks more than once

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            metadata = read_metadata(Path(self.path))
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            self._metadata = metadata
        return self._metadata


class _Planner(mcore_torch.MCoreLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        torch.load(value, map_location="cpu", weights_only=True)  # raises where more is in it
        value.seek(0)
        super().load_bytes(read_item, value)


@contextmanager
def restricted_reading() -> Iterator[None]:
    """Lets megatron-core's loader of torch_dist read by the classes above; it makes its own and
    takes no others. It reads common.pt by torch.load(weights_only=True) itself."""
    with (
        patch.object(mcore_torch, "_get_filesystem_reader", lambda path, **_: _Reader(path)),
        patch.object(mcore_torch, "MCoreLoadPlanner", _Planner),
    ):
        yield
