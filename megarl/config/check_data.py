"""Checks paths: models, tokenizers, data sets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from megarl.config.dataset import GENERATED, MIX, WITH_REWARD, DatasetConfig, SourceConfig
from megarl.utils.importing import is_import_path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DATA_SUFFIXES = (".parquet", ".jsonl", ".json")
_PLAIN = re.compile(r"\w[\w-]*")
HUB = "hub://"


def name_problems(key: str, names: Iterable[str]) -> Iterator[str]:
    """Yields a line for each name of a data set that cannot be part of a metric's name."""
    for name in names:
        if not _PLAIN.fullmatch(name):
            yield f"{key}.{name}: name data sets in letters, digits, '_' and '-'"


def dataset_problems(key: str, cfg: DatasetConfig) -> Iterator[str]:
    """Yields the problems of a data set for training: its sources, and how rows are drawn."""
    if (cfg.type == MIX) != bool(cfg.parts):
        yield (
            f"{key}.type={cfg.type} with {len(cfg.parts)} {key}.parts: type=mix draws from its "
            "parts, name each there with its type and weight; any other type has none"
        )
    elif cfg.parts:
        yield from _mix_problems(key, cfg)
    else:
        yield from source_problems(key, cfg)
    if cfg.sampler.type and (cfg.parts or cfg.curriculum):
        what = "parts" if cfg.parts else "curriculum"
        yield f"{key}.sampler={cfg.sampler.type}: decides the order alone; leave {key}.{what} out"
    if (c := cfg.curriculum) is not None and c.low > c.high:
        yield f"{key}.curriculum.low={c.low}: above {key}.curriculum.high={c.high}"


def held_out_problems(key: str, cfg: DatasetConfig) -> Iterator[str]:
    """Yields the problems of a data set for validation, which is taken whole."""
    if cfg.type == MIX or cfg.parts:
        yield f"{key}.type=mix: evaluate on each by itself; name them in valid_datasets"
        return
    yield from source_problems(key, cfg)
    if cfg.curriculum is not None:
        yield f"{key}.curriculum: only training draws rows; leave it out"
    if cfg.sampler.type:
        yield f"{key}.sampler={cfg.sampler.type}: held-out rows are all taken; leave it out"


def _mix_problems(key: str, cfg: DatasetConfig) -> Iterator[str]:
    """Yields the problems of a mixture; keys of the whole that its parts have would do nothing."""
    plain = SourceConfig(type=MIX)
    for field in fields(SourceConfig):
        if getattr(cfg, field.name) != getattr(plain, field.name):
            yield f"{key}.{field.name}: with type=mix set it in each of {key}.parts"
    yield from name_problems(f"{key}.parts", cfg.parts)
    for name, part in cfg.parts.items():
        yield from source_problems(f"{key}.parts.{name}", part)


def source_problems(key: str, cfg: SourceConfig) -> Iterator[str]:
    """Yields the problems of the path, the files and the split of a data set."""
    if cfg.path and cfg.files:
        yield f"{key}.files: beside {key}.path={cfg.path}; set one of them"
    for file in cfg.files:
        if not Path(file).is_file():
            yield f"{key}.files: {file}: no such file"
    if cfg.type in GENERATED:
        if where := cfg.path or ", ".join(cfg.files):
            yield (
                f"{key}.path={where}: {key}.type={cfg.type} makes its own problems and reads no "
                f"file; set {key}.type to chat or gsm8k, or leave the path out"
            )
        if cfg.split not in ("train", "test"):
            yield f"{key}.split={cfg.split}: {key}.type={cfg.type} has train and test"
    elif is_import_path(cfg.type) or cfg.files:
        return
    elif not cfg.path:
        yield (
            f"{key}.path is empty: {key}.type={cfg.type} needs a hub name (openai/gsm8k), a path "
            f"or {key}.files"
        )
    elif not Path(cfg.path).exists() and not looks_like_hub_name(cfg.path):
        yield f"{key}.path={cfg.path}: no such file or directory"


def reward_problems(key: str, cfg: SourceConfig) -> Iterator[str]:
    """Yields a line where a data set for RL has no reward."""
    if isinstance(cfg, DatasetConfig) and cfg.parts:
        for name, part in cfg.parts.items():
            yield from reward_problems(f"{key}.parts.{name}", part)
    elif not cfg.reward.type and cfg.type not in WITH_REWARD:
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
    """Returns whether `path` reads as `name` or `owner/name` without a file suffix of ours, with
    hub:// before it or not."""
    path = path.removeprefix(HUB)
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


def template_problems(path: str) -> Iterator[str]:
    """Yields a line where the chat template's file cannot be read."""
    if not path:
        return
    try:
        Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "not UTF-8"
        yield f"tokenizer.chat_template={path}: {why}; name a Jinja file"
