"""mkdocs hooks: generate the parts of pages that repeat the code, and refuse remote assets.

The generated parts are committed, so that they can be read without the site: the step of RLTrainer
in the README, docs/keys.md from the dataclasses, and the tables of docs/api.md from docstrings.
"""

from __future__ import annotations

import inspect
import logging
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

import megarl
from megarl.config.recipes import RECIPES, BaseConfig
from megarl.config.schema import Key, children, show

NAMES = re.compile(r"^(<!-- ::: ((?:\w+ )+)-->\n)(\n(?:\|.*\n)+)?", re.M)
LONG_DEFAULT = re.compile(r"(\| `[^`]{31,}`)(?= \|)")
GENERATED = ("keys.md", "api.md")
KEYS = """\
# Keys

All configuration keys with their types, defaults and meanings. `megarl run --help SECTION` prints \
the same. `make docs` generates this page from the dataclasses in `megarl/config`. \
[Configuration](configuration.md) explains the syntax and the most important keys.

"""
REMOTE = re.compile(r'(?:src|<link[^>]* href)="(https?://[^"]+)')


ROOT = Path(__file__).resolve().parents[1]
QUOTE = re.compile(r"(<!-- RLTrainer\.step, quoted .*? -->\n```python\n).*?(^```$)", re.S | re.M)


# [B, S] in docstrings is a shape, which autorefs takes for a reference
logging.getLogger("mkdocs.plugins.mkdocs_autorefs").setLevel(logging.ERROR)


def on_pre_build(**_: Any) -> None:
    """Updates the generated parts. Raises PluginError if one of them was out of date."""
    readme, keys, names = ROOT / "README.md", ROOT / "docs" / "keys.md", ROOT / "docs" / "api.md"
    new = {
        readme: with_step(readme.read_text()),
        keys: KEYS + reference() + "\n",
        names: with_names(names.read_text()),
    }
    for path, text in new.items():
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            raise PluginError(f"{path.name} repeated older code and is updated now: commit it")


def with_step(readme: str) -> str:
    """Returns the README with RLTrainer.step as it stands in the source."""
    source = (ROOT / "megarl" / "trainer" / "rl.py").read_text()
    step = source.split("# --8<-- [start:step]\n")[1].split("    # --8<-- [end:step]")[0]
    return QUOTE.sub(lambda m: m[1] + textwrap.dedent(step).rstrip() + "\n" + m[2], readme)


def with_names(page: str) -> str:
    """Returns docs/api.md with a table of the first sentences of its names' docstrings."""

    def table(match: re.Match[str]) -> str:
        rows = (f"| `{name}` | {summary(name)} |\n" for name in match[2].split())
        return f"{match[1]}\n| name | summary |\n| --- | --- |\n{''.join(rows)}"

    return NAMES.sub(table, page)


def summary(name: str) -> str:
    """Returns the first sentence of the docstring of a public name."""
    text = " ".join((inspect.getdoc(getattr(megarl, name)) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[^A-Z])\. ", text)[0].rstrip(".:").replace("|", "&#124;") + "."


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Adds a block of mkdocstrings for each name of docs/api.md, and lets long defaults break. The
    generated pages rank below the other pages in the search."""
    if page is not None and page.file.src_uri in GENERATED:
        page.meta["search"] = {"boost": 0.3}
        markdown = LONG_DEFAULT.sub(r"\1{.long}", markdown)
    return NAMES.sub(lambda m: f"{m[3]}\n{_blocks(m[2])}", markdown)


def _blocks(names: str) -> str:
    return "\n\n".join(f"::: megarl.{name}" for name in names.split()) + "\n"


def on_post_page(output: str, **_: Any) -> str:
    """Refuses pages that load remote assets: readers may be offline and must not be tracked."""
    if remote := REMOTE.findall(output):
        raise PluginError(f"the page would load {remote}")
    return output


def reference() -> str:
    """Returns Markdown: the keys that all recipes share, then the keys of each recipe, a table per
    section. A recipe refers to an earlier one for keys that are equal there."""
    shared = {f.name for f in fields(BaseConfig)}
    parts = ["## Every recipe", *_group(list(children(BaseConfig)))]
    first: dict[tuple[str, ...], str] = {}  # the recipe that shows a key so
    for name, cls in RECIPES.items():
        keys = [k for k in children(cls) if k.name not in shared]
        own = [(k, tuple(_group([k]))) for k in keys]
        parts += [f"## recipe: {name}", *_group([k for k, text in own if text not in first])]
        for recipe in dict.fromkeys(first.values()):
            if same := [f"`{k.name}`" for k, text in own if first.get(text) == recipe]:
                parts.append(f"As in recipe {recipe}: {', '.join(same)}.")
        first |= {text: name for _, text in own if text not in first}
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
    """Returns the cell of a default value."""
    return f"`{text}`"


def _cell(text: str) -> str:
    """Escapes text for a Markdown table."""
    for char in "|<>*_":
        text = text.replace(char, f"&#{ord(char)};")
    return text


def _sentence(text: str) -> str:
    return _cell(text[:1].upper() + text[1:]) + "."
