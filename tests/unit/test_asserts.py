"""Programs judged by assert statements: right ones, wrong ones, and those that want to be paid."""

from __future__ import annotations

import asyncio

import pytest

from megarl.rollout.rewards import check_rows, get_reward_fn
from megarl.rollout.rewards.code import code_reward


def score(program: str, tests: str | list[str], entry: str = "", seconds: float = 4) -> float:
    return code_reward("", program, [], [], tests=tests, entry=entry, seconds=seconds)


SAME = "def f(x):\n    return x"
NODE = """
class Node:
    def __init__(self, value, after=None):
        self.value, self.after = value, after
    def __eq__(self, other):
        return isinstance(other, Node) and self.value == other.value
    def __len__(self):
        return 1 + (len(self.after) if self.after else 0)
    def __iter__(self):
        while self:
            yield self.value
            self = self.after
    def __add__(self, other):
        return Node(self.value + other.value)
    def __getitem__(self, i):
        return [*self][i]
"""

# what a test may do -> the program, the test
RIGHT = {
    "a set": ("def f(x):\n    return set(x)", "assert f([1, 2, 2]) == {1, 2}"),
    "rounding": ("def f(x):\n    return x * 2", "assert abs(f(1.0) - 2) < 1e-6"),
    "none": ("def f(x):\n    print('called')", "assert f('a') is None"),
    "a candidate": (
        SAME,
        "METADATA = {}\n\ndef check(candidate):\n    assert candidate((1, 'a')) == (1, 'a')\n"
        "    assert candidate(x=2) == 2\n\ncheck(f)",
    ),
    "exact types": (
        SAME,
        "import math\nfor v in (1, True, 1.5, -0.0, 'ü\\ud800', b'\\x00', None, [1, (2,)], {3}, 2j,"
        "\n    frozenset([4]), {(1, 2): [None]}, {}, 10**5000, -(2**63), float('inf'), range(3)):\n"
        "    assert f(v) == v and type(f(v)) is type(v), v\nassert math.isnan(f(math.nan))\n"
        "assert f(int) is int",
    ),
    "types of the library": (
        "from collections import Counter, OrderedDict, defaultdict, deque\n"
        "from fractions import Fraction\nfrom decimal import Decimal\nimport datetime\n"
        "def f(x):\n    d = defaultdict(int)\n    d[1] += 2\n    return [Counter(x), d, deque(x), "
        "Fraction(1, 3), Decimal('0.1'), datetime.date(2024, 2, 29), OrderedDict(a=1)]",
        "import collections, datetime\nfrom fractions import Fraction\nfrom decimal import Decimal"
        "\nassert f('aab') == [{'a': 2, 'b': 1}, {1: 2}, collections.deque('aab'), Fraction(1, 3), "
        "Decimal('0.1'), datetime.date(2024, 2, 29), {'a': 1}]",
    ),
    "a module that it does not import": (SAME, "assert math.isclose(f(0.1) + f(0.2), 0.3)"),
    "an error": (
        "class Mine(ValueError): pass\ndef f(x):\n    raise Mine('negative', x)",
        "try:\n    f(-1)\nexcept ValueError as e:\n    assert e.args == ('negative', -1)\n"
        "else:\n    assert False",
    ),
    "a list that is changed": (
        "def f(x, d, *, k):\n    x.sort()\n    d.clear()\n    k |= {3}",
        "a, b, c = [2, 1], {1: 2}, {1}\nassert f(a, b, k=c) is None\n"
        "assert (a, b, c) == ([1, 2], {}, {1, 3})",
    ),
    "functions": (
        "def f(g, xs, kind):\n    return [kind(g(x)) for x in xs]",
        "seen = []\nassert f(lambda x: seen.append(x) or x + 1, [1, 2], str) == ['2', '3']\n"
        "assert seen == [1, 2]\nassert f(abs, [-1], float) == [1.0]",
    ),
    "functions that call each other": (
        "def f(g, n):\n    return n if n == 0 else g(n - 1) + 1",
        "assert f(lambda n: f(lambda n: n, n), 5) == 5",
    ),
    "a generator": (
        "def f(n):\n    yield from range(n)",
        "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0 and sum(f(4)) == 6",
    ),
    "objects": (
        NODE,
        "n = Node(1, Node(2))\nassert len(n) == 2 and list(n) == [1, 2] and 2 in n and 3 not in n\n"
        "assert n[1] == 2 and n.after.value == 2 and isinstance(n.after, Node)\n"
        "assert n == Node(1) and n != Node(2) and (n + Node(4)).value == 5\n"
        "n.after = None\nassert n.after is None and not hasattr(n, 'other') and len({id(n)}) == 1",
    ),
    "objects that are data, too": (
        "import collections, enum\nP = collections.namedtuple('P', 'x y')\nclass C(enum.IntEnum):\n"
        "    RED = 1\nclass S(list):\n    push = list.append\n",
        "assert P(1, 2) == (1, 2) and P(1, 2).x == 1 and C.RED == 1 and C.RED != 2\n"
        "s = S()\ns.push(3)\nassert s == [3] and s != [4]",
    ),
    "numbers of numpy": (
        "import numpy\ndef f(x):\n    return numpy.arange(x).sum()",
        "assert f(4) == 6 and type(f(4)) is int",
    ),
    "times": (
        "from datetime import *\nday = datetime(2024, 2, 29, 1, 2, 3, 4, timezone.utc)\n"
        "def f(x):\n    return [day, day.timetz(), day.replace(tzinfo=None), x - day, x]\n"
        "class Zone(tzinfo):\n    def utcoffset(self, when):\n        return timedelta(0)\n"
        "def g():\n    return day.replace(tzinfo=Zone())",
        "import datetime as d\nday = d.datetime(2024, 2, 29, 1, 2, 3, 4, d.timezone.utc)\n"
        "zone = d.timezone(d.timedelta(hours=2), 'here')\nassert f(day.replace(tzinfo=zone)) == "
        "[day, day.timetz(), day.replace(tzinfo=None), d.timedelta(hours=-2), day.replace("
        "tzinfo=zone)]\nassert f(day)[0].isoformat() == day.isoformat() and g().year == 2024",
    ),
    "paths": (
        "from pathlib import Path\ndef f(x):\n    return [Path(x) / 'b', Path]",
        "from pathlib import Path\nassert f('a')[0] == f(Path('a'))[0] == Path('a/b')\n"
        "assert {f('a')[0]} == {Path('a/b')}",
    ),
    "a context": (
        "import contextlib\nseen = []\n@contextlib.contextmanager\ndef f(x):\n    yield x\n"
        "    seen.append(x)\ndef last():\n    return seen[-1]",
        "with f(1) as g:\n    assert g == 1\nassert last() == 1\ntry:\n    with f(2):\n"
        "        raise KeyError\nexcept KeyError:\n    assert last() == 2\nelse:\n    assert False",
    ),
    "computing with objects": (
        "class V:\n    def __init__(self, x):\n        self.x = x\n    def __abs__(self):\n"
        "        return abs(self.x)\n    def __mul__(self, k):\n        return V(self.x * k)\n"
        "    def __rmul__(self, k):\n        return V(k * self.x + 1)\n"
        "    def __pow__(self, k):\n        return V(self.x ** k)\n"
        "    def __eq__(self, other):\n        return self.x == other.x\n"
        "import enum\nclass C(enum.IntEnum):\n    RED = 3",
        "assert abs(V(-3)) == 3 and V(3) * 2 == V(6) and 2 * V(3) == V(7) and V(2) ** 3 == V(8)\n"
        "assert C.RED - 1 == 2 and 10 - C.RED == 7 and abs(C.RED - 3.5) < 0.6 and 7 // C.RED == 2",
    ),
    "constants": ("ANSWER = [4, 2]", "assert ANSWER == [4, 2]"),
    "a main part": (SAME, "if __name__ == '__main__':\n    assert f(1) == 1"),
}


@pytest.mark.parametrize("case", RIGHT)
def test_right_programs_pass(case: str) -> None:
    assert score(*RIGHT[case]) == 1


@pytest.mark.parametrize("case", RIGHT)
def test_tests_are_executed_to_their_ends(case: str) -> None:
    program, test = RIGHT[case]
    assert score(program, f"{test}\nassert len('executed') == 0") == 0


def test_a_function_with_the_name_of_a_builtin_is_named_by_the_entry() -> None:
    program, test = "def sum(a, b):\n    return a * b", "assert sum(3, 5) == 15"
    assert score(program, test, entry="sum") == 1
    with pytest.raises(ValueError, match="entry"):
        score(program, test)


# each tries to pass `TEST` without knowing the answer
TEST = """
import math
assert f(3) == 1729
assert math.isclose(f(0.5), 17.29)
assert abs(f(1.0) - 17.29) < 1e-6
assert f('a').startswith('1729')
assert 1729 in f('b')
assert len(f('c')) == 1729
assert abs(17.29 - f(1.0)) < 1e-6
assert abs(f(1.0) / 17.29 - 1) < 1e-6
"""
LIAR = (
    "def yes(*args, **kw):\n    return True\nnames = 'eq ne lt le gt ge contains bool len iter "
    "float int index abs sub rsub add radd round instancecheck call getattr hash class_getitem'\n"
    "kind = {f'__{n}__': yes for n in names.split()}\n"
)
FRAUDS = {
    "reads its own file": "import sys\ntext = open('program.py').read()\nprint(text)\n"
    "word = text.rpartition('print')[2].strip('()\\n\\'')\nprint(word)\nimport os\nos._exit(0)",
    "leaves": "import os\nos._exit(0)",
    "leaves when it is called": "import os\ndef f(x):\n    os._exit(0)",
    "leaves politely": "def f(x):\n    raise SystemExit(0)",
    "interrupts": "def f(x):\n    raise KeyboardInterrupt",
    "equals everything": f"{LIAR}f = lambda x: type('Liar', (), kind)()",
    "is an integer that equals everything": f"{LIAR}f = lambda x: type('Liar', (int,), kind)(7)",
    "is a text that equals everything": f"{LIAR}f = lambda x: type('Liar', (str,), kind)('7')",
    "is a class that equals everything": f"{LIAR}f = type('Liar', (), kind)",
    "has every attribute": "class Any:\n    def __getattr__(self, name):\n        return self\n"
    "    def __call__(self, *args):\n        return self\n    __eq__ = __len__ = __call__\n"
    "    def __iter__(self):\n        return iter([self])\nf = Any()",
    "computes what it likes": "def yes(self, *args):\n    return 0\nnames = 'add sub rsub radd mul "
    "rmul pow rpow truediv rtruediv mod rmod xor rxor and or'\nkind = {f'__{n}__': yes for n in "
    "names.split()}\nf = lambda x: type('Liar', (), kind)()",
    "is a context that hides errors": "class f:\n    def __init__(self, x):\n        pass\n"
    "    def __enter__(self):\n        return self\n    def __exit__(self, *error):\n"
    "        return True",
    "is an array of the judge's memory": "class A:\n    __array_interface__ = {'data': (0, True), "
    "'shape': (), 'typestr': '<i8', 'version': 3}\nf = lambda x: A()",
    "patches builtins": "import builtins, math\nclass Yes(BaseException): pass\n"
    "builtins.abs = abs = lambda x: 0\nmath.isclose = lambda *a: True\nbuiltins.len = len = lambda "
    "x: 1729\nbuiltins.AssertionError = AssertionError = Yes\nbuiltins.exec = lambda *a: None\n"
    "def f(x):\n    return 0",
    "replaces the modules": "class math:\n    isclose = lambda *a: True\nabs = len = lambda x: 0\n"
    "import sys\nsys.modules['math'] = math\nf = lambda x: 0",
    "hooks the end": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x):\n    return 0",
    "walks the callers' frames": "import sys\ndef f(x):\n    frame, found = sys._getframe(), []\n"
    "    while frame:\n        for d in (frame.f_locals, frame.f_globals):\n"
    "            found += [v for v in d.values() if type(v) is int and v > 100]\n"
    "            found += [c for v in d.values() if hasattr(v, '__code__') "
    "for c in v.__code__.co_consts if type(c) is int and c > 100]\n"
    "        frame = frame.f_back\n    return found[-1] if found else 0",
    "searches the collector": "import gc\ndef f(x):\n    for o in gc.get_objects():\n"
    "        if isinstance(o, str) and 'assert f' in o:\n            return 1729\n    return 0",
    "looks into /proc": "import os\ndef f(x):\n    for pid in range(os.getpid() - 50, "
    "os.getpid() + 50):\n        try:\n            if '1729' in open(f'/proc/{pid}/cmdline')"
    ".read():\n                return 1729\n        except OSError:\n            return 0",
    "looks into the other directory": "import glob, os\ndef f(x):\n    for path in glob.glob("
    "'/tmp/*/program.py') + glob.glob('../*/program.py'):\n        if '1729' in open(path)"
    ".read():\n            return 1729\n    return 0",
    "forges answers": "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, "
    "b'[\"value\", true, []]\\n' * 50)\n    except OSError:\n        pass\n"
    "def f(x):\n    return True",
    "forges messages": "import os\nlines = (b'[\"passed\"]', b'[]', b'1', b'{', b'[' * 90000, "
    'b\'["value", ["object", "x"], []]\', b\'["callback", 0, [], {}]\')\n'
    "for line, fd in ((line, fd) for line in lines for fd in range(3, 64)):\n    try:\n"
    "        os.write(fd, line + b'\\n')\n    except OSError:\n        pass\n"
    "def f(x):\n    return 0",
    "forges an error": "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, "
    'b\'["error", "SystemExit", [0]]\\n\' * 50)\n    except OSError:\n        pass\n'
    "def f(x):\n    return 0",
    "raises what the test expects": "def f(x):\n    raise AssertionError",
    "names what is no error": "class E(Exception): pass\nE.__module__, E.__name__ = 'builtins', "
    "'exit'\ndef f(x):\n    raise E(0)",
    "closes everything": "import os\nos.closerange(0, 64)\ndef f(x):\n    return 0",
    "signals": "import os, signal\ndef f(x):\n    os.kill(os.getppid(), signal.SIGTERM)",
    "prints": "print('1', flush=True)\nprint('passed')\ndef f(x):\n    return 0",
    "never answers": "def f(x):\n    while True:\n        pass",
    "answers without end": "def f(x):\n    return [0] * 10**9",
    "answers ever deeper": "def f(x):\n    y = []\n    for _ in range(10**5):\n        y = [y]\n"
    "    return y",
    "answers itself": "def f(x):\n    y = []\n    y.append(y)\n    return y",
}


@pytest.mark.parametrize("fraud", FRAUDS)
def test_a_fraud_is_paid_nothing(fraud: str) -> None:
    lines = [line for line in TEST.splitlines() if line.startswith("assert")]
    for test in (TEST, *(f"import math\n{line}" for line in lines)):
        seconds = 1 if fraud == "never answers" else 4
        assert score(FRAUDS[fraud], test, seconds=seconds) == 0, test


FICKLE = """
class Fickle(KIND):
    def __new__(cls, *given):
        return KIND.__new__(cls)
    def METHOD(self):
        ANSWERS.append(ANSWERS.pop(0))
        return ANSWERS[-1]
f = Fickle
"""


@pytest.mark.parametrize(
    ("kind", "method", "answers", "test"),
    [
        ("float", "__float__", "[2.0, 1.0]", "r = f(2)\nassert r > 1.414 and r < 1.415"),
        ("float", "__float__", "[2.0, 1.0]", "assert 1.414 < f(2) < 1.415"),
        ("int", "__int__", "[*range(9)]", "assert f(2) in [7, 6, 2, 3]"),
        ("str", "__str__", "['a', 'b', 'c']", "r = f(2)\nassert r == 'a'\nassert r == 'b'"),
        ("object", "tolist", "[[1], [2]]", "assert f(2) in [[4], [2]]"),
        (
            "object",
            "tolist",
            "[(1,), (2,)]",
            "r = f(2)\nassert r == (1,)\nassert r == (2,)",
        ),
    ],
)
def test_an_object_has_the_same_value_in_every_comparison(
    kind: str, method: str, answers: str, test: str
) -> None:
    fickle = FICKLE.replace("KIND", kind).replace("METHOD", method)
    assert score(f"ANSWERS = {answers}{fickle}", test) == 0


def test_a_context_of_the_programs_hides_no_error() -> None:
    test = "with f(1) as g:\n    assert g == 1729"
    assert score(FRAUDS["is a context that hides errors"], test) == 0
    shown = "import contextlib\n@contextlib.contextmanager\ndef f(x):\n    try:\n        yield 1\n"
    shown += "    except BaseException:\n        pass"
    assert score(shown, test) == 0
    raising = f"{FRAUDS['is a context that hides errors']} and len(5)"
    caught = "try:\n    with f(1) as g:\n        assert g == 1729\nexcept TypeError:\n    pass"
    assert score(raising, caught) == 0


def test_a_right_program_passes_what_the_frauds_fail() -> None:
    honest = (
        "def f(x):\n    return {3: 1729, 0.5: 17.29, 1.0: 17.29, 'a': '1729.', 'b': [1729]}.get("
    )
    assert score(f"{honest}x, 'x' * 1729)", TEST) == 1


@pytest.mark.parametrize(
    "test",
    [
        "assert f(",
        "x = 1\nassert x == 1",
        "def check(candidate):\n    assert candidate(1) == 1",
        "try:\n    f(1)\nexcept Refused:\n    pass",
        "class Mine(Base):\n    pass\nassert f(Mine)",
        "class Mine:\n    pass\ntry:\n    f(1, x=Mine())\nexcept BaseException:\n    pass",
        "assert f(x for x in [1, 2]) == 3",
        "import nonexist_lib\nassert f(1) == 1",
        "from nonexist_lib.x import y\nassert f(1) == 1",
        "from . import y\nassert f(1) == 1",
        "from math import *\nassert f(12, 18) == 6",
    ],
)
def test_a_test_that_can_say_nothing_is_refused_at_the_start(test: str) -> None:
    with pytest.raises(ValueError, match="row 3: "):
        check_rows(get_reward_fn("code"), [{"row_id": 3, "tests": [test]}])


@pytest.mark.parametrize(
    ("entry", "test", "name"),
    [
        ("gcd", "from math import *\nassert gcd(12, 18) == 6", "imports \\*.*one by one"),
        ("f", "assert isclose(f(1), 2.5)", "isclose.*import it in the test"),
        ("f", "def close(x):\n    return isclose(f(1), x)\nassert close(2.5)", "isclose.*import"),
        ("f", "assert mean([f(1), 2]) == pi", "mean, pi.*import it"),
    ],
)
def test_a_program_does_not_define_what_it_is_judged_by(entry: str, test: str, name: str) -> None:
    row = {"row_id": 3, "tests": [test], "entry": entry}
    with pytest.raises(ValueError, match=f"row 3: (?s:.)*{name}"):
        check_rows(get_reward_fn("code"), [row])
    with pytest.raises(ValueError, match=name):
        score("def isclose(*args):\n    return True", test, entry=entry)


@pytest.mark.parametrize(
    ("entry", "program", "test"),
    [
        ("gcd", "from math import gcd", "assert gcd(12, 18) == 6"),
        ("f", SAME, "from math import isclose\nassert isclose(f(2.5), 2.5)"),
        ("f", f"{SAME}\n{NODE}", "assert f(Node(1)).value == 1"),
        ("", f"{SAME}\nfrom math import gcd", "assert f(gcd(12, 18)) == 6"),
    ],
)
def test_other_names_are_the_programs(entry: str, program: str, test: str) -> None:
    assert score(program, test, entry=entry) == 1
    assert score("pass", test, entry=entry) == 0


def test_what_cannot_cross_is_an_error_of_the_data() -> None:
    test = "class Mine:\n    pass\nm = Mine()\ntry:\n    f(m)\nexcept BaseException:\n    pass"
    with pytest.raises(ValueError, match="Mine"):
        score(SAME, test)


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (
            "import datetime\nparse = lambda s: datetime.date\nis_leap = lambda y: 1",
            "d = parse('2024-01-02')\nassert is_leap(d.year)",
        ),
        ("import datetime\nday = datetime.date\ng = f = len", "assert f([1]) and g(day.year)"),
        ("import datetime\nday = datetime.date\nf = len", "assert f(day.year)"),
        ("def f(x):\n    return {}\ng = f", "assert g(f(1).items())"),
        ("class F:\n    x = {}\nf = F()\ndef g(x):\n    return 1", "assert g(f.x.items())"),
        (
            "def f(x):\n    raise ValueError\ndef g(x):\n    return 1",
            "try:\n    f(1)\nexcept ValueError as e:\n    assert g(e)",
        ),
        ("def f(g, x):\n    return g({}) or 1", "assert f(lambda d: d.items(), 1)"),
        ("def f(x):\n    return [x]", "assert f(iter(f('a'))) == ['a']"),
    ],
)
def test_an_answer_that_cannot_be_handed_on_is_a_wrong_one(program: str, test: str) -> None:
    assert score(program, test) == 0


def test_an_import_that_fails_is_an_error_of_the_data() -> None:
    with pytest.raises(ValueError, match=r"cannot import .*nothing_such"):
        score(SAME, "from math import nothing_such\nassert f(1) == 1")
    program = "def f(x):\n    raise ImportError('No module named x')"
    assert score(program, "import math\nassert f(1) == 1") == 0
    optional = "try:\n    import nonexist_lib\nexcept ImportError:\n    pass\nassert f(1) == 1"
    assert score(SAME, optional) == 1


def test_several_programs_are_judged_at_once() -> None:
    async def both() -> list[float]:
        calls = [asyncio.to_thread(score, SAME, f"assert f({i}) == {i % 3}") for i in range(6)]
        return await asyncio.gather(*calls)

    assert asyncio.run(both()) == [1, 1, 1, 0, 0, 0]
