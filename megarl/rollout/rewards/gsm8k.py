"""Scores maths answers: the last \\boxed{...}, else what math-verify reads out of the text."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any

from math_verify import parse as math_verify_parse
from math_verify import verify
from sympy import Number, Pow, UnevaluatedExpr, factorial

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?(?<!\d)\.\d+")
MAX_DIGITS, MAX_OPERAND = 300, 1000
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
_BOLD = re.compile(r"(?<![\d)])\*\*|\*\*(?![\d(-])")  # not the power in 2**3
# after a number math-verify would take it for a decimal point, or not see where the number ends
_SENTENCE_END = re.compile(r"(?<=[\d)])[.!?;](?=\s|$)")
_ENDING = re.compile(r"####\s*([^\n#]+)\s*\Z")  # of GSM8K's own solutions
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")  # sympy would not read them
_WORD = re.compile(r"[^\W\d_]{3,}")
_COMMAND = re.compile(r"\\[a-zA-Z]+")


def gsm8k_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: str,
    **row: Any,
) -> float:
    """Returns 1 if the completion's final answer equals `answer`, else 0."""
    found = final_answer(completion)
    if found is None:
        return 0.0
    # the pool bounds the time; math-verify's own timeouts need the main thread's signals
    return float(verify(_gold(answer), found, timeout_seconds=None))


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
        return None if inside is None else _parse(f"\\boxed{{{inside}}}")
    if ending := _ENDING.search(text):
        text = ending[1]
    text = _SENTENCE_END.sub(",", _BOLD.sub("", text.translate(_SYMBOLS)))
    found = _parse(text)
    numbers = list(_NUMBER.finditer(text))
    if found is None:
        return _value(numbers[-1]) if numbers and _stands_alone(numbers[-1]) else None
    number = found.args[0] if found.has(UnevaluatedExpr) and found.is_Mul else found  # of 50 %
    places = [m for m in numbers if number.is_Number and _value(m) == number]
    if not places:  # an expression, or LaTeX
        return found
    # math-verify takes the number after "answer", else the last one
    anchor = text.lower().rfind("answer")
    place = next((m for m in places if m.start() > anchor >= 0), places[-1])
    return found if _stands_alone(place) else None


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
    gold = _parse(f"\\boxed{{{text}}}")
    words = _WORD.search(_COMMAND.sub(" ", text))
    if gold is None or (words and getattr(gold, "free_symbols", None)):
        raise ValueError(f"the answer {text!r} is neither a number nor an expression in LaTeX")
    return gold


def _parse(text: str) -> Any:
    """Returns the sympy value of what math-verify extracts; None if it can read nothing."""
    if _LARGE_BINOMIAL.search(text):
        return None
    found = math_verify_parse(text, parsing_timeout=None, fallback_mode="no_fallback")
    return found[0] if found and _computable(found[0]) else None


def _computable(value: Any) -> bool:
    """Returns whether comparing it takes little time: not where a power or a large number is an
    exponent, or has its factorial taken (9^9^9 would run into reward_timeout, though it is
    merely wrong).
    """
    operands = [p.exp for p in value.atoms(Pow)] + [f.args[0] for f in value.atoms(factorial)]
    return not any(
        any(p.exp != -1 for p in operand.atoms(Pow))
        or any(abs(n) > MAX_OPERAND for n in operand.atoms(Number))
        for operand in operands
        if operand.is_number
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
    """Raises ImportError where LaTeX is not read as with the antlr4 that pyproject.toml names:
    math-verify swallows its parser's errors, so that right answers would earn 0.
    """
    for latex, value in ((r"\frac{5}{6}", "5/6"), (r"50\%", "1/2"), (r"\sqrt{16}", "4")):
        found = _parse(f"\\boxed{{{latex}}}")
        if found is None or found.doit() != _parse(f"\\boxed{{{value}}}"):
            raise ImportError(
                f"math-verify reads {latex} as {found} with antlr4-python3-runtime "
                f"{version('antlr4-python3-runtime')}; install the version megarl asks for: "
                "pip install megarl"
            )


_check_latex()
