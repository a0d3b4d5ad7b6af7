"""Numbers as the report and the console's summary write them."""

from __future__ import annotations


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def plain(value: float) -> str:
    """Short enough for an axis, three digits that matter."""
    if value == 0:
        return "0"
    if abs(value) >= 100_000 or abs(value) < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def signed(value: float) -> str:
    return f"+{plain(value)}" if value > 0 else plain(value)


def seconds(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
