"""Writes the files around the weights of a Hugging Face model directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

# what a generation config and a model's own classes are made of
OF_MODEL = ("*.py", "generation_config.json")
# what a tokenizer and a chat template are made of
OF_TOKENIZER = (
    "*.model",
    "*.tiktoken",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)


def check_target(target: Path, marker: str = "config.json", what: str = "model") -> None:
    """Raises ValueError if `target` is something that a save must not replace: a file, or anything
    but a `what`, which has a file `marker`."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"cannot save to {target}: a file is there; choose another directory")
    if any(target.iterdir()) and not (target / marker).is_file():
        raise ValueError(
            f"cannot save to {target}: it is not empty and holds no {what} (no {marker}), and "
            "saving would replace it; choose another directory"
        )


def write_sidecars(staging: Path, base_model_path: str | Path | None, tokenizer: Any) -> None:
    """Copies what stands beside the weights in the base model; `tokenizer` replaces its part."""
    if base_model_path is not None:
        for pattern in (*OF_MODEL, *(OF_TOKENIZER if tokenizer is None else ())):
            for source in Path(base_model_path).glob(pattern):
                if source.is_dir():
                    shutil.copytree(source, staging / source.name, dirs_exist_ok=True)
                elif source.is_file():
                    shutil.copyfile(source, staging / source.name)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(staging))


def write_config(staging: Path, raw: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Writes config.json: `raw` with the dtype of the saved weights.

    The key is `dtype` since transformers 5 and `torch_dtype` before; the one in use is kept.
    """
    key = "dtype" if "dtype" in raw else "torch_dtype"
    config = {**raw, key: str(dtype).removeprefix("torch.")}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (staging / "config.json").write_text(text, encoding="utf-8")
