"""Reads weights on disk by their Hugging Face names, from either kind of directory.

On one rank every fused parameter is a permutation of rows of its HF tensors, and the tensors of a
dist checkpoint are the parameters of one rank. So the piece table of `Layout()` says for every row
of one side which row of the other it is; nothing else is known about names or shapes here.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex

from megarl.ckpt.convert_files import (
    Block,
    matrix,
    read_rows,
    safetensors_blocks,
    stored_block,
)
from megarl.ckpt.dist import describe_model
from megarl.ckpt.files import MARKER, check_contents, read_info
from megarl.ckpt.hf import check_tensors
from megarl.ckpt.restricted import read_metadata
from megarl.ckpt.safetensors import SafetensorsDir
from megarl.models.hf_config import ModelConfig, parse_hf_config, read_hf_config
from megarl.models.names import checkpoint_keys
from megarl.models.piece_table import LocalParam, PieceTable, build_piece_table
from megarl.models.value_model import SEQUENCE, TOKEN, language_model, value_model
from megarl.parallel.layout import Layout

HF, DIST = "hf", "dist"
COMPANIONS = "hf"  # folder of a dist checkpoint: tokenizer, chat template, generation config


@dataclass(frozen=True, slots=True)
class Run:
    """Says that rows [row, row + rows) of `param` are rows [hf_row, hf_row + rows) of the HF tensor
    `name`."""

    name: str
    hf_row: int
    param: str
    row: int
    rows: int


def row_runs(table: PieceTable) -> list[Run]:
    """Returns every row of every HF tensor, in HF order, of the table of one rank."""
    assert table.layout.world_size == 1
    runs = []
    for t in table.tensors:
        _, width = matrix(t.shape)
        for piece in t.pieces:
            hf_row = piece.start[0]
            for start, stop in piece.view.runs():
                row, rows = start // width, (stop - start) // width
                runs.append(Run(t.name, hf_row, piece.param, row, rows))
                hf_row += rows
    return runs


def runs_by(table: PieceTable, key: Callable[[Run], str]) -> dict[str, list[Run]]:
    """Groups the runs of `row_runs`, in their order."""
    groups: dict[str, list[Run]] = {}
    for run in row_runs(table):
        groups.setdefault(key(run), []).append(run)
    return groups


class Source(ABC):
    """Gives the weights in a directory by their HF names; threads may share it.

    `dtypes` are those of the HF tensors as they are stored, by name; `companions` is the directory
    that has the tokenizer.
    """

    kind: str
    companions: Path

    def __init__(self, path: Path, model: ModelConfig) -> None:
        self.path, self.model = path, model
        self.table = build_piece_table(model, Layout())
        self.dtypes: dict[str, torch.dtype] = {}
        self.info: Mapping[str, Any] = {}

    @abstractmethod
    def read(self, name: str, row: int, out: Tensor) -> None:
        """Reads rows [row, row + n) of the HF tensor `name` into `out` [n, columns], cast to its
        dtype."""

    def fingerprint(self) -> dict[str, list[int]]:
        """Returns size and time (ns) of every file; they stay the same while the directory does."""
        files = sorted(f for f in self.path.rglob("*") if f.is_file())
        return {
            f.relative_to(self.path).as_posix(): [f.stat().st_size, f.stat().st_mtime_ns]
            for f in files
        }


class HfSource(Source):
    """Reads a Hugging Face model directory; a token or sequence classifier is a value model. Raises
    ValueError if it is not whole or does not fit its config."""

    kind = HF

    def __init__(self, path: Path) -> None:
        super().__init__(path, read_hf_config(path, head=_head(path)))
        self.companions = path
        with SafetensorsDir(path) as files:
            check_tensors(files, self.table)
            found = {files.file_of(n) for n in files.names()}
        stored = {n: b for file in sorted(found) for n, b in safetensors_blocks(file).items()}
        self._blocks = {t.name: stored[t.name] for t in self.table.tensors}
        self.dtypes = {n: b.dtype for n, b in self._blocks.items()}

    def read(self, name: str, row: int, out: Tensor) -> None:
        """Reads rows as `Source.read` says."""
        read_rows((self._blocks[name],), row, out)


def _head(path: Path) -> str:
    """Returns "value" for a classifier, else "lm"; read_hf_config says what a file lacks."""
    try:
        names = json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"]
        return "value" if names[0].endswith((TOKEN, SEQUENCE)) else "lm"
    except (OSError, ValueError, LookupError, TypeError):
        return "lm"


class DistSource(Source):
    """Reads a whole dist checkpoint, of any layout, with or without optimizer state.

    base: the model directory it was trained from, for a checkpoint that does not hold its config.
    Raises ValueError if it is not whole, or is of another model than its config.
    """

    kind = DIST

    def __init__(self, path: Path, base: Path | None = None) -> None:
        info = read_info(path)
        check_contents(path)
        super().__init__(path, _model_of(path, info, base))
        self.info = info
        self.companions = base or path / COMPANIONS
        self._blocks = self._find_blocks()
        self._runs = runs_by(self.table, lambda run: run.name)
        self.dtypes = {n: self._blocks[runs[0].param][0].dtype for n, runs in self._runs.items()}

    def read(self, name: str, row: int, out: Tensor) -> None:
        """Reads rows as `Source.read` says, put together from the parts that ranks wrote."""
        for run in self._runs[name]:
            low, high = max(row, run.hf_row), min(row + len(out), run.hf_row + run.rows)
            if low < high:
                start = run.row + low - run.hf_row
                read_rows(self._blocks[run.param], start, out[low - row : high - row])

    def _find_blocks(self) -> dict[str, list[Block]]:
        """Returns for each parameter where its rows are. Raises ValueError if the checkpoint holds
        tensors of other names or shapes than the model's."""
        metadata: Any = read_metadata(self.path)
        reader = FileSystemReader(self.path)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        stored = metadata.state_dict_metadata
        wanted = {p.name: checkpoint_keys(p.name) for p in self.table.params}
        self._check_keys(metadata, {k for keys, _ in wanted.values() for k in keys})
        chunks: dict[str, dict[tuple[int, ...], list[Any]]] = {}  # by key, then by leading index
        blocks = {}
        for p in self.table.params:
            keys, lead = wanted[p.name]
            key = next((k for k in keys if k in stored), keys[0])
            entry = stored.get(key)
            _check_shape(self.path, key, entry, p, len(lead), self.table)
            if key not in chunks:
                chunks[key] = _group(entry.chunks, len(lead))
            if lead not in chunks[key]:
                raise ValueError(f"{self.path}: {key} has no part {list(lead)}; save it again")
            blocks[p.name] = [_locate(reader, key, entry, c, len(lead)) for c in chunks[key][lead]]
        return blocks

    def _check_keys(self, metadata: Any, known: set[str]) -> None:
        """Raises ValueError if there are weights that the model does not have. Optimizer state,
        random states and Transformer Engine's extra state are no weights."""
        rest = [
            k
            for k in metadata.state_dict_metadata
            if not (k in known or k.startswith(("optimizer.", "rng")) or "_extra_state" in k)
        ]
        if rest:
            raise ValueError(
                f"{self.path}: {len(rest)} tensors are not part of a {self.model.family} model "
                f"with this config, the first is {rest[0]}; give the config that belongs to them"
            )


def _group(chunks: Sequence[Any], leading: int) -> dict[tuple[int, ...], list[Any]]:
    """Returns chunks by their index into the leading dimensions, of which each has one."""
    grouped: dict[tuple[int, ...], list[Any]] = {}
    for c in chunks:
        assert all(n == 1 for n in c.sizes[:leading]), c
        grouped.setdefault(tuple(c.offsets[:leading]), []).append(c)
    return grouped


def _locate(reader: FileSystemReader, key: str, entry: Any, chunk: Any, leading: int) -> Block:
    """Finds where the numbers of one chunk of the tensor `key` lie in the checkpoint's files."""
    place = reader.storage_data[MetadataIndex(key, chunk.offsets)]
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"{reader.path}: {key} is compressed, which is not supported")
    block = stored_block(reader, place, entry.properties.dtype, chunk.sizes)
    offsets, sizes = chunk.offsets[leading:], chunk.sizes[leading:]
    rows, cols = matrix(sizes)
    col = offsets[1] if len(sizes) > 1 else 0
    return replace(block, row=offsets[0], rows=rows, col=col, cols=cols)


def _check_shape(
    path: Path, key: str, entry: Any, p: LocalParam, leading: int, table: PieceTable
) -> None:
    """Raises ValueError if a parameter is missing or has another shape. The vocabulary may be
    padded to another size; rows beyond it are not read."""
    found = None if entry is None else tuple(entry.size)[leading:]
    if found == p.shape:
        return
    vocabulary = p.shape[0] == table.padded_vocab_size
    if found and vocabulary and found[1:] == p.shape[1:] and found[0] >= table.model.vocab_size:
        return
    what = "is missing" if found is None else f"has shape {list(found)}"
    raise ValueError(
        f"{path}: tensor {key} {what}, the config asks for {list(p.shape)}; the checkpoint is of "
        "another model than its config"
    )


def _model_of(path: Path, info: Mapping[str, Any], base: Path | None) -> ModelConfig:
    """Returns the model that a checkpoint is of, by its info or by `base`. Raises ValueError where
    neither has a config, where they differ, or for adapters."""
    if info.get("lora"):
        raise ValueError(
            f"{path} holds adapters, without the weights below them: load it into an engine with "
            "its lora, and save that with weight_format='peft', or 'hf' for the merged model"
        )
    head = info["model"].get("head", "lm")
    if base is not None:
        model = read_hf_config(base, head=head, new_bias=info["model"].get("score_bias", True))
        for name, value in describe_model(model)["model"].items():
            if info["model"].get(name) != value:
                raise ValueError(
                    f"{path} is of another model than {base}: {name}={info['model'].get(name)!r} "
                    f"and {value!r}; name the one it was trained from"
                )
        return model
    raw = info.get("hf_config")
    if raw is None:
        raise ValueError(
            f"{path}: its {MARKER} has no config; name the model directory it was trained from "
            "(--base)"
        )
    if head == "value":
        return value_model(parse_hf_config(language_model(raw), MARKER), raw, MARKER)
    return parse_hf_config(raw, str(path / MARKER))


def open_source(path: str | Path, base: Path | None = None) -> Source:
    """Opens the weights in `path`. Raises ValueError, naming the fix, if it holds none or only
    some of them."""
    path = Path(path)
    if (path / ".metadata").exists() or (path / MARKER).exists():
        return DistSource(path, base)
    return HfSource(path)


def main_dtype(dtypes: Mapping[str, torch.dtype], source: Source) -> torch.dtype:
    """Returns the dtype that most numbers have."""
    counts: dict[torch.dtype, int] = {}
    for t in source.table.tensors:
        counts[dtypes[t.name]] = counts.get(dtypes[t.name], 0) + t.numel
    return max(counts, key=lambda d: counts[d])
