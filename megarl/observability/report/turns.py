"""Draws who holds the devices' memory, where servers and trainers use them in turn."""

from __future__ import annotations

from markupsafe import Markup

from megarl.observability.report.formats import plain
from megarl.observability.report.runs import Run
from megarl.observability.report.svg import StackedChart, stacked_chart

TURNS = ("generate", "train", "sync")  # of a step, in order
# part -> its name and colour class
PARTS = {
    "server_weights": ("server weights", 5),
    "server_kv_cache": ("server KV cache", 3),
    "params": ("trainer weights", 2),
    "optimizer": ("trainer optimizer", 1),
    "grads": ("trainer gradients", 4),
}
_MAX_STEPS = 16


def memory_by_turn(run: Run) -> Markup:
    """Draws what each part holds at the end of every turn, stacked, in the latest steps; nothing
    for a run without turns."""
    rows = [row for row in run.rows if row["step"] and f"memory/{TURNS[0]}/params_gib" in row]
    rows = rows[-_MAX_STEPS:]
    if not rows:
        return Markup()

    def held(part: str) -> list[float]:
        keys = [f"memory/{turn}/{part}_gib" for turn in TURNS]
        return [float(row.get(key) or 0.0) for row in rows for key in keys]

    # the turns of a step stand together
    xs = [row["step"] + i / 4 for row in rows for i in (-1, 0, 1)]
    return stacked_chart(
        StackedChart(
            title="Memory by turn",
            note="GiB of a device at the end of each step's " + ", ".join(TURNS),
            xs=xs,
            layers=[(label, color, held(part)) for part, (label, color) in PARTS.items()],
            format=plain,
            places=[f"step {row['step']}, {turn}" for row in rows for turn in TURNS],
        )
    )
