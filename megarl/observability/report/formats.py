"""Writes numbers as the report and the console's summary show them."""

from __future__ import annotations


def percent(value: float) -> str:
    """Writes a share as 12.3%."""
    return f"{100 * value:.1f}%"


def plain(value: float) -> str:
    """Writes a number short enough for an axis, with three digits that matter."""
    if value == 0:
        return "0"
    if abs(value) >= 100_000 or abs(value) < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def signed(value: float) -> str:
    """Writes a number with its sign."""
    return f"+{plain(value)}" if value > 0 else plain(value)


def seconds(value: float) -> str:
    """Writes seconds with their unit."""
    return "0" if value == 0 else f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
