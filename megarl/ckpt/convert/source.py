"""Finds the weights of a directory of either kind, by their Hugging Face names.

On one rank every fused parameter is a permutation of rows of its HF tensors, and the tensors of a
dist checkpoint are the parameters of one rank. So the piece table of `Layout()` says for every row
of one side which row of the other it is; nothing else is known about names or shapes here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import MetadataIndex

from megarl.ckpt.convert.rows import Block, Rows, Run, matrix, moved, torch_block
from megarl.ckpt.files import MARKER, check_contents, read_info
from megarl.ckpt.hf import check_tensors
from megarl.ckpt.peft import CONFIG, base_of
from megarl.ckpt.restricted import read_metadata
from megarl.ckpt.safetensors import DTYPES, SafetensorsDir
from megarl.models.hf_config import (
    SEQUENCE,
    TOKEN,
    ModelConfig,
    language_model,
    parse_hf_config,
    read_hf_config,
    value_model,
)
from megarl.models.params import checkpoint_keys
from megarl.models.piece_table import LocalParam, PieceTable, build_piece_table
from megarl.models.shapes import differing
from megarl.parallel.layout import Layout
from megarl.transfer.gather import export_dtype
from megarl.wire.buckets import Member

HF, DIST = "hf", "dist"
COMPANIONS = "hf"  # folder of a dist checkpoint: tokenizer, chat template, generation config


@dataclass(frozen=True, kw_only=True)
class Source:
    """Describes the weights in a directory of `kind`.

    blocks: where the rows of each HF tensor lie, by name. companions: the directory that has the
    tokenizer. info: of a dist checkpoint.
    """

    kind: str
    path: Path
    table: PieceTable
    blocks: Mapping[str, Sequence[Rows]]
    companions: Path
    info: Mapping[str, Any] = field(default_factory=dict)

    def members(self, dtype: torch.dtype | None = None) -> list[Member]:
        """Returns every HF tensor, to write in `dtype`, or in its stored dtype if that is None.
        Buffers are fp32. With a `dtype`, tensors that a family publishes in fp32 are fp32, too."""
        members = []
        for t in self.table.tensors:
            stored = self.blocks[t.name][0].dtype
            own = dtype is None and not t.buffer
            exported = stored if own else export_dtype(t, dtype or stored)
            members.append(Member(t.name, t.shape, exported, 0, t.numel * exported.itemsize))
        return members


def open_source(path: Path, base: Path | None = None) -> Source:
    """Opens the weights in `path`. Raises ValueError, naming the fix, if it holds none or only
    some of them."""
    path = model_directory(path)
    if (path / ".metadata").exists() or (path / MARKER).exists():
        return open_dist(path, base)
    return open_hf(path)


def models_of_run(path: Path) -> list[Path]:
    """Returns the models of a checkpoint of a run, such as recover/step_000004/actor. Any other
    directory has none."""
    if (path / MARKER).exists() or (path / "config.json").exists():
        return []
    return sorted(marker.parent for marker in path.glob(f"*/{MARKER}"))


def model_directory(path: Path) -> Path:
    """Returns the only model of a checkpoint of a run, and `path` itself if it is no such
    checkpoint. Raises ValueError, naming the models, if there are several."""
    models = models_of_run(path) or [path]
    if len(models) > 1:
        named = ", ".join(map(str, models))
        raise ValueError(f"{path}: a checkpoint of a run with several models; name one of {named}")
    return models[0]


def row_runs(table: PieceTable) -> Iterator[Run]:
    """Yields every row of every HF tensor, in HF order, of the table of one rank: its source is the
    HF tensor, its target the parameter, or a part of one, as in `stored_params`."""
    assert table.layout.world_size == 1
    parts = {p.name: p.parts or (("", p.shape[0]),) for p in table.params}
    params = {p.name: matrix(p.shape) for p in table.params}
    for t in table.tensors:
        _, width = matrix(t.shape)
        for piece in t.pieces:
            hf_row = piece.start[0]
            height, columns = params[piece.param]
            if columns != width:  # a row of all experts' tensor is one expert
                order = piece.view.backwards()
                yield Run(t.name, hf_row, piece.param, 0, piece.stop[0] - hf_row, order, height)
                continue
            for start, stop in piece.view.runs():
                row, rows = start // width, (stop - start) // width
                first = 0  # row of the part
                for part, size in parts[piece.param]:
                    low, high = max(row, first), min(row + rows, first + size)
                    if low < high:
                        target = piece.param + part
                        yield Run(t.name, hf_row + low - row, target, low - first, high - low)
                    first += size
                hf_row += rows


def stored_params(table: PieceTable) -> Iterator[LocalParam]:
    """Yields the parameters of one rank's table as checkpoints keep them: parts of one are tensors
    of their own."""
    for p in table.params:
        for part, rows in p.parts or (("", p.shape[0]),):
            yield replace(p, name=p.name + part, shape=(rows, *p.shape[1:]))


def open_hf(path: Path) -> Source:
    """Opens a Hugging Face model directory; a token or sequence classifier is a value model. Raises
    ValueError if it is an adapter, is not whole or does not fit its config."""
    if (path / CONFIG).is_file() and not (path / "config.json").is_file():
        raise ValueError(
            f"{path}: a PEFT adapter, not a model; convert its base {base_of(path)}, or merge the "
            "two before (merge_and_unload of peft)"
        )
    table = build_piece_table(read_hf_config(path, head=_head(path)), Layout())
    with SafetensorsDir(path) as files:
        check_tensors(files, table)
        blocks = {t.name: [_hf_block(files, t.name)] for t in table.tensors}
    return Source(kind=HF, path=path, table=table, blocks=blocks, companions=path)


def _hf_block(files: SafetensorsDir, name: str) -> Block:
    stored = files.stored(name)
    if stored.dtype not in DTYPES:
        raise ValueError(
            f"{stored.file}: tensor {name} has dtype {stored.dtype}; supported: {', '.join(DTYPES)}"
        )
    rows, cols = matrix(stored.shape)
    return Block(stored.file, stored.offset, DTYPES[stored.dtype], 0, rows, 0, cols)


def _head(path: Path) -> str:
    """Returns "value" for a classifier, else "lm"; read_hf_config says what a file lacks."""
    try:
        names = json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"]
        return "value" if names[0].endswith((TOKEN, SEQUENCE)) else "lm"
    except (OSError, ValueError, LookupError, TypeError):
        return "lm"


def open_dist(path: Path, base: Path | None = None) -> Source:
    """Opens a whole dist checkpoint, of any layout, with or without optimizer state.

    base: the model directory it was trained from, for a checkpoint that does not hold its config.
    Raises ValueError if it is not whole, or is of another model than its config.
    """
    info = read_info(path)
    check_contents(path)
    table = build_piece_table(_model_of(path, info, base), Layout())
    to_hf = (run.reversed() for run in row_runs(table))
    return Source(
        kind=DIST,
        path=path,
        table=table,
        blocks=moved(_param_blocks(path, table), to_hf),
        companions=base or path / COMPANIONS,
        info=info,
    )


def _param_blocks(path: Path, table: PieceTable) -> dict[str, list[Block]]:
    """Returns for each parameter where its rows are, in the parts that ranks wrote. Raises
    ValueError if the checkpoint holds tensors of other names or shapes than the model's."""
    metadata = read_metadata(path)
    stored: Mapping[str, Any] = metadata.state_dict_metadata
    params = list(stored_params(table))
    places = {p.name: checkpoint_keys(p.name) for p in params}
    leading = {key: len(lead) for keys, lead in places.values() for key in keys}
    _check_keys(path, stored, leading, table)
    parts: dict[tuple[str, tuple[int, ...]], list[Any]] = {}  # by key and leading index
    for key, n in leading.items():
        for chunk in stored[key].chunks if key in stored else ():
            assert all(size == 1 for size in chunk.sizes[:n]), chunk
            parts.setdefault((key, tuple(chunk.offsets[:n])), []).append(chunk)
    blocks = {}
    for p in params:
        keys, lead = places[p.name]
        key = next((k for k in keys if k in stored), keys[0])
        _check_shape(path, key, stored.get(key), p, len(lead), table)
        if (key, lead) not in parts:
            raise ValueError(f"{path}: {key} has no part {list(lead)}; save it again")
        blocks[p.name] = [
            _dist_block(path, metadata, key, chunk, len(lead)) for chunk in parts[key, lead]
        ]
    return blocks


def _check_keys(
    path: Path, stored: Mapping[str, Any], known: Mapping[str, int], table: PieceTable
) -> None:
    """Raises ValueError if there are weights that the model does not have. Optimizer state, random
    states and Transformer Engine's extra state are no weights."""
    rest = [
        k
        for k in stored
        if not (k in known or k.startswith(("optimizer.", "rng")) or "_extra_state" in k)
    ]
    if rest:
        raise ValueError(
            f"{path}: {len(rest)} tensors are not part of a {table.model.family} model with this "
            f"config, the first is {rest[0]}; give the config that belongs to them"
        )


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


def _dist_block(path: Path, metadata: Metadata, key: str, chunk: Any, leading: int) -> Block:
    """Finds where the numbers of one chunk of the tensor `key` lie in the checkpoint's files."""
    place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"{path}: {key} is compressed, which is not supported")
    entry: Any = metadata.state_dict_metadata[key]
    block = torch_block(path / place.relative_path, place, entry.properties.dtype, chunk.sizes)
    offsets = (*chunk.offsets[leading:], 0)
    rows, cols = matrix(chunk.sizes[leading:])
    return replace(block, row=offsets[0], rows=rows, col=offsets[1], cols=cols)


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
        own = model.meaning()
        if name := differing(info["model"], own):
            raise ValueError(
                f"{path} is of another model than {base}: {name}={info['model'].get(name)!r} "
                f"and {own.get(name)!r}; name the one it was trained from"
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
