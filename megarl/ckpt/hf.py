"""Loads and saves Hugging Face model directories, sharded over any layout.

Both follow the piece table: loading, every rank reads only its own slices; saving, each file has a
rank that writes it, to which its tensors are gathered bucket by bucket.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.ckpt.safetensors import SafetensorsDir, main_dtype, save_tensors, write_index
from megarl.models.families import family_of
from megarl.models.families.params import EMBEDDING, OUTPUT
from megarl.models.hf_config import TEXT
from megarl.models.params import draw, load_params
from megarl.models.piece_table import HfTensor, PieceTable
from megarl.models.shapes import is_beside
from megarl.observability.logging import get_logger
from megarl.parallel.layout import Layout
from megarl.transfer.gather import Dtypes
from megarl.wire.buckets import Member

log = get_logger(__name__)

BUCKET_BYTES = 256 << 20
MAX_SHARD_BYTES = 5 << 30  # Hugging Face's own default
_EMBEDDING, _HEAD = EMBEDDING.hf[0], OUTPUT.hf[0]
_COMPARED_AT_ONCE = 8 << 20  # numbers
# a generation config, a processor of images or videos, and a model's own classes
_OF_MODEL = ("*.py", "[!.]*/**/*.py", "generation_config.json", "*processor_config.json")
# a tokenizer and its chat templates; Mistral's are tekken.json and tokenizer.model.v3
_OF_TOKENIZER = (
    "*.model",
    "*.model.v*",
    "*.tiktoken",
    "tekken.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "*chat_templates/*.jinja",
)


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
    Raises ValueError, naming file, tensor and fix, if a tensor is missing, has another shape, is
    unknown to the model, or is an output head that differs from the embedding it is tied to. A
    value head that the directory's model does not have (new_head) starts at zero, or at random
    numbers from `head_seed`.
    """
    with SafetensorsDir(path) as files:
        check_tensors(files, table)
        if any(t.name not in files for t in table.tensors):
            start = "zero" if head_seed is None else f"random numbers (seed {head_seed})"
            log.info("%s has no value head: it starts as %s", path, start)

        def read(tensor: HfTensor, box: tuple[slice, ...]) -> Tensor:
            if tensor.name in files:
                return files.read(tensor.name, box)
            if head_seed is None:
                return torch.zeros(tensor.shape)[box]
            return draw(tensor, head_seed, table.model.initializer_range)[box]

        load_params(table, layout.coords(rank), params, read)


def check_tensors(files: SafetensorsDir, table: PieceTable) -> None:
    """Raises ValueError unless the files hold the table's tensors in their shapes, and no others. A
    copy of a tied embedding is read and must equal the embedding.

    transformers saves a language model that it took out of a whole under the whole's names. From
    here on `files` have the table's.
    """
    for wrapper in family_of(table.model).wrappers if table.model.wrapper is None else ():
        if wrapper.name(_EMBEDDING) in files:
            log.info("%s: tensors are named as in %s", files.path, wrapper.architecture)
            files.drop_beside(wrapper)
    files.rename(table.by_name)
    _check_layers(files, table)
    for t in table.tensors:
        if t.name not in files:
            if table.model.new_head and t.name.startswith("score."):
                continue
            hint = "its config.json does not belong to these weights, or files are missing"
            if t.name == table.model.hf_name(_HEAD):
                hint = "set tie_word_embeddings=true in config.json if the model has no output head"
            raise ValueError(f"{files.path}: tensor {t.name} {list(t.shape)} is missing; {hint}")
        if (stored := files.stored(t.name)).shape != t.shape:
            raise ValueError(
                f"{stored.file}: tensor {t.name} has shape {list(stored.shape)}, config.json asks "
                f"for {list(t.shape)}; use the config.json that belongs to these weights"
            )
    if further := [n for n in files.names() if _predicts_further(n, table)]:
        log.info(
            "%s: %d tensors of the layers that predict further tokens (num_nextn_predict_layers) "
            "are left out: neither trained nor saved",
            files.path,
            len(further),
        )
    if beside := [n for n in files.names() if is_beside(n, table.model.wrapper)]:
        log.info(
            "%s: %d tensors beside the language model (%s) are not trained; a saved model has them "
            "where this directory is there to copy them from",
            files.path,
            len(beside),
            ", ".join(sorted({".".join(n.split(".")[:2]) for n in beside})),
        )
    unknown = [n for n in files.names() if n not in table.by_name and not _ignorable(n, table)]
    if unknown:
        raise ValueError(
            f"{files.stored(unknown[0]).file}: {len(unknown)} tensors are not part of a "
            f"{table.model.family} model with this config.json, the first is {unknown[0]}; "
            "use the config.json that belongs to these weights"
        )
    embedding, head = map(table.model.hf_name, (_EMBEDDING, _HEAD))
    if table.model.tie_word_embeddings and head in files:
        _check_tied(files, embedding, head)


def _check_layers(files: SafetensorsDir, table: PieceTable) -> None:
    """Raises ValueError if the files have more or fewer layers than config.json says."""
    m = table.model
    layers = m.hf_name("model.layers.")
    layer = re.compile(re.escape(layers) + r"(\d+)\.")
    numbers = {int(match[1]) for n in files.names() if (match := layer.match(n))}
    numbers -= {i for i in numbers if f"{layers}{i}.eh_proj.weight" in files}  # predicts further
    if numbers and numbers == set(range(len(numbers))) and len(numbers) != m.num_layers:
        raise ValueError(
            f"{files.path}: config.json says num_hidden_layers={m.num_layers}, the weights are of "
            f"{len(numbers)} layers; set it to that, or use the config.json that belongs to them"
        )


def _check_tied(files: SafetensorsDir, embedding: str, head: str) -> None:
    rows, cols = files.stored(embedding).shape
    same = files.stored(head).shape == (rows, cols)
    step = max(1, _COMPARED_AT_ONCE // cols)
    for row in range(0, rows if same else 0, step):
        box = (slice(row, row + step), slice(None))
        rows_read = files.read(embedding, box)
        if not torch.equal(rows_read, files.read(head, box).to(rows_read.dtype)):
            same = False
            break
    if not same:
        raise ValueError(
            f"{files.path}: config.json says tie_word_embeddings=true, but {head} is not the "
            "embedding; set it to false"
        )


def _ignorable(name: str, table: PieceTable) -> bool:
    """Tells whether a tensor in the files is left unread: rotary frequencies, which old checkpoints
    stored and the config determines; the copy of a tied embedding; the language model's head where
    a value model is made; layers that predict further tokens; what is beside the language model."""
    m = table.model
    if (
        name.endswith("rotary_emb.inv_freq")
        or _predicts_further(name, table)
        or is_beside(name, m.wrapper)
    ):
        return True
    return name == m.hf_name(_HEAD) and (m.tie_word_embeddings or m.new_head)


def _predicts_further(name: str, table: PieceTable) -> bool:
    """Tells whether a tensor belongs to multi-token prediction (DeepSeek-V3, 2024, section 2.2),
    whose layers follow the model's last."""
    m = table.model
    layers = range(m.num_layers, m.num_layers + m.mtp_layers)
    return name.startswith(tuple(m.hf_name(f"model.layers.{i}.") for i in layers))


def save_hf(
    path: str | Path,
    table: PieceTable,
    layout: Layout,
    rank: int,
    params: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    dtype: Dtypes | None = None,
    base_model_path: str | Path | None = None,
    tokenizer: Any = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Writes a directory that AutoModelForCausalLM.from_pretrained loads. Collective.

    group:           spans the layout's ranks; None is the default group.
    dtype:           of the files, one for all or each tensor's by HF name; None is that of the
                     parameters. Tensors that a family publishes in fp32 are fp32 in any case.
                     config.json names the dtype that most numbers of the language model have.
    base_model_path: where generation config, processor, tokenizer, chat templates, code and the
                     tensors beside the language model (a vision tower) are copied from; config.json
                     is always the one the model was built from.
    tokenizer:       its save_pretrained() replaces the copied tokenizer files.

    Files are cut by `max_shard_bytes` alone, so their bytes do not depend on the layout (see
    `save_tensors`). A failed save leaves an older model as it was.
    """

    def finish(staging: Path, files: dict[str, list[Member]]) -> None:
        whole = write_beside(staging, table, base_model_path, files)
        if len(whole) > 1:
            write_index(staging, whole)
        write_sidecars(staging, base_model_path, tokenizer)
        trained = chain.from_iterable(files.values())
        write_config(staging, table.model.raw, main_dtype(trained))

    save_tensors(
        path,
        table,
        rank,
        params,
        finish,
        marker="config.json",
        dtype=dtype or next(params[name] for name in params if name not in table.fp32).dtype,
        group=group,
        max_shard_bytes=max_shard_bytes,
        bucket_bytes=bucket_bytes,
    )


def write_beside(
    staging: Path,
    table: PieceTable,
    base_model_path: str | Path | None,
    files: dict[str, list[Member]],
) -> dict[str, list[Member]]:
    """Adds to `files` one with what the base model has beside the language model, and gives all
    the names of so many. Returns the tensors of each file."""
    count = len(files) + 1
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    members = copy_beside(staging / names[-1], table, base_model_path)
    if not members:
        return files
    for old, new in zip(files, names[:-1], strict=True):
        (staging / old).rename(staging / new)
    return dict(zip(names, (*files.values(), members), strict=True))


def copy_beside(
    target: Path, table: PieceTable, base_model_path: str | Path | None
) -> list[Member]:
    """Writes to the file `target` what the base model has beside the language model; returns those
    tensors. Without them there is no file, and a log line where the model is a part of a whole."""
    members: list[Member] = []
    if base_model_path is not None and any(Path(base_model_path).glob("*.safetensors")):
        with SafetensorsDir(base_model_path) as files:
            beside = [n for n in files.names() if is_beside(n, table.model.wrapper)]
            members = files.copy(beside, target)
    if not members and (wrapper := table.model.wrapper):
        log.info(
            "%s has the tensors of %s* and %s* alone: %s has none beside them, such as those of a "
            "vision tower",
            target.parent,
            wrapper.model,
            wrapper.head,
            base_model_path or "no base model",
        )
    return members


def write_sidecars(staging: Path, base_model_path: str | Path | None, tokenizer: Any) -> None:
    """Copies the base model's tokenizer, chat templates, generation config, processor and code.
    `tokenizer` replaces the files of its kind."""
    if base_model_path is not None:
        for pattern in (*_OF_MODEL, *(_OF_TOKENIZER if tokenizer is None else ())):
            for source in filter(Path.is_file, Path(base_model_path).glob(pattern)):
                target = staging / source.relative_to(base_model_path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(staging))


def write_config(staging: Path, raw: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Writes config.json: `raw` with the dtype of the saved weights, also within a text_config.

    The key is `dtype` since transformers 5 and `torch_dtype` before; the one in use is kept.
    """

    def with_dtype(raw: Mapping[str, Any]) -> dict[str, Any]:
        key = "dtype" if "dtype" in raw else "torch_dtype"
        return {**raw, key: str(dtype).removeprefix("torch.")}

    config = with_dtype(raw)
    if isinstance(text := raw.get(TEXT), Mapping):
        config[TEXT] = with_dtype(text)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (staging / "config.json").write_text(text, encoding="utf-8")
