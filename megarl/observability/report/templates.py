"""Fills the templates beside this file (page.html.jinja, and figure.html.jinja for one chart) and
those of the viewer, which shares the colours."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megarl.observability.report.formats import plain


def fill(template: str, **values: Any) -> Markup:
    """Returns the template's HTML; `values` that are not Markup are escaped."""
    return Markup(_environment().get_template(template).render(values))


@cache
def _environment() -> Environment:
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader([here, here.parent / "viewer"]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = plain
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment
