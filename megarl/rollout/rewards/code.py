"""Scores programs by tests, which run in the sandbox. A sandbox that fails is a failed reward: it
says nothing about the program."""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import functools
import importlib
import importlib.util
import json
import math
import os
import re
import symtable
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import IO, Any

from megarl.rollout.rewards import asserts
from megarl.rollout.rewards.results import RewardUnavailable
from megarl.rollout.tools.sandbox import Limits, SandboxLost, run_program

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_RESULT = "\x1eresult:"
_MIB = 1 << 20
# that a test uses without an import, where it says module.name
_MODULES = {name: name for name in sys.stdlib_module_names} | {"np": "numpy", "numpy": "numpy"}
_START, _END = 0.5, 1.0  # seconds for a test's processes to start, and for the last one to end
_FORMS = (
    "use {input: text, output: text}, {args: [...], output: value} with a column `entry`, the "
    "function's name, or the text of assert statements"
)


def code_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    tests: Any,
    entry: str = "",
    seconds: int = 5,
    memory: int = 1024,
    partial: bool = False,
    **row: Any,
) -> float:
    """Returns 1 if the program in the completion passes all tests, else 0; with `partial` the part
    of the tests that it passes.

    The program is the last fenced block, else the whole completion. tests: a list, or JSON of one,
    of {input, output} (what it reads and prints), {args, output} (calls of the function `entry`),
    or assert statements as text, which run in a process without the program (asserts.py). Outputs
    are compared outside the sandbox. seconds, memory: the most that one test may take, in s and
    MiB. Raises SandboxError where the machine has no sandbox, RewardUnavailable where one was lost,
    or where the machine takes more than half a second to start each.
    """
    cases = _cases(tests, entry)
    limits = Limits(wall=seconds, cpu=seconds, memory=memory * _MIB)
    program = extract_program(completion)
    most = (seconds + _START) * len(cases)
    try:
        passed = asyncio.run(_passed(program, cases, entry, limits, most, every=partial))
    except SandboxLost as e:
        raise RewardUnavailable(str(e)) from e
    return passed / len(cases) if partial else float(passed == len(cases))


def check_row(*, tests: Any = None, entry: str = "", **row: Any) -> None:
    """Raises ValueError for tests that no program could be judged by."""
    _cases(tests, entry)


def most_seconds(*, tests: Any = None, entry: str = "", seconds: int = 5, **row: Any) -> float:
    """Returns the seconds that all tests of a row may take, with what their processes need to start
    and to end. Raises ValueError as check_row does."""
    return (seconds + _START) * len(_cases(tests, entry)) + _END


def extract_program(completion: str) -> str:
    """Returns the last fenced block of Python or of no language, else the whole completion."""
    blocks: list[str] = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def _cases(tests: Any, entry: str) -> list[Any]:
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            tests = json.loads(tests)
        except ValueError as e:
            raise ValueError(f"tests are no JSON: {e}") from e
    cases = [tests] if isinstance(tests, str | dict) else tests
    if not isinstance(cases, Sequence) or not cases:
        raise ValueError(f"tests={tests!r}: a list of one test at least; {_FORMS}")
    for case in cases:
        test = _test_of(case)
        if test is None or (test is _by_call and not entry.isidentifier()):
            raise ValueError(f"test {case!r}, entry={entry!r}: {_FORMS}")
        if isinstance(case, str):
            try:
                names_asked(case, entry)
            except ValueError as e:
                raise ValueError(f"test {case!r}: {e}") from e
        else:
            _check_length(case)
    return list(cases)


def _check_length(case: dict[str, Any]) -> None:
    """Raises ValueError for an output that is longer than what a program may print."""
    output = case["output"]
    printed = _test_of(case) is _by_stdin
    text = str(output).strip() if printed else json.dumps(output, default=str)
    if (length := len(text.encode(errors="replace"))) >= Limits.output - len(_RESULT) - 1:
        raise ValueError(
            f"test {str(case)[:100]}...: its output has {length} bytes, and a program may print "
            f"{Limits.output}: leave the test out, or make it smaller"
        )


def _test_of(case: Any) -> Callable[[str, Any, str, Limits], Awaitable[bool]] | None:
    """Returns what runs a test; None for what is none."""
    if isinstance(case, str):
        return _by_assert
    if not isinstance(case, dict) or "output" not in case:
        return None
    return (
        _by_call if isinstance(case.get("args"), list) else _by_stdin if "input" in case else None
    )


async def _passed(
    program: str, cases: list[Any], entry: str, limits: Limits, most: float, *, every: bool
) -> int:
    """Returns how many tests a program passes; unless `every`, those before the first that it does
    not. Raises RewardUnavailable where the next test may end later than `most` seconds from now: a
    program has `limits.wall` in each, so it is the machine that took more to start them."""
    passed, end = 0, time.monotonic() + most
    for i, case in enumerate(cases):
        if i and time.monotonic() + limits.wall + _START > end:
            raise RewardUnavailable(
                f"this machine took more than {_START:g} s to start a program, {i} of {len(cases)} "
                "tests done: run fewer reward workers"
            )
        test = _test_of(case)
        ok = test is not None and await test(program, case, entry, limits)
        if not ok and not every:
            break
        passed += ok
    return passed


async def _by_stdin(program: str, case: dict[str, Any], entry: str, limits: Limits) -> bool:
    ran = await run_program(program, stdin=str(case["input"]), limits=limits)
    return ran.ended == "ok" and _lines(ran.stdout) == _lines(str(case["output"]))


async def _by_call(program: str, case: dict[str, Any], entry: str, limits: Limits) -> bool:
    end = f"import json\nprint({_RESULT!r} + json.dumps(scope[{entry!r}](*{case['args']!r})))"
    ran = await run_program(_scoped(program, end), limits=limits)
    _, printed, text = ran.stdout.rpartition(_RESULT)
    try:
        return ran.ended == "ok" and bool(printed) and _same(json.loads(text), case["output"])
    except Exception:  # what a program printed cannot be read: the program is wrong
        return False


async def _by_assert(program: str, case: str, entry: str, limits: Limits) -> bool:
    """Runs the test in one process and the program in another, which answers for its names."""
    names, modules = names_asked(case, entry)
    with contextlib.ExitStack() as pipes:
        (read_questions, ask), (read_answers, answer) = (_pipe(pipes) for _ in range(2))
        ends = [file.fileno() for file in (read_answers, ask, read_questions, answer)]
        judge = _script("judge", case, names, modules, *ends[:2])
        served = _script("serve", program, *ends[2:])
        serving = asyncio.create_task(
            run_program(served, limits=limits, files=(read_questions, answer))
        )
        try:
            ran = await run_program(judge, limits=limits, files=(read_answers, ask))
            if ran.code == asserts.LOST or serving.done():  # the sandbox may have failed
                await serving
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
    if ran.code == asserts.REFUSED:
        raise ValueError(f"test {case!r}: {ran.stderr.strip()}")
    return ran.ended == "ok"


def _pipe(pipes: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Returns the ends to read and to write, which `pipes` closes."""
    read, write = os.pipe()
    ends = os.fdopen(read, "rb", 0), os.fdopen(write, "wb", 0)
    return pipes.enter_context(ends[0]), pipes.enter_context(ends[1])


def _script(function: str, *args: Any) -> str:
    """Returns a program that calls a function of asserts.py."""
    text = Path(asserts.__file__).read_text(encoding="utf-8")
    return f"{text}\n{function}(*{args!r})\n"


def _scoped(program: str, end: str) -> str:
    """Returns a program that executes `program` as a module, then `end` beside it."""
    return f"scope = {{'__name__': 'program'}}\nexec({program!r}, scope)\n{end}\n"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _same(value: Any, expected: Any) -> bool:
    """Compares values as JSON has them: integers exactly, other numbers up to rounding."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int) and isinstance(expected, int):
        return value == expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        try:
            return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-9)
        except OverflowError:  # an integer that is larger than any float
            return False
    if isinstance(value, list) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == {str(k) for k in expected} and all(
            _same(value[str(k)], v) for k, v in expected.items()
        )
    return bool(value == expected)


# tests that are assert statements, before the run begins


def names_asked(text: str, entry: str) -> tuple[list[str], dict[str, str]]:
    """Returns the names that a test takes from the program, and the modules by the names that it
    uses without an import. Raises ValueError for a test that is no Python, takes nothing from the
    program, takes a kind of error or a base class, imports * or what is not installed, or makes
    for it what cannot be handed over; with `entry`, also for one that takes a function of the
    module math or alike.

    Names of builtins are the program's where `entry` names them, and those of modules of the
    standard library where they are not used as `module.name`."""
    try:
        tree = ast.parse(text)
        tables = [symtable.symtable(text, "test", "exec")]
    except (SyntaxError, ValueError, RecursionError) as e:
        raise ValueError(f"no Python: {e}") from e
    bound = {s.get_name() for s in tables[0].get_symbols() if s.is_assigned() or s.is_imported()}
    used = set[str]()
    for table in tables:
        tables += table.get_children()
        loose = (s for s in table.get_symbols() if s.is_global() or table is tables[0])
        used |= {s.get_name() for s in loose if s.is_referenced()}
    used -= bound | ({*dir(builtins)} - {entry})
    nodes = list(ast.walk(tree))
    if missing := sorted(name for name in _imported(tree) if not _is_installed(name)):
        raise ValueError(f"imports {', '.join(missing)}, which is not installed: install it")
    dotted = _names([n.value for n in nodes if isinstance(n, ast.Attribute)])
    modules = {n: _MODULES[n] for n in used & dotted & _MODULES.keys() - {entry}}
    names = sorted(used - modules.keys())
    if not names:
        raise ValueError(
            "takes no name from the program; call its functions, and name one that is called like "
            "a builtin in the column `entry`"
        )
    made_here = [n.type for n in nodes if isinstance(n, ast.ExceptHandler) and n.type]
    made_here += [base for n in nodes if isinstance(n, ast.ClassDef) for base in n.bases]
    if any(isinstance(n, ast.ImportFrom) and n.names[0].name == "*" for n in nodes):
        raise ValueError("imports *, which may hide the program's names: import names one by one")
    if entry and (wrong := sorted({*names} & _comparing_names() - {entry})):
        raise ValueError(
            f"would take {', '.join(wrong)} from the program, to be judged by: import it in the "
            f"test (entry={entry!r} names what the program is to define)"
        )
    if wrong := sorted(_handed_over(nodes, {*names})):
        raise ValueError(f"hands {', '.join(wrong)} to the program; hand over plain data")
    if wrong := sorted(_names([n for node in made_here for n in ast.walk(node)]) & {*names}):
        raise ValueError(f"catches or inherits {', '.join(wrong)} of the program's")
    return names, modules


def _imported(tree: ast.Module) -> set[str]:
    """Returns the packages that a test imports whatever happens."""
    named = [alias.name for n in tree.body if isinstance(n, ast.Import) for alias in n.names]
    named += [n.module or "." for n in tree.body if isinstance(n, ast.ImportFrom)]
    return {name.partition(".")[0] for name in named}


@functools.cache
def _is_installed(package: str) -> bool:
    return bool(package) and importlib.util.find_spec(package) is not None


@functools.cache
def _comparing_names() -> set[str]:
    """Returns names that a test means a module's function by, where it forgets to import it."""
    modules = [importlib.import_module(name) for name in ("math", "cmath", "statistics")]
    exported = {name for module in modules for name in getattr(module, "__all__", dir(module))}
    return {name for name in exported if not name.startswith("_")}


def _handed_over(nodes: Sequence[ast.AST], names: set[str]) -> set[str]:
    """Returns what calls of the program's functions are given that cannot cross, where it is made
    in the call: generators, and objects of classes of the test's that cannot be called."""
    classes = {
        node.name: f"an object of {node.name}"
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and not any(isinstance(n, ast.FunctionDef) and n.name == "__call__" for n in node.body)
    }
    named = set[str]()
    for call in nodes:
        if isinstance(call, ast.Call) and _names([call.func]) & names:
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            callees = _names([value.func for value in given if isinstance(value, ast.Call)])
            named |= {classes[name] for name in callees & classes.keys()}
            named |= {"a generator" for value in given if isinstance(value, ast.GeneratorExp)}
    return named


def _names(nodes: Sequence[ast.AST]) -> set[str]:
    return {n.id for n in nodes if isinstance(n, ast.Name)}
