"""Metadata of checkpoints from each Python is read, and a hostile pickle gets nothing more."""

from __future__ import annotations

import functools
import io
import json
import operator
import pickle
import subprocess
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from megarl.ckpt.convert import dist2hf
from megarl.ckpt.restricted import read_metadata
from tests.hostile import Hostile

DATA = Path(__file__).parents[1] / "data"


class Call:
    """Unpickles as function(*arguments)."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


def write(path: Path, content: Any) -> Path:
    """Writes a .metadata that holds `content` in the place of a tensor's description."""
    held = Metadata({"t": content}, storage_data={}, storage_meta=StorageMeta())
    (path / ".metadata").write_bytes(pickle.dumps(held))
    return path


@pytest.mark.parametrize("writer", ["python3.11.2", "python3.13"])
def test_a_checkpoint_of_each_python_is_converted(tmp_path: Path, writer: str) -> None:
    expected = json.loads((DATA / writer / "expected.json").read_text())["digests"]
    dist2hf(DATA / writer / "ckpt", tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert len(found) == 20
    for name, tensor in found.items():
        assert sha256(tensor.view(torch.uint8).numpy()).hexdigest() == expected[name], name


@pytest.mark.parametrize("member", _MEM_FORMAT_ENCODING)
def test_an_enum_pickled_by_name_or_value_is_the_member(tmp_path: Path, member: Any) -> None:
    for written in (
        Call(getattr, _MEM_FORMAT_ENCODING, member.name),  # Python 3.11.0 to 3.11.3
        Call(_MEM_FORMAT_ENCODING, member.value),
    ):
        assert read_metadata(write(tmp_path, written)).state_dict_metadata["t"] is member


def test_paths_of_python_3_13_are_paths(tmp_path: Path) -> None:
    text = pickle.dumps(Metadata({}, storage_meta=StorageMeta(Path("/a/b"))), protocol=3)
    (tmp_path / ".metadata").write_bytes(
        text.replace(b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n")
    )
    meta = read_metadata(tmp_path).storage_meta
    assert meta is not None and meta.checkpoint_id == Path("/a/b")


GETATTR: list[Any] = [
    Call(getattr, _MEM_FORMAT_ENCODING, "__class__"),
    Call(getattr, _MEM_FORMAT_ENCODING, "mro"),
    Call(getattr, _MEM_FORMAT_ENCODING, "_member_map_"),
    Call(getattr, _MEM_FORMAT_ENCODING, "none", 1),
    Call(getattr, _MEM_FORMAT_ENCODING, ["name"]),
    Call(getattr, Call(getattr, _MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"), "__class__"),
    Call(getattr, Call(_MEM_FORMAT_ENCODING, 0), "name"),
    Call(getattr, Metadata, "__init__"),
    Call(getattr, TensorProperties, "__setstate__"),
    Call(getattr, OrderedDict, "fromkeys"),
    Call(getattr, Path("x"), "write_text"),
    Call(getattr, "x", "format"),
    Call(getattr, getattr, "__self__"),
    Call(getattr, torch.Size, "__subclasses__"),
    Call(functools.partial, getattr, _MEM_FORMAT_ENCODING),
    Call(operator.attrgetter("__class__"), _MEM_FORMAT_ENCODING),
    Call(operator.methodcaller("mro"), _MEM_FORMAT_ENCODING),
    Call(setattr, _MEM_FORMAT_ENCODING, "x", 1),
    Call(vars, _MEM_FORMAT_ENCODING),
    Call(eval, "1"),
    Path.write_text,
    subprocess.Popen,
]  # fmt: skip


@pytest.mark.parametrize("content", GETATTR, ids=range(len(GETATTR)))
def test_getattr_gives_nothing_else(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ValueError, match=r"no readable \.metadata"):
        read_metadata(write(tmp_path, content))


def test_getattr_does_not_reach_a_hostile_call(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for content in (
        Call(getattr, _MEM_FORMAT_ENCODING, Hostile(ran)),
        Call(getattr, Hostile(ran), "TORCH_CHANNELS_LAST"),
    ):
        with pytest.raises(ValueError, match="mkdir is not allowed"):
            read_metadata(write(tmp_path, content))
    assert not ran.exists()


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_a_pickle_sets_no_attribute_of_paths(tmp_path: Path, module: str) -> None:
    out = io.BytesIO()
    state = pickle.dumps((None, {"_str": "/elsewhere"}), protocol=2)[2:-1]
    out.write(pickle.PROTO + b"\x02" + f"c{module}\nPosixPath\n".encode() + state)
    out.write(pickle.BUILD + pickle.STOP)
    (tmp_path / ".metadata").write_bytes(out.getvalue())
    before = str(tmp_path)
    with pytest.raises(ValueError, match=r"no readable \.metadata"):
        read_metadata(tmp_path)
    assert str(tmp_path) == before and str(Path("here")) == "here"


CLASSES = (Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata)
NAMED: dict[str, Any] = {
    **{c.__name__: c for c in (*CLASSES, BytesStorageMetadata, ChunkStorageMetadata, _StorageInfo)},
    "enum": _MEM_FORMAT_ENCODING,
    "Size": torch.Size,
    "OrderedDict": OrderedDict,
    "layout": _get_layout,
    "member": Call(_MEM_FORMAT_ENCODING, 0),
}


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("slots", [False, True])
def test_a_pickle_sets_nothing_that_outlives_it(tmp_path: Path, named: str, slots: bool) -> None:
    state = (None, {"cache": "x"}) if slots else {"cache": "x"}
    parts = [pickle.dumps(part, protocol=2)[2:-1] for part in (NAMED[named], state)]
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + b"".join(parts) + pickle.BUILD + b".")
    with pytest.raises(ValueError, match=r"no readable \.metadata"):
        read_metadata(tmp_path)
    held = _MEM_FORMAT_ENCODING(0) if named == "member" else NAMED[named]
    assert getattr(held, "cache", None) != "x"
