"""Small repositories whose tests fail, as rows of data for a coding agent.

    megarl launch --config configs/swe_grpo.yaml actor.path=MODEL
    python examples/small_repositories.py OUT [--seed 1] [--count 20]      writes them to look at

In every other repository a function has a bug; in the rest a function is missing. The tests compare
it with what the sound function returns for arguments that the seed draws. A row holds `files` and
`tests`, texts by their paths, and as `solution` the texts that mend it.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.dataset import DatasetConfig

Draw = Callable[[random.Random], tuple[Any, ...]]
CASES = 5  # tests of a repository
WORDS = ["ant", "bee", "cat", "falcon", "gnu", "hedgehog", "kite", "nightingale"]


@dataclass(frozen=True, kw_only=True)
class Module:
    """Describes a module with a function to mend.

    says: what the function does. code: the sound function. right, wrong: a part of the code, and
    what stands there as a bug. draw: draws arguments of a test.
    """

    name: str
    function: str
    says: str
    code: str
    right: str
    wrong: str
    draw: Draw


def some(rng: random.Random, low: int = 3, high: int = 8) -> list[int]:
    return [rng.randrange(-20, 60) for _ in range(rng.randint(low, high))]


def words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=8))


def spans(rng: random.Random) -> list[tuple[int, int]]:
    starts = [rng.randrange(20) for _ in range(5)]
    return [(a, a + rng.randrange(1, 7)) for a in starts]


MODULES = (
    Module(
        name="middle",
        function="median",
        says="Returns the median of numbers; of an even count the mean of the two in the middle.",
        code="""def median(numbers):
    ordered = sorted(numbers)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2
""",
        right="(ordered[half - 1] + ordered[half]) / 2",
        wrong="ordered[half]",
        draw=lambda rng: (some(rng),),
    ),
    Module(
        name="windows",
        function="moving_sums",
        says="Returns the sums of all neighbours, `size` at a time.",
        code="""def moving_sums(numbers, size):
    count = len(numbers) - size + 1
    return [sum(numbers[i : i + size]) for i in range(count)]
""",
        right="numbers[i : i + size]",
        wrong="numbers[i:size]",
        draw=lambda rng: (some(rng, 4), rng.randint(2, 4)),
    ),
    Module(
        name="lines",
        function="wrap",
        says="Returns the words of a text in lines of at most `width` characters.",
        code="""def wrap(text, width):
    lines = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines
""",
        right="len(lines[-1]) + 1 + len(word) <= width",
        wrong="len(lines[-1]) + len(word) <= width",
        draw=lambda rng: (words(rng), rng.randint(11, 16)),
    ),
    Module(
        name="ranges",
        function="merge",
        says="Returns spans (first, last) in order, those that overlap or touch as one.",
        code="""def merge(spans):
    merged = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged
""",
        right="max(last, merged[-1][1])",
        wrong="last",
        draw=lambda rng: (spans(rng),),
    ),
    Module(
        name="counts",
        function="most_common",
        says="Returns the `n` commonest words of a text, equally common ones by the alphabet.",
        code="""def most_common(text, n):
    found = text.split()
    return sorted(set(found), key=lambda word: (-found.count(word), word))[:n]
""",
        right="-found.count(word)",
        wrong="-text.count(word)",
        draw=lambda rng: (" ".join(rng.choices(["a", "ab", "b", "ba"], k=9)), rng.randint(1, 3)),
    ),
    Module(
        name="numerals",
        function="roman",
        says="Returns a number from 1 to 399 in Roman numerals.",
        code="""def roman(number):
    signs = {100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"}
    text = ""
    for value, sign in signs.items():
        while number >= value:
            text += sign
            number -= value
    return text
""",
        right='40: "XL", ',
        wrong="",
        draw=lambda rng: (rng.randint(1, 399),),
    ),
    Module(
        name="runs",
        function="encode",
        says="Returns the runs of equal characters of a text as pairs (character, length).",
        code="""def encode(text):
    runs = []
    for character in text:
        if runs and runs[-1][0] == character:
            runs[-1] = (character, runs[-1][1] + 1)
        else:
            runs.append((character, 1))
    return runs
""",
        right="runs[-1][1] + 1",
        wrong="2",
        draw=lambda rng: ("".join(c * rng.randint(1, 5) for c in rng.choices("abc", k=4)),),
    ),
    Module(
        name="tables",
        function="transpose",
        says="Returns the columns of a table; short rows are filled up with None.",
        code="""def transpose(rows):
    width = max((len(row) for row in rows), default=0)
    filled = [[*row, *[None] * (width - len(row))] for row in rows]
    return [list(column) for column in zip(*filled)]
""",
        right="max((len(row) for row in rows), default=0)",
        wrong="min((len(row) for row in rows), default=0)",
        draw=lambda rng: ([some(rng, 1, 4) for _ in range(3)],),
    ),
    Module(
        name="search",
        function="first_at_least",
        says="Returns where, in a sorted list, the first number of at least `bound` stands.",
        code="""def first_at_least(numbers, bound):
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] < bound:
            low = middle + 1
        else:
            high = middle
    return low
""",
        right="numbers[middle] < bound",
        wrong="numbers[middle] <= bound",
        draw=lambda rng: (numbers := sorted(some(rng)), rng.choice([*numbers, 7, 8])),
    ),
    Module(
        name="paths",
        function="shorten",
        says="Returns a path without its `.` and with its `..` resolved; it never leaves the root.",
        code="""def shorten(path):
    parts = []
    for part in path.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)
""",
        right="parts = parts[:-1]",
        wrong="pass",
        draw=lambda rng: ("/" + "/".join(rng.choices([*WORDS[:4], "..", "."], k=7)),),
    ),
)


def repositories(cfg: DatasetConfig, *, seed: int, count: int = 20) -> Iterator[dict[str, Any]]:
    """Yields a row for each of `count` repositories."""
    for i in range(cfg.size or count):
        yield repository(i, seed)


def repository(i: int, seed: int) -> dict[str, Any]:
    """Returns row i of a seed."""
    module = MODULES[i % len(MODULES)]
    missing = (i // len(MODULES) + i) % 2 == 1
    rng = random.Random(f"{seed} {i}")
    file = f"{module.name}.py"
    sound = f'"""Of {module.name}."""\n\n\n{documented(module)}'
    broken = sound.replace(module.right, module.wrong)
    cases = drawn(module, rng)
    task = f"`{module.function}` in `{file}` has a bug; it should do what its docstring says."
    if missing:
        broken = f'"""Of {module.name}."""\n'
        task = f"`{file}` lacks the function `{module.function}`. {module.says}"
    task += " Mend the file so that `python -m unittest` passes. Leave the tests as they are."
    main = f"from {module.name} import {module.function}\n\nprint({shown(module, cases[0])})\n"
    return {
        "name": f"{i:02d}_{module.name}",
        "messages": [{"role": "user", "content": task}],
        "files": {
            "README.md": f"# {module.name}\n\n{module.says}\n",
            file: broken,
            "main.py": main,
        },
        "tests": {f"test_{file}": tests_of(module, cases)},
        "solution": {file: sound},
    }


def documented(module: Module) -> str:
    first, _, rest = module.code.partition("\n")
    return f'{first}\n    """{module.says}"""\n{rest}'


def drawn(module: Module, rng: random.Random) -> list[tuple[Any, ...]]:
    """Returns arguments of the tests: at least two that show the bug, and one that does not."""
    sound, broken = (
        compiled(code, module.function)
        for code in (module.code, module.code.replace(module.right, module.wrong))
    )
    found: dict[bool, list[tuple[Any, ...]]] = {True: [], False: []}
    while len(found[True]) < 2 or not found[False]:
        arguments = module.draw(rng)
        found[sound(*arguments) != broken(*arguments)].append(arguments)
    cases = [*found[True][:2], found[False][0]]
    return [*cases, *(module.draw(rng) for _ in range(CASES - len(cases)))]


def compiled(code: str, name: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec(code, scope)  # of this file
    return scope[name]


def shown(module: Module, arguments: tuple[Any, ...]) -> str:
    return f"{module.function}({', '.join(map(repr, arguments))})"


def tests_of(module: Module, cases: list[tuple[Any, ...]]) -> str:
    """Returns the text of the tests, which import the function anew, each for itself."""
    sound = compiled(module.code, module.function)
    lines = ["import unittest", "", f"from {module.name} import {module.function}", "", ""]
    lines.append(f"class Test{module.name.title()}(unittest.TestCase):")
    for i, arguments in enumerate(cases):
        lines += [f"    def test_{i}(self):", f"        found = {shown(module, arguments)}"]
        lines += [f"        self.assertEqual(found, {sound(*arguments)!r})", ""]
    text = "\n".join(lines)
    ast.parse(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20)
    args = parser.parse_args()
    for i in range(args.count):
        row = repository(i, args.seed)
        (args.out / row["name"]).mkdir(parents=True)
        for path, text in {**row["files"], **row["tests"]}.items():
            (args.out / row["name"] / path).write_text(text)


if __name__ == "__main__":
    main()
