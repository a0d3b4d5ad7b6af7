"""build_dataset brings rows of a source through the chat template and makes rows of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from megarl.config.dataset import SourceConfig
from megarl.config.rollout import GenerationHyperparameters
from megarl.data.rows import Row
from megarl.data.sources import (
    DATASET,
    PURPOSES,
    apart,
    describe,
    load_rows,
    prompt_key,
    sources_of,
)
from megarl.data.template import encode_rows
from megarl.observability.logging import get_logger

log = get_logger(__name__)


class RowDataset(Dataset[Row]):
    """Holds rows in memory and gives them by index.

    prompts: the keys (sources.prompt_key) of the prompts of its source. parts: which rows are of
    which part of a mixture.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        prompts: frozenset[int] = frozenset(),
        parts: Mapping[str, range] | None = None,
    ) -> None:
        self._rows, self.prompts = list(rows), prompts
        self.parts = dict(parts or {"": range(len(self._rows))})

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


def build_dataset(
    cfg: SourceConfig,
    tokenizer: Any,
    *,
    purpose: str,
    seed: int,
    apart_from: RowDataset | None = None,
    overlap: str = "drop",
) -> RowDataset:
    """Returns the rows of `cfg` with their tokens.

    purpose "rl": rows {row_id, messages, prompt, prompt_ids} and every other column of the source;
    "prompts" is the same of rows for SFT, without the answers that these end with. "sft": rows
    {row_id, input_ids, loss_mask}; the loss is on what the policy has to write: the text `response`
    and EOS, or the assistant's turns (Template.conversation). "pairs": rows {row_id, chosen_ids,
    chosen_mask, rejected_ids, rejected_mask}, each the whole conversation with the mask of the
    answer, and `margin` where the source has one. "unpaired": rows {row_id, input_ids, loss_mask,
    label}, the same of one answer.

    apart_from: training data; what `overlap` does with rows of the same prompt, see sources.apart.

    options of every type: system (a system message), chat_template_kwargs, train_on (SFT on
    conversations: all turns, or the last). Rows longer than `cfg.max_length` tokens (prompts for
    RL, sequences for SFT and pairs) are dropped, their count logged. Raises ValueError for a row or
    an option that is wrong.
    """
    if purpose not in PURPOSES:
        raise ValueError(f"build_dataset: purpose={purpose!r}: use one of {list(PURPOSES)}")
    encoded: list[Row] = []
    parts: dict[str, range] = {}
    prompts: set[int] = set()
    first_id = 0
    for name, part in sources_of(cfg).items():
        sources: Sequence[Row] = load_rows(part, seed=seed, purpose=purpose, part=name)
        if apart_from is not None:
            sources = apart(sources, part, apart_from.prompts, overlap)
        prompts.update(prompt_key(row, part) for row in sources)
        rows = _with_tokens(sources, part, tokenizer, purpose, first_id, name)
        parts[name] = range(len(encoded), len(encoded) + len(rows))
        encoded, first_id = encoded + rows, first_id + len(sources)
    return RowDataset(encoded, prompts=frozenset(prompts), parts=parts)


def _with_tokens(
    sources: Sequence[Row],
    cfg: SourceConfig,
    tokenizer: Any,
    purpose: str,
    first_id: int,
    name: str,
) -> list[Row]:
    """Returns the rows of one source with their tokens, numbered from `first_id`; `name` is its
    part's in a mixture."""
    named = {DATASET: name} if name else {}
    encoded = enumerate(encode_rows(sources, cfg, tokenizer, purpose))
    rows = [{"row_id": first_id + i} | row | named for i, row in encoded]
    return _short_enough(rows, cfg)


def _length(row: Row) -> int:
    """Returns the tokens that max_length bounds: of the prompt, else of the longest sequence."""
    keys = ("prompt_ids", "input_ids", "chosen_ids", "rejected_ids")
    return max(len(row[key]) for key in keys if key in row)


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


def _short_enough(rows: list[Row], cfg: SourceConfig) -> list[Row]:
    if cfg.max_length is None:
        return rows
    kept = [row for row in rows if _length(row) <= cfg.max_length]
    dropped = len(rows) - len(kept)
    if not kept:
        shortest = min(map(_length, rows))
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
