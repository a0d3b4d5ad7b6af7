"""One self-contained HTML file about one run, or several beside each other.

runs.py        reads run directories
held_out.py    what was reached on held-out prompts, the gain and its interval
curves.py      which metrics are drawn, and where the time of a step goes
charts.py      draws; figure.html.jinja: one chart
page.py        chooses what is shown; page.html.jinja lays it out; report.css, report.js
summary.py     adds up what the run did, also for the console and summary.json

The file needs no network; charts are inline SVG.
"""

from __future__ import annotations

from megarl.observability.report.page import write_report
from megarl.observability.report.runs import Run, load_run

__all__ = ["Run", "load_run", "write_report"]
