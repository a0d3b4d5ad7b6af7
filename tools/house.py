"""Counts lines, files, functions and docstrings of megarl by package.

    python tools/house.py [--rev REV] [--markdown]

It counts the files of megarl/ in the working tree or at a git revision. To change training or
rollouts, one must know the core; satellites stand apart; the rest carries both.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LONG = 40  # lines of a function
CORE = (
    "api",
    "parallel",
    "models",
    "weight_sync",
    "engine",
    "rollout",
    "algos",
    "data",
    "trainer",
)
# satellite -> what the paths of its files begin with, also in older revisions
SATELLITES = {
    "server": ("server/", "rollout/server/"),
    "report": ("observability/report/",),
    "converter": ("ckpt/convert",),
    "planning": ("planning/", "weight_sync/planner_"),
    "CPU backend": ("parallel/cpu_",),
    "gateway": ("rollout/gateway",),
    "tools": ("rollout/tools",),
    "rewards": ("rollout/rewards/",),
    "cli": ("cli/",),
}
COLUMNS = (
    "package",
    "files",
    "lines",
    "code",
    "docs",
    "comments",
    "blank",
    "file size",
    "functions",
    "size",
    f"> {LONG}",
    "classes",
    "public docs",
    "not None",
    "ignore",
    "noqa",
    "skip",
)
LEGEND = """\
Sizes are lines: median/90th percentile/largest. docs: lines of docstrings; > 40: functions of more
lines; public docs: public classes, functions and methods that have a docstring; not None: asserts
of `is not None`; ignore, noqa, skip: `type: ignore`, `noqa`, `fmt: skip`."""


@dataclass(kw_only=True)
class Count:
    """The counts of some files. `files` and `functions` list the lines of each; the others count:
    `public` the public classes, functions and methods, `documented` those that have docstrings."""

    files: list[int] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    docstrings: int = 0
    comments: int = 0
    blank: int = 0
    classes: int = 0
    public: int = 0
    documented: int = 0
    not_none: int = 0
    ignores: int = 0
    noqa: int = 0
    skips: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def lines(self) -> int:
        return sum(self.files)

    @property
    def code(self) -> int:
        return self.lines - self.docstrings - self.comments - self.blank

    def cells(self) -> list[str]:
        """Returns the cells behind the name; sizes are median/90th percentile/largest."""
        documented = f"{100 * self.documented / self.public:.0f}%" if self.public else "-"
        return [
            *map(str, (len(self.files), self.lines, self.code, self.docstrings, self.comments)),
            *(str(self.blank), spread(self.files), str(len(self.functions))),
            *(spread(self.functions), str(sum(n > LONG for n in self.functions))),
            *(str(self.classes), documented),
            *map(str, (self.not_none, self.ignores, self.noqa, self.skips)),
        ]


def spread(sizes: Sequence[int]) -> str:
    """Returns "median/90th percentile/largest" of `sizes`, which are lines."""
    if not sizes:
        return "-"
    ordered = sorted(sizes)
    return "/".join(
        str(ordered[min(int(q * len(ordered)), len(ordered) - 1)]) for q in (0.5, 0.9, 1)
    )


def count(text: str) -> Count:
    """Counts one file. A blank line inside a docstring belongs to the docstring."""
    tree, lines = ast.parse(text), text.splitlines()
    kinds = ["" if line.strip() else "blank" for line in lines]
    comments = [
        t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t[0] == tokenize.COMMENT
    ]
    for token in comments:
        if token.line.strip().startswith("#"):
            kinds[token.start[0] - 1] = "comment"
    for start, end in docstrings(tree):
        kinds[start - 1 : end] = ["docstring"] * (end - start + 1)
    nodes = list(ast.walk(tree))
    said = [t.string for t in comments]
    public = list(public_definitions(tree))
    return Count(
        files=[len(lines)],
        functions=[
            length(n) for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        ],
        docstrings=kinds.count("docstring"),
        comments=kinds.count("comment"),
        blank=kinds.count("blank"),
        classes=sum(isinstance(n, ast.ClassDef) for n in nodes),
        public=len(public),
        documented=sum(ast.get_docstring(n) is not None for n in public),
        not_none=sum(asserts_not_none(n) for n in nodes),
        ignores=sum("type: ignore" in c for c in said),
        noqa=sum("noqa" in c for c in said),
        skips=sum("fmt: skip" in c or "fmt: off" in c for c in said),
    )


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_definitions(scope: ast.Module | ast.ClassDef) -> Iterable[Definition]:
    """Yields the public classes, functions and methods of a module: neither they nor what contains
    them begins with an underscore."""
    for node in scope.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node)


def docstrings(tree: ast.Module) -> Iterable[tuple[int, int]]:
    """Yields the first and last line of every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, Definition | ast.Module) and ast.get_docstring(node) is not None:
            yield node.body[0].lineno, node.body[0].end_lineno or 0


def length(node: ast.stmt) -> int:
    """Returns how many lines a definition has, without its decorators."""
    return (node.end_lineno or 0) - node.lineno + 1


def asserts_not_none(node: ast.AST) -> bool:
    """Returns whether a statement asserts that something `is not None`."""
    return isinstance(node, ast.Assert) and any(
        isinstance(part, ast.IsNot) for part in ast.walk(node.test)
    )


def room(path: str) -> tuple[str, str]:
    """Returns (kind, row of the table) of a file, by its path inside megarl/."""
    for name, prefixes in SATELLITES.items():
        if path.startswith(prefixes):
            return "satellites", name
    package = path.partition("/")[0] if "/" in path else "top level"
    return ("core" if package in CORE else "rest"), package


def sources(rev: str | None) -> dict[str, str]:
    """Returns the text of every Python file, by its path inside megarl/. Raises ValueError for a
    revision that git does not know."""
    if rev is None:
        package = ROOT / "megarl"
        return {p.relative_to(package).as_posix(): p.read_text() for p in package.rglob("*.py")}
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", rev, "megarl"]
    ran = subprocess.run(command, capture_output=True)
    if ran.returncode:
        raise ValueError(f"--rev {rev}: {ran.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(ran.stdout)) as archive:
        files = [m for m in archive.getmembers() if m.isfile() and m.name.endswith(".py")]
        contents = {m.name: archive.extractfile(m) for m in files}
        return {n.removeprefix("megarl/"): f.read().decode() for n, f in contents.items() if f}


def rows(files: Mapping[str, str]) -> list[tuple[str, Count]]:
    """Returns the table's rows: each kind's packages, the largest first, then their sum; then the
    sum of all."""
    kinds: dict[str, dict[str, Count]] = {"core": {}, "satellites": {}, "rest": {}}
    for path, text in sorted(files.items()):
        kind, name = room(path)
        kinds[kind][name] = kinds[kind].get(name, Count()) + count(text)
    table: list[tuple[str, Count]] = []
    for kind, packages in kinds.items():
        table += sorted(packages.items(), key=lambda item: -item[1].lines)
        table.append((f"= {kind}", sum(packages.values(), Count())))
    total = sum((c for packages in kinds.values() for c in packages.values()), Count())
    return [*table, ("= whole", total)]


def markdown(table: Sequence[tuple[str, Count]]) -> str:
    """Returns the table in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([name, *c.cells()] for name, c in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(table: Sequence[tuple[str, Count]], console: Console) -> None:
    """Prints the table and what its columns mean."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in COLUMNS:
        shown.add_column(name, justify="left" if name == "package" else "right", no_wrap=True)
    for name, c in table:
        total = name.startswith("=")
        shown.add_row(name, *c.cells(), style="bold" if total else None, end_section=total)
    console.print(shown)
    console.print(LEGEND, highlight=False)


def check_docs(table: Sequence[tuple[str, Count]], percent: int) -> int:
    """Prints the packages below `percent` of docstrings; returns 1 if there are any, else 0."""
    short = [
        f"{name}: {c.documented} of {c.public} public definitions have docstrings"
        for name, c in table
        if 100 * c.documented < percent * c.public
    ]
    for line in short:
        print(f"{line}; {percent} % is the least", file=sys.stderr)
    return int(bool(short))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rev", help="a git revision; default: the files as they are")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument(
        "--min-docs", type=int, metavar="PERCENT",
        help="print no table; fail where fewer public definitions of a package have docstrings",
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        table = rows(sources(args.rev))
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    if args.min_docs is not None:
        return check_docs(table, args.min_docs)
    if args.markdown:
        print(markdown(table))
    else:
        show(table, Console(width=None if sys.stdout.isatty() else 180))  # a file has no width
    return 0


if __name__ == "__main__":
    sys.exit(main())
