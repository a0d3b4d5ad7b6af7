"""mkdocs hooks: write the configuration reference from the dataclasses, quote RLTrainer.step in the
README, and refuse remote assets.
"""

from __future__ import annotations

import logging
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

from megarl.config.recipes import RECIPES, BaseConfig
from megarl.config.schema import Key, children, show

MARK = "<!-- the keys -->"
NAMES = re.compile(r"^::: ((?:\w+ ?)+)$", re.M)
REMOTE = re.compile(r'(?:src|<link[^>]* href)="(https?://[^"]+)')


ROOT = Path(__file__).resolve().parents[1]
QUOTE = re.compile(r"(<!-- RLTrainer\.step, quoted .*? -->\n```python\n).*?(^```$)", re.S | re.M)


# [B, S] in docstrings is a shape, which autorefs takes for a reference
logging.getLogger("mkdocs.plugins.mkdocs_autorefs").setLevel(logging.ERROR)


def on_pre_build(**_: Any) -> None:
    """Quotes RLTrainer.step in the README; raises PluginError where the README was out of date."""
    path = ROOT / "README.md"
    if (text := path.read_text()) != (quoted := with_step(text)):
        path.write_text(quoted)
        raise PluginError("README.md quoted an older RLTrainer.step and is mended: commit it")


def with_step(readme: str) -> str:
    """Returns the README with RLTrainer.step as it stands in the source."""
    source = (ROOT / "megarl" / "trainer" / "rl.py").read_text()
    step = source.split("# --8<-- [start:step]\n")[1].split("    # --8<-- [end:step]")[0]
    return QUOTE.sub(lambda m: m[1] + textwrap.dedent(step).rstrip() + "\n" + m[2], readme)


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Writes the reference of the keys, and `::: A B` as a block of mkdocstrings for each name.
    Both rank below the other pages in the search."""
    if page is not None and (MARK in markdown or NAMES.search(markdown)):
        page.meta["search"] = {"boost": 0.3}
    markdown = markdown.replace(MARK, reference()) if MARK in markdown else markdown
    return NAMES.sub(lambda m: "\n\n".join(f"::: megarl.{x}" for x in m[1].split()), markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Refuses pages that load remote assets: readers may be offline and must not be tracked."""
    if remote := REMOTE.findall(output):
        raise PluginError(f"the page would load {remote}")
    return output


def reference() -> str:
    """Returns Markdown: the keys all recipes share, then each recipe's own, a table per section."""
    shared = {f.name for f in fields(BaseConfig)}
    parts = ["## Every recipe", *_group(list(children(BaseConfig)))]
    for name, cls in RECIPES.items():
        own = [k for k in children(cls) if k.name not in shared]
        parts += [f"## recipe: {name}", *_group(own)]
    return "\n\n".join(parts)


def _group(keys: Sequence[Key]) -> Iterator[str]:
    """Yields a table of the plain keys, then each section under its own heading."""
    plain = [k for k in keys if k.section is None]
    if plain:
        head = "| key | type | default | meaning |\n| --- | --- | --- | --- |\n"
        yield head + "\n".join(_row(k) for k in plain)
    for key in keys:
        if key.section is not None:
            off = " Null unless one of its keys is set." if key.nullable else ""
            yield f"### {key.name}\n\n{_sentence(key.help)}{off}"
            yield from _group(list(key.inner()))


def _row(key: Key) -> str:
    default = "required" if key.default is MISSING else _default(show(key.default))
    meaning = _cell(key.help)
    if key.choices:
        path = ", or `pkg.module:name`" if key.or_path else ""
        meaning += "<br>One of " + ", ".join(f"`{show(c)}`" for c in key.choices) + path
    return f"| `{key.name}` | {_cell(key.type_name)} | {default} | {meaning} |"


def _default(text: str) -> str:
    """Returns the cell of a default value; style.css lets a long one break anywhere."""
    return f"`{text}`" + ("{.long}" if len(text) > 30 else "")


def _cell(text: str) -> str:
    """Escapes text for a Markdown table."""
    for char in "|<>*_":
        text = text.replace(char, f"&#{ord(char)};")
    return text


def _sentence(text: str) -> str:
    return _cell(text[:1].upper() + text[1:]) + "."
