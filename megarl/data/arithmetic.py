"""Makes sums, such as "123+456" with the answer "579"."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from dataclasses import replace

from megarl.config.dataset import SourceConfig
from megarl.data.problem import Problem, in_split

_OPS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_COMMUTATIVE = "+*"
DEFAULT_COUNT = 1000
TEST_PERCENT = 20
_TRIES = 200  # draws per wanted problem before the level counts as exhausted


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
    rng, made = random.Random(seed), dict[str, Problem]()
    for _ in range(_TRIES * wanted + 10_000):
        if len(made) == wanted:
            break
        digits, op = rng.choice(levels), rng.choice(ops)
        a, b = _number(rng, digits), _number(rng, digits)
        question = f"{a}{op}{b}"
        if question not in made and in_split(_key(a, op, b), cfg.split, test_percent=TEST_PERCENT):
            made[question] = _problem(question, op, str(_OPS[op](a, b)), digits)
    if len(made) < wanted:
        raise _too_few(cfg, level, ops, len(made), wanted)
    return [  # every problem `demos` times; each time the teacher is careless by chance
        replace(p, response=_without_carry(p.question)) if rng.random() < careless else p
        for p in made.values()
        for _ in range(demos)
    ]


def _check_settings(ops: list[str], count: int, demos: int, careless: float) -> None:
    """Raises ValueError for a setting that `arithmetic` cannot take."""
    if not ops or set(ops) - set(_OPS):
        raise ValueError(f"arithmetic: ops={''.join(ops)!r}: use one or more of {list(_OPS)}")
    for name, number in (("count", count), ("demos", demos)):
        if number < 1:
            raise ValueError(f"arithmetic: {name}={number}: must be > 0")
    if not 0 <= careless <= 1 or (careless and set(ops) != {"+"}):
        raise ValueError(f"arithmetic: careless={careless}: a probability, and for ops='+' only")


def _problem(question: str, op: str, answer: str, digits: int) -> Problem:
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


def _number(rng: random.Random, digits: int) -> int:
    """Returns a random number of exactly `digits` digits; 0 has one."""
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _key(a: int, op: str, b: int) -> str:
    if op in _COMMUTATIVE:
        a, b = sorted((a, b))
    return f"{a}{op}{b}"
