"""Makes problems: sums, such as "123+456" with the answer "579", and tasks of the reasoning_gym
library, with the entries its scorers need."""

from __future__ import annotations

import json
import operator
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from megarl.config.dataset import SourceConfig
from megarl.data.rows import Problem, Shares, stable_hash
from megarl.utils.extras import require

DEFAULT_COUNT = 1000
_OPS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_COMMUTATIVE = "+*"
_SUMS_FOR_TEST, _TASKS_FOR_TEST = 20, 50  # percent of the problems
# draws per wanted problem before a level or a task counts as exhausted
_DRAWS, _ITEMS = 200, 20
# the library seeds item i with seed + i: seeds this far apart never meet
_SEED_STRIDE = 1 << 32
T = TypeVar("T")


def arithmetic(
    cfg: SourceConfig,
    *,
    seed: int,
    level: int | list[int] = 2,
    ops: str | list[str] = "+",
    count: int = DEFAULT_COUNT,
    demos: int = 1,
    careless: float = 0.0,
) -> list[Problem]:
    """Makes distinct problems. Raises ValueError where there are not enough of them.

    level: digits of a and b, one number or a list to draw from. ops: among "+-*". count: problems
    made when `cfg.size` is null. For SFT, demos: demonstrations per problem; careless: the
    probability that one forgets every carry (sums only). Of pairs, what is rejected is the sum
    without its carries, or else an answer with another last digit.

    Train and test never share a problem, nor its mirror image b+a, for any two seeds.
    """
    levels, ops = _levels(level), list(ops)
    _check_settings(ops, count, demos, careless)
    wanted = count if cfg.size is None else cfg.size
    if wanted > (most := len(set(ops)) * sum(10 ** (2 * n) for n in set(levels))):
        raise _too_few(cfg, level, ops, most, wanted)
    rng = random.Random(seed)
    draws = _sums(rng, levels, ops, _DRAWS * wanted + 10_000)
    distinct = _distinct(draws, wanted, cfg.split, test_percent=_SUMS_FOR_TEST)
    problems = [_problem(*sum_) for sum_ in distinct]
    if len(problems) < wanted:
        raise _too_few(cfg, level, ops, len(problems), wanted)
    return [  # every problem `demos` times; each time the teacher is careless by chance
        replace(p, response=_without_carry(p.question)) if rng.random() < careless else p
        for p in problems
        for _ in range(demos)
    ]


def _distinct(
    candidates: Iterable[tuple[str, str, T]], count: int, split: str, *, test_percent: int
) -> Iterator[T]:
    """Yields the first `count` of (question, key, value) that differ in their questions and whose
    keys are of the split."""
    seen: set[str] = set()
    for question, key, value in candidates:
        if question not in seen and in_split(key, split, test_percent=test_percent):
            yield value
            seen.add(question)
            if len(seen) == count:
                return


def in_split(key: str, split: str, *, test_percent: int) -> bool:
    """Returns whether the problem with this key belongs to `split`: never to both, whatever the
    seed. Raises ValueError for a split that is neither train nor test."""
    if split not in ("train", "test"):
        raise ValueError(f"split={split}: generated problems are of train or test")
    return (stable_hash(key) % 100 < test_percent) == (split == "test")


def _check_settings(ops: list[str], count: int, demos: int, careless: float) -> None:
    """Raises ValueError for a setting that `arithmetic` cannot take."""
    if not ops or set(ops) - set(_OPS):
        raise ValueError(f"arithmetic: ops={''.join(ops)!r}: use one or more of {list(_OPS)}")
    for name, number in (("count", count), ("demos", demos)):
        if number < 1:
            raise ValueError(f"arithmetic: {name}={number}: must be > 0")
    if not 0 <= careless <= 1 or (careless and set(ops) != {"+"}):
        raise ValueError(f"arithmetic: careless={careless}: a probability, and for ops='+' only")


def _sums(
    rng: random.Random, levels: list[int], ops: list[str], count: int
) -> Iterator[tuple[str, str, tuple[int, str, int, int]]]:
    """Yields the questions of sums, a key that a sum has in common with its mirror, and what
    `_problem` takes."""
    for _ in range(count):
        digits, op = rng.choice(levels), rng.choice(ops)
        least, end = 10 ** (digits - 1) if digits > 1 else 0, 10**digits
        a, b = rng.randrange(least, end), rng.randrange(least, end)
        smaller, larger = (b, a) if op in _COMMUTATIVE and b < a else (a, b)
        yield f"{a}{op}{b}", f"{smaller}{op}{larger}", (a, op, b, digits)


def _problem(a: int, op: str, b: int, digits: int) -> Problem:
    question, answer = f"{a}{op}{b}", str(_OPS[op](a, b))
    return Problem(
        question=question,
        answer=answer,
        task=f"arithmetic{op}{digits}",
        wrong=_wrong(question, op, answer),
        extra={"difficulty": digits},
    )


def _too_few(
    cfg: SourceConfig, level: int | list[int], ops: list[str], there: int, wanted: int
) -> ValueError:
    return ValueError(
        f"arithmetic: level={level} ops={''.join(ops)!r} has only about {there} distinct "
        f"{cfg.split} problems, {wanted} wanted; lower size or raise level"
    )


def _without_carry(question: str) -> str:
    """Returns a sum without its carries, every column by itself modulo 10: "57+68" gives "15"."""
    a, b = question.split("+")
    width = max(len(a), len(b))
    columns = zip(a.zfill(width), b.zfill(width), strict=True)
    return str(int("".join(str((int(x) + int(y)) % 10) for x, y in columns)))


def _wrong(question: str, op: str, answer: str) -> str:
    """Returns a wrong answer: a sum without its carries, else one with the next last digit."""
    careless = _without_carry(question) if op == "+" else answer
    return careless if careless != answer else answer[:-1] + str((int(answer[-1]) + 1) % 10)


def _levels(level: int | Sequence[int]) -> list[int]:
    levels = [level] if isinstance(level, int) else list(level)
    if not levels or not all(isinstance(n, int) and 1 <= n <= 18 for n in levels):
        raise ValueError(f"arithmetic: level={level!r}: use digits from 1 to 18, or a list of them")
    return levels


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
    problems = {
        name: _problems(cfg, seed, name, n, tasks[name], tasks[name].pop("curriculum_level", None))
        for name, n in Counter(order).items()
    }
    return [next(problems[name]) for name in order]


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
    library = require("reasoning_gym", extra="reasoning-gym", user="type=reasoning_gym")
    known = library.factory.DATASETS
    if not isinstance(task, str) or task not in known:
        raise ValueError(f"reasoning_gym: options.task={task!r}: use one of {sorted(known)}")
    limit = _ITEMS * count + 1000
    try:
        if level is not None:
            options = _at_level(task, level) | options
        item_seed = stable_hash(f"reasoning_gym {seed}") % (1 << 20) * _SEED_STRIDE
        items = library.create_dataset(task, seed=item_seed, size=limit, **options)
    except (TypeError, AssertionError) as e:
        raise ValueError(f"reasoning_gym: task {task} refuses options {options}: {e}") from e
    entries = (items[i] for i in range(limit))
    drawn = ((e["question"], e["question"], e) for e in entries)
    number = 0
    for entry in _distinct(drawn, count, cfg.split, test_percent=_TASKS_FOR_TEST):
        yield _task(entry, task, items, check=not number)
        number += 1
    if number < count:
        raise ValueError(
            f"reasoning_gym: task {task} gave only {number} distinct {cfg.split} problems in "
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
    options = vars(curriculum.generate_configuration())
    return {k: v for k, v in options.items() if k not in ("seed", "size")}


def _task(entry: dict[str, Any], task: str, items: Any, *, check: bool) -> Problem:
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
