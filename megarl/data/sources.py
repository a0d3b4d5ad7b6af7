"""Loads the rows of a data set by DatasetConfig.type. It imports no torch of itself, so that a
start can look at its data before anything else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megarl.config.dataset import MIX, DatasetConfig, SourceConfig
from megarl.data.formats import chat, gsm8k, messages_of, preference, tools_read
from megarl.data.generated import arithmetic, reasoning_gym
from megarl.data.rows import Problem, Row, stable_hash, without_nulls
from megarl.observability.logging import get_logger
from megarl.utils.importing import (
    call_problem,
    is_import_path,
    load_object,
    option_problems,
)
from megarl.utils.user_errors import in_one_line

log = get_logger(__name__)

# (cfg, *, seed, **options) -> rows or problems, as a function of the user's is called, too
SOURCES: dict[str, Callable[..., Iterable[Row | Problem]]] = {
    "arithmetic": arithmetic,
    "gsm8k": gsm8k,
    "reasoning_gym": reasoning_gym,
    "chat": chat,
    "preference": preference,
}
# options of every source: they shape what the tokenizer makes of the rows
TEMPLATE_OPTIONS = ("system", "chat_template_kwargs", "train_on")
PURPOSES = ("rl", "sft", "pairs", "prompts")
DATASET = "dataset"  # the column of a mixture's rows that holds the name of their part
_ANSWERS = ("chosen", "rejected")  # columns of the assistant's messages
# names that a row gets after its source, or that a reward gets beside it
_RESERVED = ("row_id", "prompt", "prompt_ids", "completion", "completion_ids", "episode_id")
_SHOWN = 3  # rows named in a message


def sources_of(cfg: SourceConfig) -> dict[str, SourceConfig]:
    """Returns the parts of a mixture by name, or {"": cfg} for any other data set."""
    if isinstance(cfg, DatasetConfig) and cfg.type == MIX:
        return dict(cfg.parts)
    return {"": cfg}


def load_rows(cfg: SourceConfig, *, seed: int, purpose: str = "rl", part: str = "") -> list[Row]:
    """Returns at least one row, before any tokenizer: `messages` and, for "rl", what the reward
    gets. For "sft" the messages hold the assistant's, or `response` is the text to be written after
    them; "prompts" is "rl" of such rows, without their answers. For "pairs" `chosen` and `rejected`
    are the messages to be compared after them. The rows of a mixture are its parts' in their order;
    those of a part have its name in `dataset`. Raises ValueError naming the option, the file and
    the line, or the row that is wrong.
    """
    if purpose not in PURPOSES:
        raise ValueError(f"purpose={purpose!r}: use one of {list(PURPOSES)}")
    if isinstance(cfg, DatasetConfig) and cfg.type == MIX:
        parts = [load_rows(p, seed=seed, purpose=purpose, part=n) for n, p in cfg.parts.items()]
        return [row for rows in parts for row in rows]
    rows = _load(cfg, seed, purpose)
    if part and any(DATASET in row for row in rows):
        raise ValueError(
            f"{describe(cfg)} has a column {DATASET}, which in a mixture names the part; give the "
            "column another name"
        )
    return [row | {DATASET: part} for row in rows] if part else rows


def _load(cfg: SourceConfig, seed: int, purpose: str) -> list[Row]:
    make = _source(cfg)
    options = {k: v for k, v in cfg.options.items() if k not in TEMPLATE_OPTIONS}
    problems = option_problems(make, options, key="options", positional=1, by_name=("seed",))
    if found := "; ".join(problems):
        raise ValueError(f"dataset type {cfg.type}: {found}")
    if problem := call_problem(make, ("cfg",), ("seed", *options)):
        raise ValueError(f"dataset type {cfg.type}: {problem}; it is called as (cfg, seed=...)")
    rows = [
        _row(i, row, cfg, purpose) for i, row in enumerate(_source_rows(make, cfg, seed, options))
    ]
    if not rows:
        raise ValueError(f"{describe(cfg)} is empty: its source has 0 rows")
    return rows if cfg.size is None or not is_import_path(cfg.type) else rows[: cfg.size]


def _source(cfg: SourceConfig) -> Callable[..., Any]:
    if cfg.type in SOURCES:
        return SOURCES[cfg.type]
    if not is_import_path(cfg.type):
        raise ValueError(
            f"dataset type {cfg.type!r}: use one of {sorted(SOURCES)}, or pkg.module:function"
        )
    make = load_object(cfg.type, what="dataset type")
    if not callable(make):
        raise ValueError(f"dataset type {cfg.type}: a {type(make).__name__}, not a function")
    return make


def _source_rows(
    make: Callable[..., Any], cfg: SourceConfig, seed: int, options: Row
) -> Iterator[Any]:
    """The rows of a source. What a function of the user's raises is a ValueError that names it."""
    try:
        yield from _all(make(cfg, seed=seed, **options))
    except Exception as e:
        if isinstance(e, ValueError) or cfg.type in SOURCES:
            raise
        raise ValueError(f"dataset type {cfg.type}: failed: {in_one_line(e)}") from e


def _all(source: Any) -> Iterable[Any]:
    """Returns the rows of a list, a generator, a HF or a torch data set."""
    if type(source).__module__.startswith("datasets."):
        return map(without_nulls, source)
    if hasattr(type(source), "__iter__"):
        return source
    if hasattr(type(source), "__len__") and hasattr(type(source), "__getitem__"):
        return (source[i] for i in range(len(source)))
    raise ValueError(f"it gave a {type(source).__name__}, not rows")


def _row(index: int, row: Any, cfg: SourceConfig, purpose: str) -> Row:
    what = f"dataset type {cfg.type}: row {index}"
    if isinstance(row, Problem):
        row = row.row(purpose)
    if not isinstance(row, Mapping) or not row.get("messages"):
        names = sorted(row) if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(f"{what} has no messages; it has {names}")
    if taken := [name for name in _RESERVED if name in row]:
        raise ValueError(
            f"{what}: the name {taken[0]} is megarl's; give the column another one"
            + (f", as options.columns.my_{taken[0]}={taken[0]} does" if cfg.type == "chat" else "")
        )
    row = dict(row)
    if is_import_path(cfg.type):
        row = tools_read(row | {"messages": messages_of(row["messages"], what)}, what)
        if purpose == "pairs":
            row |= {k: _as_messages(row[k], f"{what}: {k}") for k in _ANSWERS if k in row}
    answered = row["messages"][-1]["role"] == "assistant"
    if purpose in ("sft", "prompts") and answered and row.get("response") is not None:
        raise ValueError(
            f"{what}: its messages end with an answer, and the column response is another answer; "
            "leave one of them out"
        )
    if purpose == "prompts":
        row = _without_answer(row)
    _check_answers(row, purpose, what)
    if purpose == "sft":
        _check_written(row, what)
    if purpose == "sft" and cfg.type == "preference":  # to learn the chosen answers
        row["messages"] = [*row["messages"], *row.get("chosen", ())]
    if purpose != "sft" and row["messages"][-1]["role"] == "assistant":
        raise ValueError(
            f"{what} ends with an assistant's message, which is for the policy to write; leave it "
            "out"
        )
    return row


def _as_messages(answer: Any, place: str) -> list[Row]:
    """Returns an answer, which may be a text, as the assistant's messages."""
    message = {"role": "assistant", "content": answer}
    return [message] if isinstance(answer, str) else messages_of(answer, place)


def _check_answers(row: Row, purpose: str, what: str) -> None:
    """Raises ValueError where a row lacks the answers that it is read for."""
    missing = {"chosen", "rejected"} - set(row)
    if missing and purpose == "pairs":
        raise ValueError(f"{what} lacks {sorted(missing)}: pairs are of type preference")


def _check_written(row: Row, what: str) -> None:
    """Raises ValueError where a row for SFT has nothing that the model could learn to write."""
    if row.get("response") is not None or "chosen" in row:
        return
    turns = [m for m in row["messages"] if m["role"] == "assistant"]
    if not turns:
        raise ValueError(
            f"{what} has no assistant's message to train on; leave the row out, or add the answer"
        )
    if any(not (m.get("content") or m.get("tool_calls")) for m in turns):
        raise ValueError(f"{what} has an assistant's message without text; leave the row out")


def _without_answer(row: Row) -> Row:
    """Returns a row for SFT as one for RL: without the answer that it ends with, which `answer` has
    where the row has none of that name."""
    *prompt, last = row["messages"]
    answer = {"answer": row["response"]} if row.get("response") is not None else {}
    if last["role"] == "assistant":
        row, answer = row | {"messages": prompt}, {"answer": last["content"]}
    return answer | row


def check_batches(rows: int, cfg: DatasetConfig) -> None:
    """Raises ValueError where `rows` rows give no batch."""
    if cfg.drop_last and rows < cfg.batch_size:
        raise ValueError(
            f"dataset {cfg.type}, split {cfg.split}: {rows} rows do not fill one batch of "
            f"batch_size={cfg.batch_size}; lower it or set drop_last=false"
        )


def describe(cfg: SourceConfig) -> str:
    """Returns a data set's type, path and split in words, to begin a message with."""
    where = f" ({cfg.path or ', '.join(cfg.files)})" if cfg.path or cfg.files else ""
    return f"dataset {cfg.type}{where}, split {cfg.split},"


def prompt_key(row: Row, cfg: SourceConfig) -> int:
    """Returns a name for a row's prompt by its content: roles and words, without system messages,
    white space and the answer that a conversation for SFT ends with. Of rows that a function of the
    user's makes every column counts, since an environment may begin all tasks with the same words.
    """
    messages = row["messages"]
    prompt = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    words = [[m["role"], *m["content"].split()] for m in prompt if m["role"] != "system"]
    others = {k: v for k, v in row.items() if k not in ("messages", DATASET)}
    whole = is_import_path(cfg.type)
    return stable_hash(json.dumps([words, others] if whole else words, sort_keys=True, default=str))


def apart(
    rows: Sequence[Row],
    cfg: SourceConfig,
    trained: frozenset[int],
    policy: str,
    *,
    quiet: bool = False,
) -> Sequence[Row]:
    """Returns the rows that training does not see.

    trained: the keys of its prompts. policy: "drop" leaves the others out and logs their number,
    "refuse" raises ValueError with it, "keep" keeps them. cfg: the rows' source; quiet: logs
    nothing. Raises ValueError where no row would be left.
    """
    if policy == "keep":
        return rows
    seen = [i for i, row in enumerate(rows) if prompt_key(row, cfg) in trained]
    if not seen:
        return rows
    shown = ", ".join(map(str, seen[:_SHOWN])) + (", ..." if len(seen) > _SHOWN else "")
    overlap = (
        f"{describe(cfg)} has {len(seen)} of {len(rows)} prompts that the training data has, too"
    )
    if policy == "refuse" or len(seen) == len(rows):
        raise ValueError(
            f"{overlap} (rows {shown}); take them out of one of the two, or set "
            f"evaluator.overlap={'keep' if len(seen) == len(rows) else 'drop'}"
        )
    if not quiet:
        log.warning("%s (rows %s): these are left out of the evaluation", overlap, shown)
    left = set(range(len(rows))).difference(seen)
    return [rows[i] for i in sorted(left)]
