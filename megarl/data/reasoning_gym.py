"""Makes tasks of the reasoning_gym library, with the entries its scorers need."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from megarl.config.dataset import SourceConfig
from megarl.data.problem import Problem, in_split, stable_hash
from megarl.data.shares import Shares

DEFAULT_COUNT = 1000
TEST_PERCENT = 50
_TRIES = 20  # items generated per wanted one before the task counts as exhausted
# the library seeds item i with seed + i: seeds this far apart never meet
_SEED_STRIDE = 1 << 32


def reasoning_gym(
    cfg: SourceConfig,
    *,
    seed: int,
    task: Any = None,
    curriculum_level: int | None = None,
    **options: Any,
) -> list[Problem]:
    """Makes distinct problems of the library's `task`, a name; `options` are the task's own. With
    `curriculum_level` they are beside what the task's own curriculum has at that level, from 0.

    Several tasks: {name: {weight: 2, curriculum_level: 1, and its options}}, in one order in which
    each has its share of every beginning; the weight is 1 where it is left out. Raises ValueError
    for a task that there is not, or that gives too few.

    The split is decided by a hash of the question, so train and test never share one.
    """
    count = DEFAULT_COUNT if cfg.size is None else cfg.size
    if not isinstance(task, dict):
        return list(_problems(cfg, seed, task, count, options, curriculum_level))
    if options or curriculum_level is not None:
        raise ValueError(
            f"reasoning_gym: options {sorted(options) or ['curriculum_level']} beside several "
            "tasks; set them below each task's name"
        )
    tasks = {name: _own(name, own) for name, own in task.items()}
    if not tasks:
        raise ValueError("reasoning_gym: options.task={}: name a task at least")
    shares = Shares({name: own.pop("weight", 1.0) for name, own in tasks.items()})
    order = [shares.next() for _ in range(count)]
    made = {
        name: _problems(cfg, seed, name, n, tasks[name], tasks[name].pop("curriculum_level", None))
        for name, n in Counter(order).items()
    }
    return [next(made[name]) for name in order]


def _own(name: str, own: Any) -> dict[str, Any]:
    """Returns the weight and the options of one of several tasks."""
    own = {} if own is None else own
    weight = own.get("weight", 1.0) if isinstance(own, dict) else None
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise ValueError(
            f"reasoning_gym: options.task.{name}={own!r}: give it options and a weight above 0"
        )
    return dict(own)


def _problems(
    cfg: SourceConfig,
    seed: int,
    task: Any,
    count: int,
    options: dict[str, Any],
    level: int | None,
) -> Iterator[Problem]:
    """Yields `count` distinct problems of one task."""
    import reasoning_gym as library

    known = library.factory.DATASETS
    if not isinstance(task, str) or task not in known:
        raise ValueError(f"reasoning_gym: options.task={task!r}: use one of {sorted(known)}")
    limit = _TRIES * count + 1000
    try:
        if level is not None:
            options = _at_level(task, level) | options
        items = library.create_dataset(task, seed=_item_seed(seed), size=limit, **options)
    except (TypeError, AssertionError) as e:
        raise ValueError(f"reasoning_gym: task {task} refuses options {options}: {e}") from e
    made: set[str] = set()
    for i in range(limit):
        if len(made) == count:
            return
        entry = items[i]
        question = entry["question"]
        if question not in made and in_split(question, cfg.split, test_percent=TEST_PERCENT):
            yield _problem(entry, task, items, check=not made)
            made.add(question)
    raise ValueError(
        f"reasoning_gym: task {task} gave only {len(made)} distinct {cfg.split} problems in "
        f"{limit}, {count} wanted; lower size or make the task harder"
    )


def _at_level(task: str, level: int) -> dict[str, Any]:
    """Returns the options that the task's own curriculum has at a level."""
    from reasoning_gym.factory import create_curriculum, has_curriculum

    if not has_curriculum(task):
        raise ValueError(f"reasoning_gym: curriculum_level={level}: task {task} has no curriculum")
    curriculum = create_curriculum(task)
    top = max((len(a.levels) for a in curriculum.attributes.values()), default=0) - 1
    if not 0 <= level <= top:
        raise ValueError(
            f"reasoning_gym: curriculum_level={level}: task {task} has levels 0 to {top}"
        )
    curriculum.set_global_level(level)
    made = vars(curriculum.generate_configuration())
    return {k: v for k, v in made.items() if k not in ("seed", "size")}


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
