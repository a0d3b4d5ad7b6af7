"""build_dataset brings rows of a source through the chat template and makes rows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from megarl.config.dataset import DatasetConfig
from megarl.config.rollout import GenerationHyperparameters
from megarl.data.problem import Row
from megarl.data.sources import describe, load_rows
from megarl.data.template import Template
from megarl.observability.logging import get_logger

log = get_logger(__name__)


class RowDataset(Dataset[Row]):
    """Holds rows in memory and gives them by index."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


def build_dataset(cfg: DatasetConfig, tokenizer: Any, *, purpose: str, seed: int) -> RowDataset:
    """Returns the rows of `cfg` with their tokens.

    purpose "rl": rows {row_id, messages, prompt, prompt_ids} and every other column of the source.
    purpose "sft": rows {row_id, input_ids, loss_mask}; the loss is on what the policy has to write:
    the text `response` and EOS, or the assistant's turns (Template.conversation).

    options of every type: system (a system message), chat_template_kwargs, train_on (SFT on
    conversations: all turns, or the last). Rows longer than `cfg.max_length` tokens (prompts for
    RL, sequences for SFT) are dropped, their count logged. Raises ValueError for a row or an option
    that is wrong.
    """
    if purpose not in ("rl", "sft"):
        raise ValueError(f"build_dataset: purpose={purpose!r}: use 'rl' or 'sft'")
    sources = load_rows(cfg, seed=seed, purpose=purpose)
    template = Template(tokenizer, cfg.options)
    encode = _rl_row if purpose == "rl" else _sft_row
    rows = [{"row_id": i} | encode(i, row, template) for i, row in enumerate(sources)]
    return RowDataset(_short_enough(rows, cfg, "prompt_ids" if purpose == "rl" else "input_ids"))


def _rl_row(index: int, source: Row, template: Template) -> Row:
    messages = template.told(source["messages"])
    prompt = template.render(messages, tools=source.get("tools"))
    return source | {"messages": messages, "prompt": prompt, "prompt_ids": template.encode(prompt)}


def _sft_row(index: int, source: Row, template: Template) -> Row:
    messages, tools = template.told(source["messages"]), source.get("tools")
    response = source.get("response")
    if response is None:
        try:
            ids, mask = template.conversation(messages, tools=tools)
        except ValueError as e:
            raise ValueError(f"row {index}: {e}") from e
        return {"input_ids": ids, "loss_mask": mask}
    prompt_ids = template.encode(template.render(messages, tools=tools))
    response_ids = template.encode(response) + [template.eos_token_id]
    return {
        "input_ids": prompt_ids + response_ids,
        "loss_mask": [False] * len(prompt_ids) + [True] * len(response_ids),
    }


def check_context(
    dataset: Dataset[Row], gconfig: GenerationHyperparameters, context_length: int
) -> None:
    """Raises ValueError for the first RL row whose prompt and response (gconfig.max_new_tokens) do
    not fit the server's context, in tokens."""
    for i in range(len(dataset)):  # type: ignore[arg-type]
        row = dataset[i]
        prompt = len(row["prompt_ids"])
        if prompt + gconfig.max_new_tokens > context_length:
            raise ValueError(
                f"row {row['row_id']}: a prompt of {prompt} tokens and "
                f"max_new_tokens={gconfig.max_new_tokens} exceed the servers' context of "
                f"{context_length}; raise server.context_length, or drop long prompts with "
                f"the dataset's max_length={max(0, context_length - gconfig.max_new_tokens)}"
            )


def _short_enough(rows: list[Row], cfg: DatasetConfig, key: str) -> list[Row]:
    if cfg.max_length is None:
        return rows
    kept = [row for row in rows if len(row[key]) <= cfg.max_length]
    dropped = len(rows) - len(kept)
    if not kept:
        shortest = min(len(row[key]) for row in rows)
        raise ValueError(
            f"{describe(cfg)} is empty: all {dropped} rows are longer than "
            f"max_length={cfg.max_length} tokens (the shortest has {shortest})"
        )
    if dropped:
        log.warning(
            "%s: dropped %d of %d rows longer than max_length=%d tokens",
            describe(cfg),
            dropped,
            len(rows),
            cfg.max_length,
        )
    return kept
