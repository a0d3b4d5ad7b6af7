"""Reads conversations from jsonl, json or parquet files or from the hub, in whatever columns they
are."""

from __future__ import annotations

from itertools import islice
from typing import Any

from megarl.config.dataset import SourceConfig
from megarl.data.files import Row, check_size, read_dataset, shown

Message = dict[str, Any]


def chat(
    cfg: SourceConfig,
    *,
    seed: int,
    columns: dict[str, str] | None = None,
    instruction: str = "",
    subset: str | None = None,
    revision: str | None = None,
) -> list[Row]:
    """Reads rows with `messages` (a list of {role, content}, or the text of one user's message) in
    the source's order; every other column stays in the row. Raises ValueError naming the file and
    the line or row that is wrong.

    columns: name in the row -> column of the source, `a.b` for b inside of column a. instruction:
    appended to the last user's message; nothing is by default. subset, revision: the hub's
    configuration, and its commit, tag or branch.
    """
    rows = []
    try:
        for place, source in islice(read_dataset(cfg, subset, revision), cfg.size):
            row = renamed(source, columns or {}, place)
            if "messages" not in row:
                raise ValueError(
                    f"{place} lacks the column messages; it has {sorted(row)}: name the one that "
                    "has them in options.columns.messages"
                )
            row["messages"] = instructed(messages_of(row["messages"], place), instruction, place)
            rows.append(row)
    except ValueError as e:
        raise ValueError(f"chat: {e}") from e
    check_size(cfg, len(rows))
    return rows


def renamed(source: Row, columns: dict[str, str], place: str) -> Row:
    """Returns the row with the names of `columns`; a renamed column keeps no second name."""
    found = {}
    for name, column in columns.items():
        value: Any = source
        for part in str(column).split("."):
            if not isinstance(value, dict) or part not in value:
                raise ValueError(
                    f"{place}: options.columns.{name}={column}: no such column; it has "
                    f"{sorted(source)}"
                )
            value = value[part]
        found[name] = value
    taken = set(columns.values())
    return {k: v for k, v in source.items() if k not in taken} | found


def messages_of(value: Any, place: str) -> list[Message]:
    """Returns a list of messages, or a user's message by its text, as a list of messages without
    null fields. Raises ValueError, with `place`, for anything else."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place}: messages are {shown(value)}, not a list of role and content")
    return [_message(m, f"{place}: message {i}") for i, m in enumerate(value)]


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'{place} is {shown(message)}; write {{"role": ..., "content": ...}}')
    # parquet has every field of any message in each: those that are null are none
    message = {k: v for k, v in message.items() if v is not None}
    content = message.get("content", "" if message.get("tool_calls") else None)
    if not isinstance(content, str):
        raise ValueError(f"{place}: its content is {shown(content)}, not text")
    return message | {"content": content}


def instructed(messages: list[Message], instruction: str, place: str) -> list[Message]:
    """Returns the messages with `instruction` after the last user's. Raises ValueError, with
    `place`, where there is no such message."""
    if not instruction:
        return messages
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
    if last is None:
        raise ValueError(f"{place}: no message of a user to append options.instruction to")
    told = messages[last] | {"content": messages[last]["content"] + instruction}
    return [*messages[:last], told, *messages[last + 1 :]]
