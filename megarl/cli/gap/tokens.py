"""Chooses the tokens to compare on: a file's, a recorded episode's, or those of a built-in text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config.errors import ConfigError
from megarl.observability.episodes import GROUP, read_bytes, read_index, unpack

MOST = 4  # samples of an episode or a file
LEAST_ANSWER = 16  # tokens of an answer that stay behind a long prompt
# everyday words, digits, code, another alphabet: no model finds all of them likely
TEXT = """A train leaves the station at 9:40 and needs 2 hours and 35 minutes. When does it arrive?
Let us add the minutes first: 40 + 35 = 75, which is 1 hour and 15 minutes. So the hours are
9 + 2 + 1 = 12, and the train arrives at 12:15. To check it in Python:

    from datetime import datetime, timedelta
    start = datetime(2024, 5, 17, hour=9, minute=40)
    print((start + timedelta(hours=2, minutes=35)).strftime("%H:%M"))

In Greek letters: if Δt = 155 min and t₀ = 580 min, then t₁ = t₀ + Δt = 735 min. However, trains
are late more often than equations admit, and nobody was surprised when it came at a quarter to one.
"""


@dataclass(frozen=True)
class Sample:
    """Holds tokens to compare on; the policy wrote those from position `prompt` on."""

    ids: list[int]
    prompt: int

    def __post_init__(self) -> None:
        if not 0 < self.prompt < len(self.ids):
            raise ValueError(
                f"a sample of {len(self.ids)} tokens with a prompt of {self.prompt}: both prompt "
                "and answer need a token"
            )


def of_file(path: Path, model: str, vocab: int, length: int) -> list[Sample]:
    """Returns the samples in a file: JSON, a list of token ids or several such lists, else text.
    The first half of each is its prompt. Raises ConfigError where it has none, or a token that the
    model's `vocab` lacks."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError([f"--tokens {path}: {e}"]) from e
    try:
        ids = json.loads(text)
    except ValueError:
        tokenizer = _tokenizer(model)
        if tokenizer is None:
            why = "is text, and the model has no tokenizer; give JSON, a list of token ids"
            raise ConfigError([f"--tokens {path}: {why}"]) from None
        ids = tokenizer.encode(text)
    rows = ids if isinstance(ids, list) and ids and isinstance(ids[0], list) else [ids]
    for row in rows:
        if not isinstance(row, list) or len(row) < 2 or not all(type(i) is int for i in row):
            raise ConfigError([f"--tokens {path}: give at least two token ids, [1, 2, ...]"])
        if max(row) >= vocab:
            why = f"has the token id {max(row)}, the model's vocab_size is {vocab}"
            raise ConfigError([f"--tokens {path}: {why}"])
    return [_cut(row, len(row) // 2, length) for row in rows[:MOST]]


def of_episode(run: Path, name: str | None, length: int) -> tuple[list[Sample], str]:
    """Returns the first samples of a recorded episode, "STEP.NUMBER" as the viewer calls it (None:
    the newest), and its name; none where nothing was recorded and nothing named. Raises ConfigError
    for a name that no record has."""
    lines = [line for line in read_index(run) if line["kind"] == GROUP and line["tokens"]]
    names = [f"{line['step']}.{line['episode']}" for line in lines]
    if name is None and not lines:
        return [], ""
    if name is not None and name not in names:
        some = f"recorded are {', '.join(names[-5:])}" if names else "nothing was recorded"
        raise ConfigError([f"--episode {name}: there is no such record; {some}"])
    line = lines[-1 if name is None else names.index(name)]
    record = unpack(read_bytes(run, line))
    samples, at = [], 0
    for row in record.about["rows"]:
        here = slice(at, at + row["length"])
        at += row["length"]
        ids, trained = record.arrays["ids"][here], np.flatnonzero(record.arrays["mask"][here])
        if len(trained) and trained[0] > 0:
            samples.append(_cut(ids.tolist(), int(trained[0]), length))
    return samples[:MOST], f"{line['step']}.{line['episode']}"


def built_in(model: str, vocab: int, length: int) -> tuple[list[Sample], str]:
    """Returns a sample of the built-in text, or of random tokens where the model has no tokenizer,
    and what it is."""
    tokenizer = _tokenizer(model)
    if tokenizer is None:
        ids = np.random.default_rng(0).integers(vocab, size=min(length, 128)).tolist()
        return [Sample(ids, len(ids) // 2)], "random tokens"
    ids = tokenizer.encode(TEXT)
    return [_cut(ids, len(ids) // 2, length)], "a built-in text"


def _cut(ids: list[int], prompt: int, length: int) -> Sample:
    """Returns the first `length` tokens, or more where the prompt leaves too few."""
    return Sample(ids[: max(length, prompt + LEAST_ANSWER)], prompt)


def _tokenizer(model: str) -> Any:
    """Returns the tokenizer of a model directory, None where it has none."""
    from megarl.data.tokenizer import load_hf_tokenizer

    if not any((Path(model) / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    return load_hf_tokenizer(model)
