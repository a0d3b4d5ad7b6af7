"""Checks paths: models, tokenizers, data sets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from megarl.config.dataset import GENERATED, WITH_REWARD, DatasetConfig
from megarl.utils.importing import is_import_path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DATA_SUFFIXES = (".parquet", ".jsonl", ".json")


def dataset_problems(key: str, cfg: DatasetConfig) -> Iterator[str]:
    """Yields the problems of the path and the split of a data set."""
    if cfg.type in GENERATED:
        if cfg.path:
            yield (
                f"{key}.path={cfg.path}: {key}.type={cfg.type} makes its own problems and reads no "
                f"file; set {key}.type to chat or gsm8k, or leave the path out"
            )
        if cfg.split not in ("train", "test"):
            yield f"{key}.split={cfg.split}: {key}.type={cfg.type} has train and test"
    elif is_import_path(cfg.type):
        return
    elif not cfg.path:
        yield (
            f"{key}.path is empty: {key}.type={cfg.type} needs a hub name (openai/gsm8k) or a path"
        )
    elif not Path(cfg.path).exists() and not looks_like_hub_name(cfg.path):
        yield f"{key}.path={cfg.path}: no such file or directory"


def reward_problems(key: str, cfg: DatasetConfig) -> Iterator[str]:
    """Yields a line where a data set for RL has no reward."""
    if not cfg.reward.type and cfg.type not in WITH_REWARD:
        yield (
            f"{key}.reward is empty: {key}.type={cfg.type} has none of its own; name "
            "pkg.module:function, or none where a reward model or the workflow judges"
        )


def batching_problems(key: str, cfg: DatasetConfig) -> Iterator[str]:
    """Yields a line where a data set is smaller than a batch and its rest would be dropped."""
    if cfg.size is not None and cfg.drop_last and 0 < cfg.size < cfg.batch_size:
        yield (
            f"{key}.size={cfg.size}: smaller than {key}.batch_size={cfg.batch_size}, so no batch "
            f"is ever full; lower the batch size or set {key}.drop_last=false"
        )


def looks_like_hub_name(path: str) -> bool:
    """Returns whether `path` reads as `name` or `owner/name` without a file suffix of ours."""
    return bool(_HUB_NAME.fullmatch(path)) and not path.endswith(_DATA_SUFFIXES)


def model_path_problems(key: str, path: str, *, weights: bool) -> Iterator[str]:
    """Yields the problems of a local HF directory; `weights`: safetensors must be there."""
    folder = Path(path)
    if not path:
        yield f"{key} is empty: set it to a HF model directory"
    elif not folder.is_dir():
        hub = looks_like_hub_name(path) and "/" in path
        fix = f"; download it first: hf download {path} --local-dir DIR" if hub else ""
        yield f"{key}={path}: no such directory{fix}"
    elif not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        yield (
            f"{key}={path}: holds a PEFT adapter, not a model; name the model it was trained on "
            f"here, and the adapter in {key.removesuffix('path')}lora.adapter_path"
        )
    elif not (folder / "config.json").is_file():
        yield f"{key}={path}: has no config.json, so it is not a HF model directory"
    elif weights and not any(folder.glob("*.safetensors")):
        yield (
            f"{key}={path}: has no *.safetensors; convert the weights, or set "
            f"{key.removesuffix('path')}init_from_scratch=true"
        )


def tokenizer_problems(path: str) -> Iterator[str]:
    """Yields a line where `path` is neither empty, a directory nor a hub name."""
    if path and not Path(path).is_dir() and not looks_like_hub_name(path):
        yield f"tokenizer_path={path}: no such directory"
