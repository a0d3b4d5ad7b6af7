"""Scores maths answers: the last \\boxed{...}, else what math-verify reads out of the text."""

from __future__ import annotations

import logging
import re
from importlib.metadata import version
from typing import Any

from math_verify import parse as math_verify_parse
from math_verify import verify
from sympy import (
    Add,
    Derivative,
    Integral,
    Limit,
    Number,
    Pow,
    Product,
    Sum,
    UnevaluatedExpr,
    factorial,
    factorial2,
    subfactorial,
)

from megarl.rollout.rewards.numbers import MAX_DIGITS, without_groups, written_plainly
from megarl.rollout.rewards.results import TooMuchWork, bounded

for _part in ("parser", "grader"):  # megarl limits the time of a reward itself
    logging.getLogger(f"math_verify.{_part}").addFilter(
        lambda record: not str(record.msg).startswith("Timeout is disabled")
    )

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?(?<!\d)\.\d+")
MAX_OPERAND, MAX_SUM_EXPONENT = 1000, 20
_FACTORIALS = factorial, factorial2, subfactorial
_POWER = re.compile(r"\d\.?\s*[eE]\s*[+-]?\s*0*(\d{3,18})")  # of ten, in E notation
_LARGE_BINOMIAL = re.compile(r"binom\s*\{\s*\d{4}")  # math-verify computes it as it reads
# what makes a number part of something larger: an expression, a range, a date, a name
_BEFORE = re.compile(
    r"[\w.]$|\w\($|\d[,:]$|\w\s*[+^]\s*\$?$|[\d)%xyzn]\s*[-*/]+\s*\$?$"
    r"|\d[$%]?\s*to\s*\$?$|between\s+\S+\s+and\s+\$?$"
)
_AFTER = re.compile(
    r"%?\s*[-*/]+\s*\$?[\d(]|\s*[+^]|[⁰¹²³⁴-⁹]|[,:.]\d|e\d|[xyzn]\b|[$%]?\s*to\s+\$?-?\d", re.ASCII
)
_SYMBOLS = str.maketrans({"−": "-", "–": "-", "—": "-", "×": "*", "·": "*", "÷": "/"})
# with words behind it, perhaps. Of some versions of antlr4 math-verify reads none inside the box
_PERCENT = re.compile(
    r"(?:\\boxed\{|\$)\s*(-?[\d.,]*\d)\s*\\?%\s*(?:\\(?:text|mathrm)\{[^{}]*\}\s*)?[}$]"
)
_BOLD = re.compile(r"(?<![\d)])\*\*|\*\*(?![\d(-])")  # not the power in 2**3
# after a number math-verify would take it for a decimal point, or not see where the number ends
_SENTENCE_END = re.compile(r"(?<=[\d)])[.!?;](?=\s|$)")
_ENDING = re.compile(r"####\s*([^\n#]+)\s*\Z")  # of GSM8K's own solutions
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")  # sympy would not read them
_WORD = re.compile(r"[^\W\d_]{3,}")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
# math-verify reads these as products: of Euler's e, of a variable x, of numbers that have a gap
_MISREAD = re.compile(r"\d\.?[eE][-+]?\d|(?<![\w.])0[xXoObB][\da-fA-F]|\d(?:\s|~|\\[ ,;!])+\d")
_ARGUMENTS = re.compile(r"\\[dt]?(?:frac|binom)\s*\d\s*\d")


@bounded
def gsm8k_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: str,
    **row: Any,
) -> float:
    """Returns 1 if the completion's final answer equals `answer`, else 0, also for one that cannot
    be read; one that takes too much work to compare counts as reward/late, too. Raises ValueError
    for an `answer` that is none."""
    gold = _gold(answer)
    try:
        answer_value = final_answer(completion)
        # `bounded` bounds the time, for both
        return float(answer_value is not None and verify(gold, answer_value, timeout_seconds=None))
    except Exception:
        return 0.0


def check_row(*, answer: str, **row: Any) -> None:
    """Raises ValueError for an answer with which nothing can be compared."""
    if not _NUMBER.fullmatch(str(answer)):
        _gold(answer)


def final_answer(text: str) -> Any:
    """Returns the sympy value of what stands in the last \\boxed{...}; without one, of what
    math-verify finds (after a closing ####, if there is one), else of the last number. A number
    counts only where it is one of its own, never as part of an expression or a range. None without
    any."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        inside = _braced(text[start + len("\\boxed{") :])
        return None if inside is None else _parse_alone(inside)
    if ending := _ENDING.search(text):
        text = ending[1]
    text = written_plainly(text) or without_groups(text, spaces=False)
    text = _SENTENCE_END.sub(",", _BOLD.sub("", text.translate(_SYMBOLS)))
    value = _parse(text)
    numbers = list(_NUMBER.finditer(text))
    if value is None:
        return _value(numbers[-1]) if numbers and _stands_alone(numbers[-1]) else None
    number = value.args[0] if value.has(UnevaluatedExpr) and value.is_Mul else value  # of 50 %
    places = [m for m in numbers if number.is_Number and _value(m) == number]
    if not places:  # an expression, or LaTeX
        return value
    # math-verify takes the number after "answer", else the last one
    anchor = text.lower().rfind("answer")
    place = next((m for m in places if m.start() > anchor >= 0), places[-1])
    return value if _stands_alone(place) else None


def _stands_alone(number: re.Match[str]) -> bool:
    before, after = number.string[: number.start()], number.string[number.end() :]
    subtracted = number.group().startswith("-") and re.search(r"[\d)]\s*$", before)
    return not (subtracted or _BEFORE.search(before[-40:]) or _AFTER.match(after))


def _value(number: re.Match[str]) -> Any:
    """Returns the value, None for a number that is too long to be an answer (int() refuses 4300
    digits)."""
    text = _LEADING_ZEROS.sub("", number.group().replace(",", ""))
    return Number(text) if len(text) <= MAX_DIGITS else None


def _gold(answer: str) -> Any:
    """Returns the sympy value of a gold answer. Raises ValueError where it has none, and for words:
    math-verify reads them as products of their letters."""
    text = str(answer)
    try:
        gold = _parse_alone(text)
    except TooMuchWork:
        gold = None
    words = _WORD.search(_COMMAND.sub(" ", text))
    if gold is None or (words and getattr(gold, "free_symbols", None)):
        raise ValueError(f"the answer {text!r} is neither a number nor an expression in LaTeX")
    return gold


def _parse_alone(text: str) -> Any:
    """Returns the sympy value of a text that holds one value and nothing else; None for numbers
    that math-verify takes for products. Raises TooMuchWork as `_parse`."""
    text = written_plainly(text) or without_groups(text, spaces=True)
    _refuse_work(text)
    return None if _MISREAD.search(_ARGUMENTS.sub(" ", text)) else _parse(f"\\boxed{{{text}}}")


def _refuse_work(text: str) -> None:
    """Raises TooMuchWork if math-verify would compute for minutes while it reads the text."""
    if _LARGE_BINOMIAL.search(text) or any(int(m[1]) > MAX_DIGITS for m in _POWER.finditer(text)):
        raise TooMuchWork


def _parse(text: str) -> Any:
    """Returns the sympy value of what math-verify extracts; None if it can read nothing. Raises
    TooMuchWork for what nobody could compare."""
    _refuse_work(text)
    text = _PERCENT.sub(r"$\1$\\%", text)
    values = math_verify_parse(text, parsing_timeout=None, fallback_mode="no_fallback")
    if values and not _computable(values[0]):
        raise TooMuchWork
    return values[0] if values else None


def _computable(value: Any) -> bool:
    """Returns whether comparing it takes little time: not where a power, a factorial or a large
    number is an exponent, or has its factorial taken (9^9^9, 18!!), where a sum has a large
    exponent, or where a sum, a product, an integral, a derivative or a limit is left to do."""
    if value.has(Sum, Product, Integral, Derivative, Limit):
        return False
    powers = value.atoms(Pow)
    operands = [p.exp for p in powers] + [f.args[0] for f in value.atoms(*_FACTORIALS)]
    steep = any(
        any(p.exp != -1 for p in operand.atoms(Pow))
        or operand.has(*_FACTORIALS)
        or any(abs(n) > MAX_OPERAND for n in operand.atoms(Number))
        for operand in operands
        if operand.is_number
    )
    return not steep and not any(
        p.base.has(Add) and p.exp.is_number and abs(p.exp) > MAX_SUM_EXPONENT for p in powers
    )


def _braced(text: str) -> str | None:
    """Returns the text up to the brace that closes the one before `text`; None if it was never
    closed."""
    depth = 1
    for i, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[:i].strip()
    return None


def _check_latex() -> None:
    """Raises ImportError where LaTeX is not read: math-verify swallows its parser's errors, such as
    of an antlr4 that it has no parser for, so that right answers would earn 0."""
    for latex, value in ((r"\frac{5}{6}", "5/6"), (r"50\%", "1/2"), (r"\sqrt{16}", "4")):
        reading = _parse(f"\\boxed{{{latex}}}")
        if reading is None or reading.doit() != _parse(f"\\boxed{{{value}}}"):
            raise ImportError(
                f"math-verify reads {latex} as {reading} with antlr4-python3-runtime "
                f"{version('antlr4-python3-runtime')}; install 4.9.3, 4.11.0 or 4.13.2"
            )


_check_latex()
