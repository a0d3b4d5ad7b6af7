"""GSM8K (arXiv 2110.14168) from the hub or from local files in its format.

A row has `question` and `answer`; the answer is a worked solution that ends in "#### 42".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from megarl.config.dataset import DatasetConfig
from megarl.data.files import FORMATS, Row, read_rows, text
from megarl.data.problem import Problem, take_options

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# calculator annotations inside solutions: 48/2 = <<48/2=24>>24
_CALCULATOR = re.compile(r"<<[^>]*>>")


def gsm8k(cfg: DatasetConfig, *, seed: int) -> list[Problem]:
    """In the source's order. options: subset (hub configuration), instruction (appended to the
    question). Raises ValueError naming the file and the line or row that is wrong.
    """
    options = take_options(cfg.options, {"subset": "main", "instruction": INSTRUCTION}, of="gsm8k")
    try:
        problems = [
            _problem(place, row, options["instruction"])
            for place, row in islice(_rows(cfg, options["subset"]), cfg.size)
        ]
    except ValueError as e:
        raise ValueError(f"gsm8k: {e}") from e
    if cfg.size is not None and 0 < len(problems) < cfg.size:
        raise ValueError(
            f"gsm8k: size={cfg.size}, but {cfg.path}, split {cfg.split}, has {len(problems)} rows; "
            "lower size, or leave it null for all"
        )
    return problems


def _problem(place: str, row: Row, instruction: str) -> Problem:
    if missing := {"question", "answer"} - set(row):
        raise ValueError(f"{place} lacks the columns {sorted(missing)}; it has {sorted(row)}")
    question, whole = text(row, "question", place), text(row, "answer", place)
    solution, mark, answer = whole.rpartition("####")
    if not mark:
        raise ValueError(f"{place}: the answer has no '####'; write it before the final answer")
    number = answer.strip().replace(",", "")
    if not number:
        raise ValueError(f"{place}: nothing follows the answer's '####'")
    return Problem(
        question=question + instruction,
        answer=number,
        task="gsm8k",
        response=f"{_CALCULATOR.sub('', solution).strip()}\n\\boxed{{{number}}}",
    )


def _rows(cfg: DatasetConfig, subset: str) -> Iterator[tuple[str, Row]]:
    """(place, row) of every row, of the hub's data set or of the files."""
    path = Path(cfg.path)
    if not cfg.path:
        raise ValueError("set path to a hub name (openai/gsm8k), a file or a directory")
    if path.exists():
        for file in [path] if path.is_file() else _split_files(path, cfg.split):
            yield from read_rows(file)
    elif path.suffix in FORMATS or path.is_absolute():
        raise ValueError(f"{path} does not exist")
    else:
        yield from _hub_rows(cfg, subset)


def _hub_rows(cfg: DatasetConfig, subset: str) -> Iterator[tuple[str, Row]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        source = load_dataset(cfg.path, subset, split=cfg.split)
    except (OSError, ValueError, DatasetsError) as e:
        raise ValueError(
            f"{cfg.path} ({subset}, split {cfg.split}) is neither a file nor to be had from the "
            f"hub: {' '.join(str(e).split())}"
        ) from e
    for i, row in enumerate(source):
        yield f"{cfg.path} row {i}", row


def _split_files(folder: Path, split: str) -> list[Path]:
    """<split>*.parquet (or .jsonl, .json), in the folder or in its `main` as the hub has it."""
    for place in (folder, folder / "main"):
        for suffix in FORMATS:
            if files := sorted(place.glob(f"{split}*{suffix}")):
                return files
    raise ValueError(f"{folder} has no {split}*.parquet, .jsonl or .json")
