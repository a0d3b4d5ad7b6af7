"""Finds validation rows whose prompt is in the training data, by content."""

from __future__ import annotations

import json
from collections.abc import Sequence

from megarl.config.dataset import SourceConfig
from megarl.data.problem import Row, stable_hash
from megarl.data.sources import DATASET, describe
from megarl.observability.logging import get_logger
from megarl.utils.importing import is_import_path

log = get_logger(__name__)
_SHOWN = 3  # rows named in a message


def prompt_key(row: Row, cfg: SourceConfig) -> int:
    """Returns a name for a row's prompt by its content: roles and words, without system messages,
    white space and the answer that a conversation for SFT ends with. Of rows that a function of the
    user's makes every column counts, since an environment may begin all tasks with the same words.
    """
    messages = row["messages"]
    asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    said = [[m["role"], *m["content"].split()] for m in asked if m["role"] != "system"]
    others = {k: v for k, v in row.items() if k not in ("messages", DATASET)}
    whole = is_import_path(cfg.type)
    return stable_hash(json.dumps([said, others] if whole else said, sort_keys=True, default=str))


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
    found = (
        f"{describe(cfg)} has {len(seen)} of {len(rows)} prompts that the training data has, too"
    )
    if policy == "refuse" or len(seen) == len(rows):
        raise ValueError(
            f"{found} (rows {shown}); take them out of one of the two, or set "
            f"evaluator.overlap={'keep' if len(seen) == len(rows) else 'drop'}"
        )
    if not quiet:
        log.warning("%s (rows %s): these are left out of the evaluation", found, shown)
    left = set(range(len(rows))).difference(seen)
    return [rows[i] for i in sorted(left)]
