"""One HTML file that shows the episodes of a run, without network: `megarl view`.

page.py        chooses what the file holds, and writes it
viewer.html.jinja, viewer.css, viewer.js   the page; its colours are the report's

Lists cover all records; details are those of some groups, as `megarl.observability.episodes` packs
them, which the browser unpacks when it shows them.
"""

from __future__ import annotations

from megarl.observability.viewer.page import Written, write_viewer

__all__ = ["Written", "write_viewer"]
