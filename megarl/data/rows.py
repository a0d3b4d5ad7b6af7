"""Reads rows of local files or of the hub, each with the place a message can name: file and line,
or file and row. A Problem is what loaders of question and answer make of theirs. Shares says from
which of several sources the next row comes."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from megarl.config.check_parts import HUB
from megarl.config.dataset import SourceConfig

Row = dict[str, Any]
FORMATS = (".parquet", ".jsonl", ".json", ".csv")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Holds a question and its answer.

    `answer` is what the reward compares with; `response` is what SFT learns to write (default: the
    answer); `wrong` is an answer to be rejected, None where its source makes none; `extra` goes
    into the RL row as it is and must survive JSON."""

    question: str
    answer: str
    task: str
    response: str | None = None
    wrong: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def row(self, purpose: str) -> Row:
        """Returns the row that a loader of conversations would give: for "rl" with answer, task
        and extra, for "sft" with the response, for "pairs" with the answer and the wrong one."""
        messages = [{"role": "user", "content": self.question}]
        if purpose == "pairs" and self.wrong is not None:
            sides = {"chosen": self.answer, "rejected": self.wrong}
            answers = {k: [{"role": "assistant", "content": text}] for k, text in sides.items()}
            return {"messages": messages, **answers}
        if purpose == "sft":
            text = self.answer if self.response is None else self.response
            return {"messages": messages, "response": text}
        return {"messages": messages, "answer": self.answer, "task": self.task, **self.extra}


def stable_hash(text: str) -> int:
    """Returns 64 bits that depend on the text only: the same in every process and run."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def read_dataset(
    cfg: SourceConfig, subset: str | None, revision: str | None = None
) -> Iterator[tuple[str, Row]]:
    """Yields (place, row) of every row of `cfg.files` in their order, or of `cfg.path`: a file, a
    directory with files of the split, or a data set of the hub with its configuration `subset` at
    `revision`. Raises ValueError for none of these.
    """
    path = Path(cfg.path)
    if cfg.files:
        for name in cfg.files:
            yield from read_rows(Path(name))
    elif not cfg.path:
        raise ValueError("set path to a hub name (openai/gsm8k), a file or a directory")
    elif cfg.path.startswith(HUB):
        yield from _hub_rows(cfg, subset, revision)
    elif path.exists():
        for file in [path] if path.is_file() else _split_files(path, cfg.split):
            yield from read_rows(file)
    elif path.suffix in FORMATS or path.is_absolute():
        raise ValueError(f"{path} does not exist")
    else:
        yield from _hub_rows(cfg, subset, revision)


def _hub_rows(
    cfg: SourceConfig, subset: str | None, revision: str | None
) -> Iterator[tuple[str, Row]]:
    """Yields the rows that the library `datasets` finds: on the hub, or in its cache."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    name = cfg.path.removeprefix(HUB)
    try:
        source = load_dataset(name, subset, split=cfg.split, revision=revision)
    except (OSError, ValueError, DatasetsError) as e:
        words = {"": subset, "split ": cfg.split, "revision ": revision}
        which = ", ".join(f"{word}{value}" for word, value in words.items() if value)
        raise ValueError(
            f"{name} ({which}) is neither a file nor to be had from the hub: "
            f"{' '.join(str(e).split())}; look at name, subset, split and revision, or download it "
            "where the hub can be reached and name the files"
        ) from e
    for i, row in enumerate(source):
        yield f"{name} row {i}", without_nulls(row)


def _split_files(folder: Path, split: str) -> list[Path]:
    """Returns the files <split>*.parquet (or another of FORMATS) of the folder, or of its `main` as
    the hub has it. Raises ValueError where there are none."""
    for place in (folder, folder / "main"):
        for suffix in FORMATS:
            if files := sorted(place.glob(f"{split}*{suffix}")):
                return files
    raise ValueError(f"{folder} has no {split}*.parquet, .jsonl, .json or .csv")


def read_rows(file: Path) -> Iterator[tuple[str, Row]]:
    """Yields (place, row) of every row. Raises ValueError naming the place that cannot be read."""
    if file.suffix not in FORMATS:
        raise ValueError(f"{file}: use one of {sorted(FORMATS)}")
    try:
        yield from {".parquet": _parquet, ".csv": _csv}.get(file.suffix, _json)(file)
    except OSError as e:
        raise ValueError(f"{file} cannot be read: {e.strerror or e}") from e


def _json(file: Path) -> Iterator[tuple[str, Row]]:
    """Yields the rows of a file with one object a line, or (.json) one list of objects."""
    if file.suffix == ".json":
        data = file.read_bytes()
        if data.lstrip()[:1] == b"[":
            for i, row in enumerate(_parse(data, str(file))):
                yield f"{file} row {i}", _object(row, f"{file} row {i}")
            return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                place = f"{file} line {number}"
                yield place, _object(_parse(line, place), place)


def _parse(data: bytes, place: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise ValueError(
            f"{place}: not UTF-8 (byte {e.start + 1} is 0x{data[e.start]:02x}); convert the file "
            "with iconv -t UTF-8"
        ) from e
    except json.JSONDecodeError as e:
        where = f"line {e.lineno}, " if e.lineno > 1 else ""
        raise ValueError(f"{place}: not valid JSON: {e.msg} ({where}column {e.colno})") from e
    except (ValueError, RecursionError) as e:  # a number of thousands of digits, or deep nesting
        raise ValueError(f"{place}: not valid JSON: {e}") from e


def _object(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{place}: {shown(row)} is not an object of names and values")
    return row


def _parquet(file: Path) -> Iterator[tuple[str, Row]]:
    import pyarrow.parquet
    from pyarrow.lib import ArrowException

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                yield f"{file} row {number}", without_nulls(row)
                number += 1
    except (ArrowException, UnicodeDecodeError) as e:
        raise ValueError(f"{file}: unreadable: {' '.join(str(e).split())}") from e


def _csv(file: Path) -> Iterator[tuple[str, Row]]:
    """Yields the rows of a file whose first line names the columns. An empty cell is null."""
    csv.field_size_limit(1 << 30)  # characters; the library's own limit is below a long chat
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            for row in (reader := csv.DictReader(lines, strict=True)):
                place = f"{file} line {reader.line_num}"
                if None in row or None in row.values():
                    raise ValueError(f"{place}: not one cell for each of {reader.fieldnames}")
                yield place, {name: cell or None for name, cell in row.items()}
    except (csv.Error, UnicodeDecodeError) as e:
        raise ValueError(f"{file}: not a CSV file in UTF-8: {e}") from e


def without_nulls(value: Any, *, listed: bool = False) -> Any:
    """Returns a row without the null fields of objects in lists: parquet and `datasets` give each
    object of a list the fields of all. listed: whether the value is in a list."""
    if isinstance(value, list):
        return [without_nulls(v, listed=True) for v in value]
    if not isinstance(value, dict):
        return value
    kept = {k: v for k, v in value.items() if not (listed and v is None)}
    return {k: without_nulls(v, listed=listed) for k, v in kept.items()}


def check_characters(value: Any, name: str, place: str) -> None:
    """Raises ValueError if a text in `value` has half of a surrogate pair, which is not UTF-8."""
    whole = json.dumps(value, ensure_ascii=False, default=str)
    try:
        whole.encode()
    except UnicodeEncodeError as e:
        half = f"\\u{ord(whole[e.start]):04x}"
        raise ValueError(f"{place}: the {name} holds half a character ({half})") from e


def text(row: Row, name: str, place: str) -> str:
    """Returns the text in `row[name]`. Raises ValueError for null, a number or anything else."""
    value = row[name]
    if isinstance(value, str):
        check_characters(value, name, place)
        return value
    what = "null" if value is None else f"{shown(value)}, not text"
    fix = "" if value is None else f'; write "{name}": "..."'
    raise ValueError(f"{place}: the {name} is {what}{fix or '; fill it in, or leave the row out'}")


def shown(value: Any) -> str:
    """Returns a value as JSON has it, cut to 60 characters."""
    out = json.dumps(value, ensure_ascii=False, default=str)
    return out if len(out) <= 60 else out[:57] + "..."


class Shares:
    """Says, draw after draw, from which source to draw next.

    After any number of draws n, source i had floor(n * share_i) of them or one more: the quota
    method of M. Balinski and H. Young (American Mathematical Monthly 82, 1975). `counts`, how many
    draws each source had, are all of its state.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Takes the weights of the sources, all above 0; a share is a weight over their sum."""
        exact = {name: Fraction(weight) for name, weight in weights.items()}
        self._shares = {name: weight / sum(exact.values()) for name, weight in exact.items()}
        self.counts = dict.fromkeys(exact, 0)

    def next(self) -> str:
        """Returns the source of the next draw, which is counted as made."""
        n = sum(self.counts.values()) + 1
        # a source is owed a draw while it has fewer than its share of n; of these, the one whose
        # share is the largest for what it would have
        owed = [name for name, share in self._shares.items() if self.counts[name] < share * n]
        source = max(owed, key=lambda name: self._shares[name] / (self.counts[name] + 1))
        self.counts[source] += 1
        return source
