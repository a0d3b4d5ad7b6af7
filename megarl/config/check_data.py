"""Checks paths: models, tokenizers, data sets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from megarl.config.dataset import GENERATED, MIX, WITH_REWARD, DatasetConfig, SourceConfig
from megarl.config.recipes import BaseConfig, held_out_key, held_out_sets
from megarl.config.rules import DATASET, HELD_OUT, SOURCE, rule_problems
from megarl.utils.importing import is_import_path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DATA_SUFFIXES = (".parquet", ".jsonl", ".json")
_PLAIN = re.compile(r"\w[\w-]*")
HUB = "hub://"


def data_problems(cfg: BaseConfig) -> Iterator[str]:
    """Yields the problems of a recipe's data sets and of its tokenizer."""
    yield from _training_problems("train_dataset", cfg.train_dataset)
    yield from _name_problems("valid_datasets", cfg.valid_datasets)
    for name, data in held_out_sets(cfg).items():
        key = held_out_key(name)
        yield from rule_problems(HELD_OUT, data, f"{key}.")
        yield from _source_problems(key, data) if data.type != MIX else ()
    path = cfg.tokenizer_path
    if path and not Path(path).is_dir() and not looks_like_hub_name(path):
        yield f"tokenizer_path={path}: no such directory"
    if template := cfg.tokenizer.chat_template:
        try:
            Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "not UTF-8"
            yield f"tokenizer.chat_template={template}: {why}; name a Jinja file"


def _name_problems(key: str, names: Iterable[str]) -> Iterator[str]:
    """Yields a line for each name of a data set that cannot be part of a metric's name."""
    for name in names:
        if not _PLAIN.fullmatch(name):
            yield f"{key}.{name}: name data sets in letters, digits, '_' and '-'"


def _training_problems(key: str, cfg: DatasetConfig) -> Iterator[str]:
    yield from rule_problems(DATASET, cfg, f"{key}.")
    if (cfg.type == MIX) != bool(cfg.parts):
        yield (
            f"{key}.type={cfg.type} with {len(cfg.parts)} {key}.parts: type=mix draws from its "
            "parts, name each there with its type and weight; any other type has none"
        )
    elif not cfg.parts:
        yield from _source_problems(key, cfg)
    else:
        yield from _name_problems(f"{key}.parts", cfg.parts)
        plain = SourceConfig(type=MIX)
        for field in fields(SourceConfig):  # keys of the whole would do nothing
            if getattr(cfg, field.name) != getattr(plain, field.name):
                yield f"{key}.{field.name}: with type=mix set it in each of {key}.parts"
        for name, part in cfg.parts.items():
            yield from _source_problems(f"{key}.parts.{name}", part)


def _source_problems(key: str, cfg: SourceConfig) -> Iterator[str]:
    """Yields the problems of the path, the files and the split of a data set."""
    yield from rule_problems(SOURCE, cfg, f"{key}.")
    for file in cfg.files:
        if not Path(file).is_file():
            yield f"{key}.files: {file}: no such file"
    if cfg.type in GENERATED or is_import_path(cfg.type) or cfg.files:
        return
    if not cfg.path:
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
