"""Reads pairs of a chosen and a rejected answer from files or the hub, in the formats that are
common: prompt, chosen and rejected as texts or as messages, or two whole conversations; and single
answers with a label: prompt, completion and label."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

from megarl.config.dataset import SourceConfig
from megarl.data.chat import Message, instructed, messages_of, renamed
from megarl.data.files import Row, check_size, read_dataset

_SIDES = ("chosen", "rejected")
# how conversations stand in one text, as in Anthropic's hh-rlhf
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def preference(
    cfg: SourceConfig,
    *,
    seed: int,
    columns: dict[str, str] | None = None,
    instruction: str = "",
    subset: str | None = None,
    revision: str | None = None,
) -> list[Row]:
    """Reads rows with `messages` (the prompt), `chosen` and `rejected` (the messages that follow
    it) in the source's order; every other column stays in the row. A row of the source with
    `completion` and `label` becomes one with `answered` (messages) and `label`. Raises ValueError
    naming the file and the line or row that is wrong.

    Where the source has a column `prompt`, it and the answers are texts or lists of messages, and
    an answer may begin with the prompt. Without one, chosen and rejected are whole conversations,
    as lists of messages or as texts with "Human:" and "Assistant:" turns, and what both begin with
    is the prompt. columns, instruction, subset, revision: see `chat`.
    """
    rows = []
    try:
        for place, source in islice(read_dataset(cfg, subset, revision), cfg.size):
            row = renamed(source, columns or {}, place)
            row = _single(row, place) if {"completion", "label"} <= set(row) else _pair(row, place)
            row["messages"] = instructed(row["messages"], instruction, place)
            rows.append(row)
    except ValueError as e:
        raise ValueError(f"preference: {e}") from e
    check_size(cfg, len(rows))
    return rows


def check_margins(rows: Sequence[Row]) -> None:
    """Raises ValueError for the first row whose `margin` is not a finite number."""
    for i, row in enumerate(rows):
        margin = row.get("margin")
        if isinstance(margin, bool) or not isinstance(margin, int | float):
            said = f"is {margin!r}" if "margin" in row else f"is missing; it has {sorted(row)}"
            raise ValueError(f"row {i}: margin {said}; name the column in options.columns.margin")
        if not math.isfinite(margin):
            raise ValueError(f"row {i}: margin is {margin}, not a finite number")


def _pair(row: Row, place: str) -> Row:
    """Returns the row with its messages, chosen and rejected as lists of messages."""
    if missing := set(_SIDES) - set(row):
        raise ValueError(
            f"{place} lacks the columns {sorted(missing)}; it has {sorted(row)}: name those that "
            "have them in options.columns"
        )
    prompt = row.pop("prompt", None)
    if prompt is None:
        whole = {side: _conversation(row[side], side, place) for side in _SIDES}
        prompt = _common(whole["chosen"], whole["rejected"])
        answers = {side: messages[len(prompt) :] for side, messages in whole.items()}
    else:
        prompt = messages_of(prompt, f"{place}: prompt")
        answers = {side: _answer(row[side], prompt, side, place) for side in _SIDES}
    if not prompt:
        raise ValueError(f"{place}: chosen and rejected begin with no common message, so no prompt")
    for side, messages in answers.items():
        if not messages or messages[-1]["role"] != "assistant":
            raise ValueError(f"{place}: {side} does not end with an answer of the assistant's")
    if answers["chosen"] == answers["rejected"]:
        raise ValueError(f"{place}: chosen and rejected are the same; leave the row out")
    return {**row, "messages": prompt, **answers}


def _single(row: Row, place: str) -> Row:
    """Returns the row with its messages, and its answer as messages."""
    if row.get("prompt") is None:
        raise ValueError(f"{place} has a completion and no prompt; name it in options.columns")
    if not isinstance(row["label"], bool):
        raise ValueError(f"{place}: label is {row['label']!r}, not true or false")
    prompt = messages_of(row.pop("prompt"), f"{place}: prompt")
    answer = _answer(row.pop("completion"), prompt, "completion", place)
    if not answer or answer[-1]["role"] != "assistant":
        raise ValueError(f"{place}: completion does not end with an answer of the assistant's")
    return {**row, "messages": prompt, "answered": answer}


def _conversation(value: Any, side: str, place: str) -> list[Message]:
    """Returns a whole conversation as messages."""
    if not isinstance(value, str):
        return messages_of(value, f"{place}: {side}")
    start, *turns = _TURN.split(value)
    if start.strip() or not turns:
        raise ValueError(
            f"{place}: {side} is a text without a prompt beside it, and not a conversation that "
            'begins with "Human:"; name the prompt in options.columns.prompt'
        )
    return [
        {"role": _ROLES[who], "content": said.strip()}
        for who, said in zip(turns[::2], turns[1::2], strict=True)
    ]


def _common(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """Returns the messages that both conversations begin with."""
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    return chosen[:same]


def _answer(value: Any, prompt: list[Message], side: str, place: str) -> list[Message]:
    """Returns what follows the prompt, as messages."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    messages = messages_of(value, f"{place}: {side}")
    return messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
