"""GSM8K (arXiv 2110.14168) from the hub or from local files in its format.

A row has `question` and `answer`; the answer is a worked solution that ends in "#### 42".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megarl.config.dataset import DatasetConfig
from megarl.data.problem import Problem, take_options

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# calculator annotations inside solutions: 48/2 = <<48/2=24>>24
_CALCULATOR = re.compile(r"<<[^>]*>>")
_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}


def gsm8k(cfg: DatasetConfig, *, seed: int) -> list[Problem]:
    """In the source's order. options: subset (hub configuration), instruction (appended to the
    question).
    """
    options = take_options(cfg.options, {"subset": "main", "instruction": INSTRUCTION}, of="gsm8k")
    source = _load(cfg, options["subset"])
    if len(source) == 0:  # a file without rows may come without columns
        return []
    if missing := {"question", "answer"} - set(source.column_names):
        raise ValueError(f"gsm8k: {cfg.path} lacks the columns {sorted(missing)}")
    if cfg.size is not None:
        source = source.select(range(min(cfg.size, len(source))))
    return [_problem(i, row, cfg.path, options["instruction"]) for i, row in enumerate(source)]


def _problem(index: int, row: dict[str, Any], path: str, instruction: str) -> Problem:
    solution, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"gsm8k: {path} row {index}: the answer has no '####'")
    number = answer.strip().replace(",", "")
    return Problem(
        question=row["question"] + instruction,
        answer=number,
        task="gsm8k",
        response=f"{_CALCULATOR.sub('', solution).strip()}\n\\boxed{{{number}}}",
    )


def _load(cfg: DatasetConfig, subset: str) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    path = Path(cfg.path)
    if not cfg.path:
        raise ValueError("gsm8k: set path to a hub name (openai/gsm8k), a file or a directory")
    if not path.exists():
        if path.suffix in _FORMATS or path.is_absolute():
            raise ValueError(f"gsm8k: {path} does not exist")
        return load_dataset(cfg.path, subset, split=cfg.split)
    files = [path] if path.is_file() else _split_files(path, cfg.split)
    kind = _FORMATS.get(files[0].suffix)
    if kind is None:
        raise ValueError(f"gsm8k: {files[0]}: use one of {sorted(_FORMATS)}")
    if not any(f.stat().st_size for f in files):
        raise ValueError(f"gsm8k: {cfg.path}, split {cfg.split}: the file is empty (0 rows)")
    try:
        return load_dataset(kind, data_files=[str(f) for f in files], split="train")
    except (ValueError, DatasetGenerationError) as e:
        raise ValueError(f"gsm8k: {cfg.path}, split {cfg.split}: unreadable, or 0 rows: {e}") from e


def _split_files(folder: Path, split: str) -> list[Path]:
    """<split>*.parquet (or .jsonl, .json), in the folder or in its `main` as the hub has it."""
    for place in (folder, folder / "main"):
        for suffix in _FORMATS:
            if files := sorted(place.glob(f"{split}*{suffix}")):
                return files
    raise ValueError(f"gsm8k: {folder} has no {split}*.parquet, .jsonl or .json")
