"""The files around the weights of a Hugging Face model directory, and putting it in place whole."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# what a tokenizer, a chat template and a generation config are made of
SIDECARS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)


def check_target(target: Path) -> None:
    """ValueError if `target` is something a save must not replace."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"cannot save to {target}: a file is there; choose another directory")
    if any(target.iterdir()) and not (target / "config.json").is_file():
        raise ValueError(
            f"cannot save to {target}: it is not empty and holds no model (no config.json), and "
            "saving would replace it; choose another directory"
        )


@contextmanager
def staged_directory(target: Path) -> Iterator[Path]:
    """A new directory beside `target`; on success it is synced to disk and takes its place.

    A directory cannot be replaced by one rename, so an old one steps aside first: a crash between
    the two renames leaves it whole as `.NAME.old-*`. On failure the staging directory is removed.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    tag = uuid.uuid4().hex[:8]
    staging = target.with_name(f".{target.name}.tmp-{tag}")
    old = target.with_name(f".{target.name}.old-{tag}")
    staging.mkdir()
    try:
        yield staging
        _sync_tree(staging)
        if target.exists():
            target.rename(old)
        staging.rename(target)
        _sync(target.parent)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(staging, ignore_errors=True)
        raise
    if old.exists():
        shutil.rmtree(old)


def _sync_tree(directory: Path) -> None:
    for file in directory.rglob("*"):
        _sync(file)
    _sync(directory)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_sidecars(staging: Path, base_model_path: str | Path | None, tokenizer: Any) -> None:
    """Copies what stands beside the weights in the base model; `tokenizer` replaces its part."""
    if base_model_path is not None:
        for name in SIDECARS:
            source = Path(base_model_path) / name
            if source.is_dir():
                shutil.copytree(source, staging / name)
            elif source.is_file():
                shutil.copyfile(source, staging / name)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(staging))


def write_config(staging: Path, raw: Mapping[str, Any], dtype: torch.dtype) -> None:
    """config.json: `raw` with the dtype of the saved weights.

    The key is `dtype` since transformers 5 and `torch_dtype` before; the one in use is kept.
    """
    key = "dtype" if "dtype" in raw else "torch_dtype"
    config = {**raw, key: str(dtype).removeprefix("torch.")}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (staging / "config.json").write_text(text, encoding="utf-8")
