"""Prints a comparison: a row for each layer, its parts beside each other, and a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.cli.gap.compare import CHOICE, Comparison, Gap, LogpGaps, Runs
from megarl.cli.gap.sides import Subject
from megarl.engine.probe import EMBEDDING, FINAL_NORM, HEAD

_NAMES = {"server": "server", "hf": "transformers"}


def print_comparison(found: Comparison, runs: Runs, subject: Subject, which: str) -> None:
    """Prints tables and verdict; `which` says what the tokens are."""
    console = Console(highlight=False, markup=False)  # a path may look like either
    other = _NAMES[subject.against]
    of = subject.checkpoint or subject.engine.path
    head = f"{of}: trainer and {other} on {found.tokens} tokens, {which}"
    console.print(head, soft_wrap=True)  # a path that is broken in two cannot be copied
    console.print("Gaps as multiples of what rounding does at the same place:")
    console.print(layers_table(found.gaps))
    console.print(_unit(found.gaps))
    console.print(logp_table(found))
    for line in verdict(found, other):
        console.print(line, style="" if found.first is None else "bold")


def layers_table(gaps: Sequence[Gap]) -> Table:
    """Returns a row for each layer and a column for each part that any layer has; the parts before
    and behind the layers have rows of their own."""
    single = (EMBEDDING, FINAL_NORM, HEAD)
    columns = list(dict.fromkeys(g.part.name for g in gaps if g.part.name not in single))
    table = Table("layer", *columns)
    by_layer: dict[int, dict[str, Gap]] = {}
    for gap in gaps:
        by_layer.setdefault(gap.part.layer, {})[gap.part.name] = gap
    for layer, parts in sorted(by_layer.items()):
        alone = [name for name in single if name in parts]
        for name in alone:
            table.add_row(name, _cell(parts[name]), *[""] * (len(columns) - 1))
        if not alone:
            cells = (_cell(parts[name]) if name in parts else Text("") for name in columns)
            table.add_row(str(layer), *cells)
    return table


def _unit(gaps: Sequence[Gap]) -> str:
    """Returns what rounding does at most."""
    largest = max(
        (gap for gap in gaps if gap.part.name not in (CHOICE, HEAD)), key=lambda gap: gap.rounding
    )
    return f"Rounding makes at most {largest.rounding:.1g} of a part's size, at {place(largest)}."


def _cell(gap: Gap) -> Text:
    if gap.part.name == CHOICE:
        return Text(f"{gap.mean:.0f} tokens", style="bold red" if gap.is_bug else "")
    return Text(f"{gap.mean / gap.rounding:.3g}", style="bold red" if gap.is_bug else "")


def logp_table(found: Comparison) -> Table:
    """Returns the gaps of log-probabilities."""
    table = Table("log-probabilities, nats", "tokens", "mean |gap|", "largest", "k3")
    rows: Iterable[tuple[str, LogpGaps | None]] = [
        ("as each program routes" if found.logp_same_experts else "", found.logp),
        ("with the same experts", found.logp_same_experts),
    ]
    for name, gaps in rows:
        if gaps is not None:
            numbers = (f"{x:.2g}" for x in (gaps.mean, gaps.largest, gaps.k3))
            table.add_row(name, str(gaps.tokens), *numbers)
    return table


def verdict(found: Comparison, other: str) -> list[str]:
    """Returns the lines that say what was found; `other`: the program beside the trainer."""
    bug = found.first
    if bug is None:
        return [f"All of it is rounding: trainer and {other} compute the same model."]
    lines = [f"{place(bug)}: the first gap that is more than rounding. {_size(bug)}"]
    if found.experts:
        names = ", ".join(map(str, found.experts))
        lines.append(f"All tokens of these experts differ, and not all others: {names}.")
    if found.sides is not None:
        lines += _referee(found.sides, other)
    return lines


def place(gap: Gap) -> str:
    """Returns where a gap is: layer and part."""
    single = gap.part.name in (EMBEDDING, FINAL_NORM, HEAD)
    return gap.part.name if single else f"layer {gap.part.layer}, {gap.part.name}"


def _size(bug: Gap) -> str:
    if bug.part.name == CHOICE:
        return (
            f"{bug.mean:.0f} tokens would go to other experts, the first is token {bug.token}; "
            f"rounding moves {bug.rounding:.3g}."
        )
    unit = " nats" if bug.part.name == HEAD else ""
    return (
        f"It is {bug.mean:.2g}{unit} where rounding makes {bug.rounding:.2g}, and at most "
        f"{bug.worst:.2g}, at token {bug.token}, where rounding makes {bug.worst_rounding:.2g}."
    )


def _referee(sides: tuple[float, float], other: str) -> list[str]:
    """Returns whom transformers, in a wider dtype, agrees with."""
    off = [name for name, times in zip(("trainer", other), sides) if not times <= 1]
    if len(off) == 1:
        return [f"transformers, in a wider dtype, disagrees with the {off[0]} alone."]
    both = "both" if off else "neither by itself"
    return [f"transformers, in a wider dtype, disagrees with {both}."]
