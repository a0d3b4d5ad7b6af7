"""Counts lines, files, functions and docstrings of megarl by package, and holds them to limits.

    python tools/house.py [--rev REV] [--markdown] [--gate]

It counts the files of megarl/ and tools/ in the working tree or at a git revision. To change
training or rollouts, one must know the core; satellites stand apart; the rest carries both. Lines
are counted as ruff prints them, what `fmt: skip` packs, too; a file that is not Python counts by
its lines. Below the table stand the lines of tests/ that use a private name of megarl: each pins a
structure. `--gate` fails where a number is above that of [tool.house.limits] in pyproject.toml.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import re
import subprocess
import sys
import tarfile
import tokenize
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LONG = 40  # lines of a function
LONG_FILE = 450  # lines
CORE = (
    "api",
    "kernels",
    "parallel",
    "models",
    "transfer",
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
# what surrounds training and rollouts: the outer house
OUTER = ("config", "launcher", "rpc", "controller", "dataflow", "cli", "utils", "top level")
# what falls only with a feature: an error with its fix, a public name, a key, a docstring
KEPT = ("errors", "public", "keys", "documented")
# functions that take a name as text
PATCHES = ("setattr", "getattr", "delattr", "patch", "object")
SKIP = re.compile(r"#\s*fmt:\s*(skip|off|on)\b.*")
COLUMNS = (
    "package",
    "files",
    "lines",
    "code",
    "tokens",
    "docs",
    "comments",
    "blank",
    "file size",
    "functions",
    "size",
    f"> {LONG}",
    "public docs",
    "skip",
    "errors",
    "keys",
)
LEGEND = """\
Sizes are lines: median/90th percentile/largest. docs: lines of docstrings; > 40: functions of more
lines; public docs: public classes, functions and methods that have a docstring; skip: `fmt: skip`;
errors: `raise` of an exception, and a rule's `yield` of a text; keys: those of a configuration,
fields with a help."""


@dataclass(kw_only=True)
class Count:
    """The counts of some files. `files` and `functions` list the lines of each; the others count:
    `public` the public classes, functions and methods, `documented` those that have docstrings."""

    files: list[int] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    docstrings: int = 0
    comments: int = 0
    blank: int = 0
    public: int = 0
    documented: int = 0
    skips: int = 0
    tokens: int = 0
    errors: int = 0
    keys: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def lines(self) -> int:
        """Returns all lines."""
        return sum(self.files)

    @property
    def code(self) -> int:
        """Returns the lines that are neither blank nor docstring nor comment."""
        return self.lines - self.docstrings - self.comments - self.blank

    def cells(self) -> list[str]:
        """Returns the cells behind the name; sizes are median/90th percentile/largest."""
        documented = f"{100 * self.documented / self.public:.0f}%" if self.public else "-"
        return [
            *map(str, (len(self.files), self.lines, self.code, self.tokens)),
            *map(str, (self.docstrings, self.comments)),
            *(str(self.blank), spread(self.files), str(len(self.functions))),
            *(spread(self.functions), str(sum(n > LONG for n in self.functions))),
            documented,
            *map(str, (self.skips, self.errors, self.keys)),
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
    """Counts one Python file. A blank line inside a docstring belongs to the docstring."""
    skips = len(SKIP.findall(text))
    text = printed(text) if skips else text
    tree, lines = ast.parse(text), text.splitlines()
    kinds = ["" if line.strip() else "blank" for line in lines]
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for token in tokens:
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            kinds[token.start[0] - 1] = "comment"
    for start, end in docstrings(tree):
        kinds[start - 1 : end] = ["docstring"] * (end - start + 1)
    nodes = list(ast.walk(tree))
    public = list(public_definitions(tree))
    return Count(
        files=[len(lines)],
        functions=[
            length(n) for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
        ],
        docstrings=kinds.count("docstring"),
        comments=kinds.count("comment"),
        blank=kinds.count("blank"),
        public=len(public),
        documented=sum(ast.get_docstring(n) is not None for n in public),
        skips=skips,
        tokens=sum(t[0] not in NO_CODE and not kinds[t.start[0] - 1] for t in tokens),
        errors=sum(is_error(n) for n in nodes) + sum(map(rules, tree.body)),
        keys=sum(len([*fields_with_help(n)]) for n in nodes),
    )


def printed(text: str) -> str:
    """Returns a file as ruff formats it without `fmt: skip`."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "format",
        "--config",
        str(ROOT / "pyproject.toml"),
        "-",
    ]
    plain = SKIP.sub("", text)
    return subprocess.run(command, input=plain, capture_output=True, text=True, check=True).stdout


def count_other(text: str) -> Count:
    """Counts one file that is not Python."""
    lines = text.splitlines()
    return Count(files=[len(lines)], blank=sum(not line.strip() for line in lines))


NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}
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
    """Yields the first and last line of every docstring, of a field's help, too."""
    for node in ast.walk(tree):
        if isinstance(node, Definition | ast.Module) and ast.get_docstring(node) is not None:
            yield node.body[0].lineno, node.body[0].end_lineno or 0
        for _, below in fields_with_help(node):
            yield below.lineno, below.end_lineno or 0


def length(node: ast.stmt) -> int:
    """Returns how many lines a definition has, without its decorators."""
    return (node.end_lineno or 0) - node.lineno + 1


def is_error(node: ast.AST) -> bool:
    """Returns whether a node raises an exception, or yields a text as the rules of `config` do."""
    if isinstance(node, ast.Yield):
        said = node.value
        return isinstance(said, ast.JoinedStr) or (
            isinstance(said, ast.Constant) and isinstance(said.value, str)
        )
    return isinstance(node, ast.Raise) and node.exc is not None


def rules(node: ast.stmt) -> int:
    """Returns how many rules a module's text has, one a line, as the tables of config/rules.py:
    what asks | what it needs | why. A line that begins with a space continues the one before."""
    match node:
        case ast.Assign(value=ast.Constant(value=str(text))):
            lines = re.sub(r"\n +", " ", text).strip().splitlines()
            return len(lines) if all("|" in line for line in lines) else 0
    return 0


def fields_with_help(node: ast.AST) -> Iterator[tuple[ast.AnnAssign, ast.Expr]]:
    """Yields the fields of a class, `name: type = value`, that have a text below them, as a
    configuration's keys have their help, and that text; none of what is no class."""
    for declared, below in itertools.pairwise(node.body if isinstance(node, ast.ClassDef) else ()):
        match declared, below:
            case ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str())):
                yield declared, below


def room(path: str) -> tuple[str, str]:
    """Returns (kind, row of the table) of a file, by its path inside megarl/."""
    for name, prefixes in SATELLITES.items():
        if path.startswith(prefixes):
            return "satellites", name
    package = path.partition("/")[0] if "/" in path else "top level"
    return ("core" if package in CORE else "rest"), package


def sources(rev: str | None) -> dict[str, str]:
    """Returns the text of every file, by its path inside megarl/; those of tools/ are in scripts/.
    Raises ValueError for a revision that git does not know."""
    return {
        re.sub("^tools/", "scripts/", path.removeprefix("megarl/")): text
        for path, text in texts(rev, "megarl", "tools").items()
    }


def texts(rev: str | None, *folders: str) -> dict[str, str]:
    """Returns the text of every file of `folders` by its path. Raises ValueError for a revision
    that git does not know."""
    git = ["git", "-C", str(ROOT)]
    if rev is None:
        known = subprocess.run(
            [*git, "ls-files", "--cached", "--others", "--exclude-standard", *folders],
            capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        found = {p: (ROOT / p).read_bytes() for p in known if (ROOT / p).is_file()}
    else:
        ran = subprocess.run([*git, "archive", "--format=tar", rev, *folders], capture_output=True)
        if ran.returncode:
            raise ValueError(f"--rev {rev}: {ran.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(ran.stdout)) as archive:
            files = {m.name: archive.extractfile(m) for m in archive.getmembers() if m.isfile()}
            found = {name: file.read() for name, file in files.items() if file}
    return {name: data.decode(errors="replace") for name, data in found.items()}


def bound(text: str) -> set[str]:
    """Returns the names with one leading underscore that a file defines, or sets on `self`."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                names.add(name)
            case ast.Name(name, ast.Store()) | ast.Attribute(ast.Name("self"), name, ast.Store()):
                names.add(name)
    return {name for name in names if re.match("_[^_]", name)}


def private_uses(product: Iterable[str], tests: Mapping[str, str]) -> list[str]:
    """Returns "path:line: code" of every use in `tests` of a private name that `product` binds: an
    attribute, a text given to a function of PATCHES, an import. An attribute of another library's
    module is none, nor one that the test's own file binds."""
    private = {name for text in product for name in bound(text)}
    uses: list[str] = []
    for path, text in tests.items():
        if path.endswith(".py"):
            nodes, own = list(ast.walk(ast.parse(text))), bound(text)
            imports = {name: origin for node in nodes for name, origin in imported(node)}
            uses += [
                f"{path}:{node.lineno}: {ast.unparse(node)}"
                for node in nodes
                if isinstance(node, ast.expr | ast.stmt)
                and not private.isdisjoint(used_by(node, own, imports))
            ]
    return uses


def imported(node: ast.AST) -> list[tuple[str, str]]:
    """Returns the names that an import binds, each with the package it comes from."""
    match node:
        case ast.ImportFrom(module, names):
            return [(a.asname or a.name, str(module).partition(".")[0]) for a in names]
        case ast.Import(names):
            return [(a.asname or a.name.split(".")[0], a.name.split(".")[0]) for a in names]
    return []


def used_by(node: ast.AST, own: Container[str], imports: Mapping[str, str]) -> list[str]:
    """Returns the names of others' objects and modules that a node itself uses."""
    match node:
        case ast.Attribute(ast.Name("self" | "cls")):
            return []
        case ast.Attribute(ast.Call(ast.Name("super")), name):
            return [name]
        case ast.Attribute(value, name):
            while inner := getattr(value, "value", getattr(value, "func", None)):
                value = inner
            origin = imports.get(getattr(value, "id", ""), "tests")
            return [name] if origin == "megarl" or (origin == "tests" and name not in own) else []
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name), args) if name in PATCHES:
            texts = [a.value for a in args if isinstance(a, ast.Constant)]
            return [t.rpartition(".")[2] for t in texts if isinstance(t, str)]
        case ast.ImportFrom(module, names) if str(module).startswith("megarl"):
            return [alias.name for alias in names]
    return []


def rows(files: Mapping[str, str]) -> list[tuple[str, Count]]:
    """Returns the table's rows: each kind's packages, the largest first, then their sum; then the
    sum of all."""
    kinds: dict[str, dict[str, Count]] = {"core": {}, "satellites": {}, "rest": {}}
    for path, text in sorted(files.items()):
        kind, name = room(path)
        counted = count(text) if path.endswith(".py") else count_other(text)
        kinds[kind][name] = kinds[kind].get(name, Count()) + counted
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


def measured(table: Sequence[tuple[str, Count]], private: int) -> dict[str, int]:
    """Returns the numbers that have a limit; `private` uses of private names stand in tests."""
    by_name = dict(table)
    core, whole = by_name["= core"], by_name["= whole"]
    outer = sum((c for name, c in table if name in OUTER), Count())
    return {
        "core": core.code,
        "outer": outer.code,
        "whole": whole.code,
        "tokens": whole.tokens,
        "longest_file": max(whole.files),
        "long_files": sum(lines > LONG_FILE for lines in whole.files),
        "keys": by_name["config"].keys,
        "private": private,
    }


def check_limits(
    table: Sequence[tuple[str, Count]], private: int, limits: Mapping[str, int]
) -> int:
    """Prints each number beside its limit, and what falls only with a feature. Returns 1 where one
    is above, else 0."""
    found = measured(table, private)
    over = [name for name, limit in limits.items() if found[name] > limit]
    for name, limit in limits.items():
        print(f"{name} {found[name]:,} of {limit:,}{' TOO MANY' if name in over else ''}")
    print(*(f"{name} {getattr(table[-1][1], name):,}" for name in KEPT), sep=", ")
    if over:
        names = ", ".join(over)
        print(f"{names}: take something out; only an issue raises a limit", file=sys.stderr)
    return int(bool(over))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, or holds it to its limits; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rev", help="a git revision; default: the files as they are")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument(
        "--min-docs", type=int, metavar="PERCENT",
        help="print no table; fail where fewer public definitions of a package have docstrings",
    )  # fmt: skip
    parser.add_argument(
        "--gate", action="store_true", help="print no table; fail where a limit is exceeded"
    )
    args = parser.parse_args(argv)
    try:
        files = sources(args.rev)
        product = [text for path, text in files.items() if path.endswith(".py")]
        private = private_uses(product, texts(args.rev, "tests"))
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    table = rows(files)
    if args.gate or args.min_docs is not None:
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["house"]
        status = check_docs(table, args.min_docs) if args.min_docs is not None else 0
        return (check_limits(table, len(private), settings["limits"]) if args.gate else 0) | status
    if args.markdown:
        print(markdown(table))
    else:
        show(table, Console(width=None if sys.stdout.isatty() else 180))  # a file has no width
        print(f"private names of megarl in tests: {len(private)}", *private, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
