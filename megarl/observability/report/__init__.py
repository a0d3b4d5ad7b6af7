"""One self-contained HTML file about one run, or several beside each other.

runs.py        reads run directories
held_out.py    what was reached on held-out prompts, the gain and its interval
metrics.py     which curves are drawn; phases.py: where the time of a step goes
bands.py       what earlier runs did, behind a curve
svg.py         draws, on the axes of scale.py; figure.html.jinja: one chart
page.py        chooses what is shown; page.html.jinja lays it out; report.css, report.js
templates.py   fills the templates
summary.py     adds up what the run did, also for the console and summary.json

The file needs no network; charts are inline SVG.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.observability.report.bands import check_bands
from megarl.observability.report.page import render_page
from megarl.observability.report.runs import Run, load_run

__all__ = ["Run", "load_run", "write_report"]


def write_report(
    path: str | Path,
    runs: Sequence[Run | str | Path],
    *,
    band: Sequence[Run | str | Path] = (),
    title: str | None = None,
    subtitle: str = "",
    samples: Sequence[Mapping[str, Any]] | None = None,
    config: str | None = None,
    max_samples: int = 12,
) -> Path:
    """Writes the report of `runs` to `path` and returns it.

    runs: run directories (stats.jsonl, samples.jsonl, config.yaml), "label=directory", or `Run`s;
    the first is the one the report is about, the others stand beside it (a control, other seeds).
    band: earlier runs, of which every curve shows the range and the median at each step.
    title: None is the first run's label. samples: records {"when": "before"|"after", "prompt",
    "completion", "answer", "reward"} and, of several turns, "turns" (trainer/transcript.py); None
    takes the first run's. config: text; None likewise. Secrets in it are masked. Raises ValueError
    where no run is named, or an earlier one shares no metric with the first.
    """
    if not runs:
        raise ValueError("write_report: name at least one run directory")
    loaded, earlier = (
        [r if isinstance(r, Run) else load_run(r) for r in part] for part in (runs, band)
    )
    check_bands(loaded[0], earlier)
    html = render_page(
        loaded,
        earlier=earlier,
        title=title or loaded[0].label,
        subtitle=subtitle,
        samples=list(loaded[0].samples if samples is None else samples),
        config=loaded[0].config if config is None else config,
        max_samples=max_samples,
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")
    return path
