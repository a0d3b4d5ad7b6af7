"""A Problem is what loaders of question and answer make of their source, before any tokenizer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


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
            said = {k: [{"role": "assistant", "content": text}] for k, text in sides.items()}
            return {"messages": messages, **said}
        if purpose == "sft":
            text = self.answer if self.response is None else self.response
            return {"messages": messages, "response": text}
        return {"messages": messages, "answer": self.answer, "task": self.task, **self.extra}


def stable_hash(text: str) -> int:
    """Returns 64 bits that depend on the text only: the same in every process and run."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def in_split(key: str, split: str, *, test_percent: int) -> bool:
    """Returns whether the problem with this key belongs to `split`: never to both, whatever the
    seed. Raises ValueError for a split that is neither train nor test."""
    if split not in ("train", "test"):
        raise ValueError(f"split={split}: generated problems are of train or test")
    return (stable_hash(key) % 100 < test_percent) == (split == "test")
