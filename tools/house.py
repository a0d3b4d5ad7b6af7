"""Counts megarl's code, tokens and docs by package, and holds them to limits.

    python tools/house.py [--rev REV]
    python tools/house.py --gate --min-docs 90

The files are those of megarl/ and tools/ (`scripts` in the table), in the working tree or at a git
revision. To change training or rollouts, one must know the core; satellites are separate; the rest
carries both. Lines are counted as ruff prints them, without `fmt: skip`. A file that is not Python
counts by its lines.

    files       number of files
    code        lines that are neither blank nor docstring nor comment
    tokens      Python tokens on these lines
    docs        lines of docstrings, and of the help of a configuration's keys
    public      public classes, functions and methods
    documented  those of them that have a docstring

Below the table are the uses of private names of megarl in tests/: each pins a structure.

`--gate` prints the numbers that have a limit in [tool.house.limits] of pyproject.toml, and fails if
one exceeds its limit. `--min-docs` fails if a smaller percentage of a package's public definitions
have docstrings. With either option no table is printed.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tokenize import COMMENT, DEDENT, ENDMARKER, INDENT, NEWLINE, NL, generate_tokens

import rich
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parent.parent
LONG_FILE = 450  # lines
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
# the packages around training and rollouts
OUTER = ("config", "launcher", "rpc", "controller", "dataflow", "cli", "utils", "top level")
# a package that is neither here nor a satellite is core
REST = (*OUTER, "ckpt", "observability", "scripts", "wire")
COLUMNS = ("files", "code", "tokens", "docs", "public", "documented")
# functions that take a name as text
PATCHES = ("setattr", "getattr", "delattr", "patch", "object")
SKIP = re.compile(r"#\s*fmt:\s*(skip|off|on)\b.*")
NO_CODE = {COMMENT, DEDENT, ENDMARKER, INDENT, NEWLINE, NL}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def count(path: str, text: str) -> Counter[str]:
    """Counts one file. A blank line inside a docstring belongs to the docstring."""
    if not path.endswith(".py"):
        lines = text.splitlines()
        return Counter(files=1, lines=len(lines), code=sum(bool(line.strip()) for line in lines))
    if SKIP.search(text):
        text = run(sys.executable, "-m", "ruff", "format", "-", stdin=SKIP.sub("", text))
    tree, lines = ast.parse(text), text.splitlines()
    tokens = list(generate_tokens(io.StringIO(text).readline))
    keys = list(helps(tree))
    docs = set(itertools.chain(*map(span, docstrings(tree)), *map(span, keys)))
    blank = {n for n, line in enumerate(lines, 1) if not line.strip()}
    comments = {t.start[0] for t in tokens if t.type == COMMENT and t.line.lstrip().startswith("#")}
    no_code = docs | blank | comments
    public = list(public_definitions(tree))
    return Counter(
        files=1,
        lines=len(lines),
        code=len(lines) - len(no_code),
        tokens=sum(t.type not in NO_CODE and t.start[0] not in no_code for t in tokens),
        docs=len(docs),
        public=len(public),
        documented=sum(ast.get_docstring(node) is not None for node in public),
        keys=len(keys),
    )


def public_definitions(scope: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    """Yields the public classes, functions and methods of a module: neither they nor what contains
    them begins with an underscore."""
    for node in scope.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node)


def docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yields every docstring."""
    for node in ast.walk(tree):
        if isinstance(node, Definition | ast.Module) and ast.get_docstring(node) is not None:
            yield node.body[0]


def span(node: ast.stmt) -> range:
    """Returns the numbers of the lines of a statement."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def helps(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yields every text below a field of a class, `name: type = value`. A configuration's keys have
    their help there."""
    for node in ast.walk(tree):
        for pair in itertools.pairwise(node.body if isinstance(node, ast.ClassDef) else ()):
            match pair:
                case ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str())) as below:
                    yield below


def room(path: str) -> tuple[str, str]:
    """Returns (kind, row of the table) of a file, by its path."""
    if path.startswith("tools/"):
        return "rest", "scripts"
    path = path.removeprefix("megarl/")
    for name, prefixes in SATELLITES.items():
        if path.startswith(prefixes):
            return "satellites", name
    package = path.partition("/")[0] if "/" in path else "top level"
    return ("rest" if package in REST else "core"), package


def rows(files: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
    """Returns the table's rows: each kind's packages, the largest first, then their sum; then the
    sum of all. files: the counts of each file by its path."""
    kinds: dict[str, dict[str, Counter[str]]] = {"core": {}, "satellites": {}, "rest": {}}
    for path, counts in files.items():
        kind, name = room(path)
        kinds[kind].setdefault(name, Counter()).update(counts)
    table: dict[str, Counter[str]] = {}
    for kind, packages in kinds.items():
        table |= sorted(packages.items(), key=lambda item: -item[1]["code"])
        table[f"= {kind}"] = sum(packages.values(), Counter())
    return table | {"= whole": sum(files.values(), Counter())}


def texts(rev: str | None, *folders: str) -> dict[str, str]:
    """Returns the text of every file of `folders` by its path. Raises CalledProcessError for a
    revision that git does not know."""
    if rev is None:
        listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", *folders)
        paths = [path for path in listed.splitlines() if (ROOT / path).is_file()]
        return {path: (ROOT / path).read_text("utf-8", "replace") for path in paths}
    listed = run("git", "ls-tree", "-r", "--name-only", rev, *folders)
    return {path: run("git", "show", f"{rev}:./{path}") for path in listed.splitlines()}


def run(*command: str, stdin: str = "") -> str:
    """Returns what a command prints. Raises CalledProcessError if it fails."""
    ran = subprocess.run(
        command, input=stdin, cwd=ROOT, capture_output=True, check=True, errors="replace"
    )
    return ran.stdout


def private_names(tree: ast.Module) -> set[str]:
    """Returns the names with one leading underscore that a file defines, or sets on `self`."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                names.add(name)
            case ast.Name(name, ast.Store()) | ast.Attribute(ast.Name("self"), name, ast.Store()):
                names.add(name)
    return {name for name in names if re.match("_[^_]", name)}


def private_uses(product: Mapping[str, str], tests: Mapping[str, str]) -> list[str]:
    """Returns "path:line: code" of every use in `tests` of a private name that `product` defines.
    Both are texts by path."""
    private = {name for tree in trees(product).values() for name in private_names(tree)}
    return [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in trees(tests).items()
        for node, names in uses(tree)
        if not private.isdisjoint(names)
    ]


def trees(files: Mapping[str, str]) -> dict[str, ast.Module]:
    """Returns the syntax trees of the Python files among `files`, by path."""
    return {path: ast.parse(text) for path, text in files.items() if path.endswith(".py")}


def uses(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, list[str]]]:
    """Yields each node of a test that uses names of megarl, with these names: an attribute, a text
    given to a function of PATCHES, an import. Attributes of another library's module are left out,
    and those that the test's own file defines."""
    own, packages = private_names(tree), imported_packages(tree) | {"super": "megarl"}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name("self" | "cls")):
                pass
            case ast.Attribute(value, name):
                while inner := getattr(value, "value", getattr(value, "func", None)):
                    value = inner
                package = packages.get(getattr(value, "id", ""), "tests")
                if package == "megarl" or (package == "tests" and name not in own):
                    yield node, [name]
            case ast.Call(ast.Name(name) | ast.Attribute(attr=name), args) if name in PATCHES:
                constants = [a.value for a in args if isinstance(a, ast.Constant)]
                yield node, [str(value).rpartition(".")[2] for value in constants]
            case ast.ImportFrom(module, names) if str(module).startswith("megarl"):
                yield node, [alias.name for alias in names]


def imported_packages(tree: ast.Module) -> dict[str, str]:
    """Returns the names that imports bind, each with the package it comes from."""
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module, names):
                origins |= {a.asname or a.name: str(module) for a in names}
            case ast.Import(names):
                origins |= {a.asname or a.name.partition(".")[0]: a.name for a in names}
    return {name: origin.partition(".")[0] for name, origin in origins.items()}


def show(table: Mapping[str, Counter[str]]) -> None:
    """Prints the table."""
    shown = Table("package", *(Column(name, justify="right") for name in COLUMNS))
    for name, counts in table.items():
        style = "bold" if name.startswith("=") else None
        cells = [str(counts[column]) for column in COLUMNS]
        shown.add_row(name, *cells, style=style, end_section=bool(style))
    rich.print(shown)


def measured(files: Mapping[str, Counter[str]]) -> dict[str, int]:
    """Returns the numbers of the files that have a limit."""
    table = rows(files)
    sizes = [counts["lines"] for counts in files.values()]
    return {
        "core": table["= core"]["code"],
        "outer": sum(table[name]["code"] for name in OUTER if name in table),
        "whole": table["= whole"]["code"],
        "tokens": table["= whole"]["tokens"],
        "longest_file": max(sizes),
        "long_files": sum(size > LONG_FILE for size in sizes),
        "keys": table["config"]["keys"],
    }


def above(found: Mapping[str, int], limits: Mapping[str, int]) -> list[str]:
    """Prints each number beside its limit; returns a line for each that exceeds it."""
    for name, limit in limits.items():
        print(f"{name} {found[name]:,} of {limit:,}")
    return [
        f"{name}: {found[name]:,} of {limit:,}; take something out, only an issue raises a limit"
        for name, limit in limits.items()
        if found[name] > limit
    ]


def undocumented(table: Mapping[str, Counter[str]], percent: int) -> list[str]:
    """Returns a line for each package that has docstrings for less than `percent` of its public
    definitions."""
    return [
        f"{name}: {c['documented']} of {c['public']} public definitions have docstrings; "
        f"write more, {percent} % is the least"
        for name, c in table.items()
        if 100 * c["documented"] < percent * c["public"]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, or holds it to its limits; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rev", help="a git revision; default: the files as they are")
    parser.add_argument("--gate", action="store_true", help="fail if a number exceeds its limit")
    parser.add_argument("--min-docs", type=int, metavar="PERCENT", help="fail below this")
    args = parser.parse_args(argv)
    try:
        product, tests = texts(args.rev, "megarl", "tools"), texts(args.rev, "tests")
    except subprocess.CalledProcessError as e:
        parser.error(f"--rev {args.rev}: {e.stderr.strip()}")
    files = {path: count(path, text) for path, text in product.items()}
    private = private_uses(product, tests)
    table = rows(files)
    if not args.gate and args.min_docs is None:
        show(table)
        print(f"uses of private names of megarl in tests: {len(private)}", *private, sep="\n")
        return 0
    problems = undocumented(table, args.min_docs or 0)
    if args.gate:
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["house"]
        problems += above(measured(files) | {"private": len(private)}, settings["limits"])
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
