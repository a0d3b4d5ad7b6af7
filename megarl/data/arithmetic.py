"""Generated sums: "123+456", answer "579"."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megarl.config.dataset import DatasetConfig
from megarl.data.problem import Problem, in_split, take_options

_OPS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_COMMUTATIVE = "+*"
DEFAULT_COUNT = 1000
_DEFAULTS = {"level": 2, "ops": "+", "count": DEFAULT_COUNT, "demos": 1, "careless": 0.0}
TEST_PERCENT = 20
_TRIES = 200  # draws per wanted problem before the level counts as exhausted


def arithmetic(cfg: DatasetConfig, *, seed: int) -> list[Problem]:
    """Distinct problems. options: level (digits of a and b, one number or a list to draw from),
    ops (among "+-*"), count (problems made when `size` is null); for SFT demos (demonstrations per
    problem) and careless (the probability that one forgets every carry, sums only).

    Train and test never share a problem, nor its mirror image b+a, for any two seeds.
    """
    options = take_options(cfg.options, _DEFAULTS, of="arithmetic", lists=("level", "ops"))
    levels, ops = _levels(options["level"]), list(options["ops"])
    if not ops or set(ops) - set(_OPS):
        raise ValueError(f"arithmetic: ops={options['ops']!r}: use one or more of {list(_OPS)}")
    for name in ("count", "demos"):
        if options[name] < 1:
            raise ValueError(f"arithmetic: {name}={options[name]}: must be > 0")
    count = options["count"] if cfg.size is None else cfg.size
    if count > (most := len(set(ops)) * sum(10 ** (2 * n) for n in set(levels))):
        raise _too_few(cfg, options, most, count)
    rng, made = random.Random(seed), dict[str, Problem]()
    for _ in range(_TRIES * count + 10_000):
        if len(made) == count:
            break
        level, op = rng.choice(levels), rng.choice(ops)
        a, b = _number(rng, level), _number(rng, level)
        if in_split(_key(a, op, b), cfg.split, test_percent=TEST_PERCENT):
            question = f"{a}{op}{b}"
            made[question] = Problem(
                question=question, answer=str(_OPS[op](a, b)), task=f"arithmetic{op}{level}"
            )
    if len(made) < count:
        raise _too_few(cfg, options, len(made), count)
    return _demonstrate(list(made.values()), options, rng)


def _too_few(cfg: DatasetConfig, options: dict[str, Any], there: int, count: int) -> ValueError:
    return ValueError(
        f"arithmetic: level={options['level']} ops={options['ops']!r} has only about "
        f"{there} distinct {cfg.split} problems, {count} wanted; lower size or raise level"
    )


def _demonstrate(
    problems: list[Problem], options: dict[str, Any], rng: random.Random
) -> list[Problem]:
    """Every problem `demos` times; each time the teacher is careless by chance."""
    demos, careless = options["demos"], options["careless"]
    if not 0 <= careless <= 1 or (careless and set(options["ops"]) != {"+"}):
        raise ValueError(f"arithmetic: careless={careless}: a probability, and for ops='+' only")
    return [
        replace(p, response=_without_carry(p.question) if rng.random() < careless else None)
        for p in problems
        for _ in range(demos)
    ]


def _without_carry(question: str) -> str:
    """ "57+68" gives "15": every column by itself, modulo 10."""
    a, b = question.split("+")
    width = max(len(a), len(b))
    columns = zip(a.zfill(width), b.zfill(width), strict=True)
    return str(int("".join(str((int(x) + int(y)) % 10) for x, y in columns)))


def _levels(level: int | Sequence[int]) -> list[int]:
    levels = [level] if isinstance(level, int) else list(level)
    if not levels or not all(isinstance(n, int) and 1 <= n <= 18 for n in levels):
        raise ValueError(f"arithmetic: level={level!r}: use digits from 1 to 18, or a list of them")
    return levels


def _number(rng: random.Random, digits: int) -> int:
    """A number of exactly `digits` digits; 0 has one."""
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _key(a: int, op: str, b: int) -> str:
    if op in _COMMUTATIVE:
        a, b = sorted((a, b))
    return f"{a}{op}{b}"
