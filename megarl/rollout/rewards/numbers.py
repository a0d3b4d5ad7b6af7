"""Reads numbers as people and language models write them, for the judge and the grader."""

from __future__ import annotations

import re
from decimal import Context, Decimal
from fractions import Fraction

MAX_DIGITS = 300  # of a number, written out
_GAP = r"\\[ ,;!]|~|\{,\}|[\u00a0\u2009\u202f]"
_FRAC = re.compile(r"\\[dt]?frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))")
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s*(?:(?P<decimal>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?0*\d{1,3})?)"
    r"|(?:(?P<whole>\d+)\s+)?(?P<top>\d+)\s*/\s*(?P<bottom>\d+))"
)


def _groups(separator: str) -> re.Pattern[str]:
    """Returns the pattern of a number in groups; its second group is what makes it no number."""
    groups = rf"(?!0)\d{{1,3}}({separator})\d{{3}}(?:\1\d{{3}})*+"
    return re.compile(rf"(?<![\d.,_]){groups}(?=(\d|(?:{separator})\d|\s*/)?)")


_GROUPS = _groups(rf"{_GAP}|[ ,_]")
_GROUPS_IN_TEXT = _groups(_GAP)
_GROUPS_IN_LATEX = _groups(rf"{_GAP}| ")


def _joined(groups: re.Pattern[str], text: str) -> str:
    return groups.sub(lambda m: m[0] if m[2] else m[0].replace(m[1], ""), text)


def without_groups(text: str, *, spaces: bool) -> str:
    r"""Returns a text whose numbers have no digit groups by `\,`, `~`, `{,}` or a narrow space.
    spaces: whether a plain space groups digits, too, as it does where a number stands alone.

    >>> without_groups(r"x = 10\,000", spaces=False)
    'x = 10000'
    """
    return _joined(_GROUPS_IN_LATEX if spaces else _GROUPS_IN_TEXT, text)


def read_number(text: str) -> Fraction | None:
    r"""Returns the number that the whole text spells; None if it is no number, or takes more than
    MAX_DIGITS digits. It may have a sign, a decimal point, an exponent, groups of three digits by
    one separator, and it may be a fraction or a mixed number. A decimal comma ("1,5") is not read.

    >>> [float(read_number(text)) for text in ("-.5", "12.", "1e-1", r"10\,000", "3 1/2", "1_000")]
    [-0.5, 12.0, 0.1, 10000.0, 3.5, 1000.0]
    """
    text = text.strip().replace("−", "-")
    if len(text) > MAX_DIGITS:
        return None
    text = _FRAC.sub(lambda m: f" {m[1] or m[3]}/{m[2] or m[4]}", _joined(_GROUPS, text))
    found = _NUMBER.fullmatch(re.sub(_GAP, " ", text).strip())
    if found is None:
        return None
    if found["decimal"]:
        number = Decimal(found["decimal"])
        if abs(number.adjusted()) > MAX_DIGITS:
            return None
        value = Fraction(number)
    elif int(found["bottom"]) == 0:
        return None
    else:
        value = Fraction(int(found["top"]), int(found["bottom"])) + int(found["whole"] or 0)
    return -value if found["sign"] == "-" else value


def written_plainly(text: str) -> str | None:
    r"""Returns the number that the whole text spells as digits, or as one fraction if it is written
    as a fraction; None if it is no number.

    >>> [written_plainly(text) for text in ("1e3", "1.50e-1", "3 1/2", "0x10")]
    ['1000', '0.15', '7/2', None]
    """
    number = read_number(text)
    if number is None or number.denominator == 1 or "/" in text or "frac" in text:
        return None if number is None else str(number)
    exact = Context(prec=3 * MAX_DIGITS)
    return f"{exact.divide(Decimal(number.numerator), Decimal(number.denominator)):f}"
