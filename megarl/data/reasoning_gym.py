"""Makes tasks of the reasoning_gym library, with the entries its scorers need."""

from __future__ import annotations

import json
from typing import Any

from megarl.config.dataset import DatasetConfig
from megarl.data.problem import Problem, in_split, stable_hash

DEFAULT_COUNT = 1000
TEST_PERCENT = 50
_TRIES = 20  # items generated per wanted one before the task counts as exhausted
# the library seeds item i with seed + i: seeds this far apart never meet
_SEED_STRIDE = 1 << 32


def reasoning_gym(
    cfg: DatasetConfig, *, seed: int, task: Any = None, **options: Any
) -> list[Problem]:
    """Makes distinct problems of the library's `task`, a name; `options` are the task's own.
    Raises ValueError for a task that there is not, or that gives too few.

    The split is decided by a hash of the question, so train and test never share one.
    """
    import reasoning_gym as library

    known = library.factory.DATASETS
    if not isinstance(task, str) or task not in known:
        raise ValueError(f"reasoning_gym: options.task={task!r}: use one of {sorted(known)}")
    count = DEFAULT_COUNT if cfg.size is None else cfg.size
    limit = _TRIES * count + 1000
    try:
        items = library.create_dataset(task, seed=_item_seed(seed), size=limit, **options)
    except (TypeError, AssertionError) as e:
        raise ValueError(f"reasoning_gym: task {task} refuses options {options}: {e}") from e
    made: dict[str, Problem] = {}
    for i in range(limit):
        if len(made) == count:
            return list(made.values())
        entry = items[i]
        if in_split(entry["question"], cfg.split, test_percent=TEST_PERCENT):
            made.setdefault(entry["question"], _problem(entry, task, items, check=not made))
    raise ValueError(
        f"reasoning_gym: task {task} gave only {len(made)} distinct {cfg.split} problems in "
        f"{limit}, {count} wanted; lower size or make the task harder"
    )


def _item_seed(seed: int) -> int:
    return stable_hash(f"reasoning_gym {seed}") % (1 << 20) * _SEED_STRIDE


def _problem(entry: dict[str, Any], task: str, items: Any, *, check: bool) -> Problem:
    """Makes a problem of `entry` as JSON brings it back; `check`: the scorer must judge it as
    before (some read tuples or sets out of the metadata)."""
    try:
        travelled = json.loads(json.dumps(entry))
    except TypeError as e:
        raise ValueError(f"reasoning_gym: entries of task {task} are not JSON: {e}") from e
    answer = entry["answer"]
    if check and answer is not None:
        before, after = (items.score_answer(answer, e) for e in (entry, travelled))
        if after != before:
            raise ValueError(
                f"reasoning_gym: task {task} cannot be used: its entries lose their "
                "meaning as JSON, the scorer no longer accepts the right answer"
            )
    return Problem(
        question=entry["question"],
        answer="" if answer is None else str(answer),
        task=task,
        extra={"entry": travelled},
    )
