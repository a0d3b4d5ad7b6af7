"""Reads GSM8K (arXiv 2110.14168) from the hub or from local files in its format.

A row has `question` and `answer`; the answer is a worked solution that ends in "#### 42".
"""

from __future__ import annotations

import re
from itertools import islice

from megarl.config.dataset import SourceConfig
from megarl.data.files import Row, check_size, read_dataset, text
from megarl.data.problem import Problem

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# calculator annotations inside solutions: 48/2 = <<48/2=24>>24
_CALCULATOR = re.compile(r"<<[^>]*>>")


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
    try:
        problems = [
            _problem(place, row, instruction)
            for place, row in islice(read_dataset(cfg, subset, revision), cfg.size)
        ]
    except ValueError as e:
        raise ValueError(f"gsm8k: {e}") from e
    check_size(cfg, len(problems))
    return problems


def _problem(place: str, row: Row, instruction: str) -> Problem:
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
