"""build_dataset: problems of a source, through the chat template, as rows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from torch.utils.data import Dataset

from megarl.config.dataset import DatasetConfig
from megarl.config.rollout import GenerationHyperparameters
from megarl.data.problem import Problem
from megarl.data.sources import describe, load_problems, prompt_options
from megarl.observability.logging import get_logger

log = get_logger(__name__)

Row = dict[str, Any]


class RowDataset(Dataset[Row]):
    """Rows in memory, indexable."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


def build_dataset(cfg: DatasetConfig, tokenizer: Any, *, purpose: str, seed: int) -> RowDataset:
    """purpose "rl": rows {row_id, messages, prompt, prompt_ids, answer, task, ...}.
    purpose "sft": rows {row_id, input_ids, loss_mask}: the prompt, the response and EOS; the loss
    is on the response and EOS, which is what the policy has to write.

    options of every type: system (a system message), chat_template_kwargs. Rows longer than
    `cfg.max_length` tokens (prompts for RL, sequences for SFT) are dropped, their count logged.
    """
    if purpose not in ("rl", "sft"):
        raise ValueError(f"build_dataset: purpose={purpose!r}: use 'rl' or 'sft'")
    problems = load_problems(cfg, seed=seed)
    encode = _rl_row if purpose == "rl" else _sft_row
    template = _Template(tokenizer, **prompt_options(cfg))
    rows = [encode(i, problem, template) for i, problem in enumerate(problems)]
    return RowDataset(_short_enough(rows, cfg, "prompt_ids" if purpose == "rl" else "input_ids"))


def check_context(
    dataset: Dataset[Row], gconfig: GenerationHyperparameters, context_length: int
) -> None:
    """Raises for the first RL row whose prompt and response cannot fit the server's context."""
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


class _Template:
    """A tokenizer's chat template, and the two options that shape what it is given."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        system: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        self._name = name
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(f"tokenizer {name} has no chat template; set tokenizer.chat_template")
        if tokenizer.eos_token_id is None:
            raise ValueError(f"tokenizer {name} has no EOS token: no answer could end")
        self._tokenizer, self._system = tokenizer, system
        self._kwargs = chat_template_kwargs or {}
        self.eos_token_id: int = tokenizer.eos_token_id
        self.encode("What is 1 + 1?")  # without a vocabulary only special tokens are left of text

    def messages(self, question: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return system + [{"role": "user", "content": question}]

    def prompt(self, messages: list[dict[str, str]]) -> str:
        """ValueError, with the template's own words, if it refuses the messages."""
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._kwargs
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as e:
            roles = ", ".join(m["role"] for m in messages)
            raise ValueError(
                f"the chat template of tokenizer {self._name} fails on messages of {roles} with "
                f"chat_template_kwargs={self._kwargs} ({type(e).__name__}: {e}); change the "
                "dataset's options system and chat_template_kwargs, or take another tokenizer_path"
            ) from e

    def encode(self, text: str) -> list[int]:
        """Tokens of text that already holds its special tokens. ValueError if it has none."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if text.strip() and not ids:
            raise ValueError(
                f"tokenizer {self._name} makes no tokens of {text[:40]!r}: its directory lacks the "
                "vocabulary (tokenizer.json, vocab.json or tokenizer.model); copy it there, or set "
                "tokenizer_path"
            )
        return ids


def _rl_row(index: int, problem: Problem, template: _Template) -> Row:
    messages = template.messages(problem.question)
    prompt = template.prompt(messages)
    return {
        "row_id": index,
        "messages": messages,
        "prompt": prompt,
        "prompt_ids": template.encode(prompt),
        "answer": problem.answer,
        "task": problem.task,
        **problem.extra,
    }


def _sft_row(index: int, problem: Problem, template: _Template) -> Row:
    prompt_ids = template.encode(template.prompt(template.messages(problem.question)))
    text = problem.answer if problem.response is None else problem.response
    response_ids = template.encode(text) + [template.eos_token_id]
    return {
        "row_id": index,
        "input_ids": prompt_ids + response_ids,
        "loss_mask": [False] * len(prompt_ids) + [True] * len(response_ids),
    }


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
