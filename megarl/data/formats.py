"""Reads what is common in files and on the hub: conversations in whatever columns they are (chat),
pairs (preference), and GSM8K (arXiv 2110.14168)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from megarl.api.chat_template import decoded
from megarl.config.dataset import SourceConfig
from megarl.data.rows import Problem, Row, check_characters, read_dataset, shown, text

Message = dict[str, Any]
Columns = dict[str, str | list[str]]  # our name -> the source's column, or columns of text to join
T = TypeVar("T")
_SIDES = ("chosen", "rejected")
# how conversations stand in one text, as in Anthropic's hh-rlhf
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
# ShareGPT's names of roles; its messages are {"from": ..., "value": ...}
_FROM = {role: role for role in ("system", "user", "assistant", "tool")}
_FROM |= {"human": "user", "gpt": "assistant", "observation": "tool"}
# how a list of messages begins, as JSON or as Python prints it
_LISTED = re.compile(r"""\s*\[\s*\{\s*['"](role|content|from|value)['"]""")


INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# calculator annotations inside solutions: 48/2 = <<48/2=24>>24
_CALCULATOR = re.compile(r"<<[^>]*>>")
# likely names of columns: of the prompt, of the answer
_PROMPTS = ("messages", "conversations", "prompt", "question", "problem", "instruction", "input")
_ANSWERS = (
    *("answer", "response", "completion", "output", "solution", "ground_truth", "label"),
    "reward_model.ground_truth",  # verl's
)


def _read(
    name: str,
    cfg: SourceConfig,
    subset: str | None,
    revision: str | None,
    read: Callable[[Row, str], T],
) -> list[T]:
    """Returns what `read` makes of the first cfg.size rows and their places. Raises ValueError for
    one that it refuses, and where there are fewer."""
    try:
        places = islice(read_dataset(cfg, subset, revision), cfg.size)
        rows = [read(row, place) for place, row in places]
    except ValueError as e:
        raise ValueError(f"{name}: {e}") from e
    if cfg.size is not None and 0 < len(rows) < cfg.size:
        raise ValueError(
            f"{cfg.type}: size={cfg.size}, but {', '.join(cfg.files) or cfg.path}, split "
            f"{cfg.split}, has {len(rows)} rows; lower size, or leave it null for all"
        )
    return rows


def chat(
    cfg: SourceConfig,
    *,
    seed: int,
    columns: Columns | None = None,
    instruction: str = "",
    subset: str | None = None,
    revision: str | None = None,
) -> list[Row]:
    """Reads rows with `messages` (a list of {role, content}, or the text of one user's message) in
    the source's order; every other column stays in the row. Raises ValueError naming the file and
    the line or row that is wrong.

    columns: name in the row -> column of the source, `a.b` for b inside of column a, or a list of
    columns whose texts are joined, with a blank line between two. instruction: appended to the last
    user's message; nothing is by default. subset, revision: the hub's configuration, and its
    commit, tag or branch.
    """

    def read(source: Row, place: str) -> Row:
        row = renamed(source, columns or {}, place)
        if "messages" not in row:
            raise ValueError(
                f"{place} lacks the column messages; it has {sorted(row)}: name the one that has "
                "them in options.columns.messages"
            )
        messages = messages_of(row["messages"], place)
        return tools_read(row | {"messages": instructed(messages, instruction, place)}, place)

    return _read("chat", cfg, subset, revision, read)


def renamed(source: Row, columns: Columns, place: str) -> Row:
    """Returns the row with the names of `columns`; a renamed column keeps no second name."""
    listed = {n: [c] if isinstance(c, str) else c for n, c in columns.items()}
    named: Row = {}
    for name, parts in listed.items():
        key = f"{place}: options.columns.{name}={columns[name]}"
        values = [_value(source, column, key) for column in parts]
        if len(parts) > 1:
            if not any(values) or not all(isinstance(v, str) for v in values if v is not None):
                raise ValueError(f"{key}: {shown(values)} are not texts to join")
            values = ["\n\n".join(filter(None, values))]
        named[name] = values[0]
    taken = {column for parts in listed.values() for column in parts}
    return {k: v for k, v in source.items() if k not in taken} | named


def _value(source: Row, column: str, key: str) -> Any:
    value: Any = source
    for part in str(column).split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"{key}: no such column; it has {sorted(source)}")
        value = value[part]
    return value


def messages_of(value: Any, place: str) -> list[Message]:
    """Returns a list of messages, its JSON text, or a user's message by its text, as a list of
    messages without null fields. Raises ValueError, with `place`, for anything else."""
    check_characters(value, "messages", place)
    if isinstance(value, str) and not _LISTED.match(value):
        return [{"role": "user", "content": value}]
    value = decoded(value)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place}: messages are {shown(value)}, not a list of role and content")
    return [_message(m, f"{place}: message {i}") for i, m in enumerate(value)]


def _message(message: Any, place: str) -> Message:
    given = message
    if isinstance(message, dict) and {"from", "value"} <= message.keys():
        message = {"role": _FROM.get(str(given["from"])), "content": given["value"]}
        message |= {k: v for k, v in given.items() if k not in ("from", "value")}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'{place} is {shown(given)}; write {{"role": ..., "content": ...}}')
    message = {k: v for k, v in message.items() if v is not None}
    if calls := decoded(message.get("tool_calls")):
        message["tool_calls"] = _objects(calls, f"{place}: tool_calls", _call)
    content = message.get("content", "" if calls else None)
    if not isinstance(content, str):
        raise ValueError(f"{place}: its content is {shown(content)}, not text")
    return message | {"content": content}


def _objects(value: Any, place: str, read: Callable[[Row], Row] = dict) -> list[Row]:
    """Returns what `read` makes of each object in a list. Raises ValueError, with `place`, for
    anything else than objects or their JSON text."""
    listed = [decoded(v) for v in (value if isinstance(value, list) else [value])]
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in listed):
        raise ValueError(f"{place}: {shown(value)} is not a list of objects")
    return [read(v) for v in listed]


def _call(call: Row) -> Row:
    """Returns a call of a tool whose arguments are an object, as chat templates take them."""
    if isinstance(function := call.get("function"), dict):
        return call | {"function": _call(function)}
    arguments = decoded(call.get("arguments"))
    return call | {"arguments": {} if arguments is None else arguments}


def tools_read(row: Row, place: str) -> Row:
    """Returns the row with a column tools as a list of objects. Raises ValueError, with
    `place`, for other tools, and for text that is not UTF-8."""
    for name in {"tools", "response"} & row.keys():
        check_characters(row[name], name, place)
    if "tools" not in row:
        return row
    return row | {"tools": _objects(decoded(row["tools"]) or [], f"{place}: tools")}


def instructed(messages: list[Message], instruction: str, place: str) -> list[Message]:
    """Returns the messages with `instruction` after the last user's. Raises ValueError, with
    `place`, where there is no such message."""
    if not instruction:
        return messages
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
    if last is None:
        raise ValueError(f"{place}: no message of a user to append options.instruction to")
    instructed_message = messages[last] | {"content": messages[last]["content"] + instruction}
    return [*messages[:last], instructed_message, *messages[last + 1 :]]


def preference(
    cfg: SourceConfig,
    *,
    seed: int,
    columns: Columns | None = None,
    instruction: str = "",
    subset: str | None = None,
    revision: str | None = None,
) -> list[Row]:
    """Reads rows with `messages` (the prompt), `chosen` and `rejected` (the messages that follow
    it) in the source's order; every other column stays in the row. Raises
    ValueError naming the file and the line or row that is wrong.

    Where the source has a column `prompt`, it and the answers are texts or lists of messages, and
    an answer may begin with the prompt. Without one, chosen and rejected are whole conversations,
    as lists of messages or as texts with "Human:" and "Assistant:" turns, and what both begin with
    is the prompt. columns, instruction, subset, revision: see `chat`.
    """

    def read(source: Row, place: str) -> Row:
        row = renamed(source, columns or {}, place)
        row = _pair(row, place)
        return tools_read(
            row | {"messages": instructed(row["messages"], instruction, place)}, place
        )

    return _read("preference", cfg, subset, revision, read)


def check_margins(rows: Sequence[Row]) -> None:
    """Raises ValueError for the first row whose `margin` is not a finite number."""
    for i, row in enumerate(rows):
        margin = row.get("margin")
        if isinstance(margin, bool) or not isinstance(margin, int | float):
            why = f"is {margin!r}" if "margin" in row else f"is missing; it has {sorted(row)}"
            raise ValueError(f"row {i}: margin {why}; name the column in options.columns.margin")
        if not math.isfinite(margin):
            raise ValueError(f"row {i}: margin is {margin}, not a finite number")


def _pair(row: Row, place: str) -> Row:
    """Returns the row with its messages, chosen and rejected as lists of messages."""
    if missing := set(_SIDES) - set(row):
        raise ValueError(
            f"{place} lacks the columns {sorted(missing)}; it has {sorted(row)}; name those to "
            "use in options.columns"
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
        {"role": _ROLES[who], "content": words.strip()}
        for who, words in zip(turns[::2], turns[1::2], strict=True)
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


def gsm8k(
    cfg: SourceConfig,
    *,
    seed: int,
    subset: str = "main",
    revision: str | None = None,
    instruction: str = INSTRUCTION,
) -> list[Problem]:
    """Reads problems in the source's order. subset, revision: the hub's configuration, and its
    commit, tag or branch. instruction: appended to every question. Raises ValueError naming the
    file and the line or row that is wrong.
    """
    return _read("gsm8k", cfg, subset, revision, partial(_problem, instruction=instruction))


def _problem(row: Row, place: str, instruction: str) -> Problem:
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


def read_as(path: str, answer: str) -> tuple[str, dict[str, Any], int, list[str]]:
    """Returns the type of a data set and its options, by the names of its columns, how many rows it
    has, at most 32, and the columns with content that neither a prompt nor an answer reads.

    answer: our name of the column beside messages, answer or response. Raises ValueError for data
    that cannot be read.
    """
    head = list(islice(read_dataset(SourceConfig(path=path), None), 32))
    row: Row = {}
    for _, source in head:
        row |= {name: value for name, value in source.items() if value or name not in row}
    kind, columns = "chat", Columns()
    if {"chosen", "rejected"} <= row.keys():
        kind, read = "preference", ["prompt", "chosen", "rejected"]
    elif "####" in str(row.get("answer")):
        kind, read = "gsm8k", ["question", "answer"]
    else:
        inner = row.get("reward_model")
        names = {*row, *(f"reward_model.{n}" for n in (inner if isinstance(inner, dict) else ()))}
        prompts = [c for c in _PROMPTS if c in names]
        # Alpaca's: the input belongs to the instruction
        read = prompts if prompts == ["instruction", "input"] else prompts[:1]
        columns["messages"] = read if len(read) > 1 else "".join(read) or "messages"
        answers = [c for c in (answer, *_ANSWERS) if c in names][:1]
        if answers and not (answer == "response" and _is_answered(row, read)):
            columns[answer] = answers[0]
            read = read + answers
    columns = {ours: column for ours, column in columns.items() if column != ours}
    used = {"tools", *(column.partition(".")[0] for column in read)}
    unread = [k for k, v in row.items() if isinstance(v, str | list | dict) and v and k not in used]
    return kind, {"columns": columns} if columns else {}, len(head), unread


def _is_answered(row: Row, columns: Sequence[str]) -> bool:
    """Returns whether the messages of a row end with an answer."""
    try:
        return messages_of(row[columns[0]], "row")[-1]["role"] == "assistant"
    except (ValueError, IndexError):
        return False
