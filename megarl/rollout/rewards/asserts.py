"""Judges a program by assert statements, in two processes of the sandbox that share two pipes.

`judge` executes the test and has nothing of the program's; `serve` executes the program and answers
for its names. Values cross as plain data, which the judge makes, and compares, itself. What is no
plain data stays with the program, and the judge has a Handle of it: it can be called, iterated and
looked into, and a comparison with data takes its own plain data, so that the program is never shown
what is expected of it.

Both processes read this file as a script: it imports nothing of megarl.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
import importlib
import json
import operator
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

# how the judge ends: the test held, it did not, the program ended or spoke no protocol, the test
# hands over what cannot cross before it has anything of the program's
PASSED, FAILED, LOST, REFUSED = 0, 1, 4, 3

_NUMBERS = (int, float, complex)
_LARGE = 1 << 63  # an integer from here on is written in hex: decimals have a limit of digits
_CONTAINERS: tuple[Any, ...] = (list, tuple, set, frozenset)
_TIME = "hour minute second microsecond"


def _clock(value: Any, names: str) -> list[int]:
    return [getattr(value, name) for name in names.split()]


# types that cross as the arguments that make them
_MADE: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    bytes: lambda v: (v.decode("latin1"), "latin1"),
    bytearray: lambda v: (v.decode("latin1"), "latin1"),
    complex: lambda v: (v.real, v.imag),
    range: lambda v: (v.start, v.stop, v.step),
    decimal.Decimal: lambda v: (str(v),),
    fractions.Fraction: lambda v: (v.numerator, v.denominator),
    datetime.date: lambda v: (v.year, v.month, v.day),
    datetime.datetime: lambda v: (*_clock(v, "year month day"), *_clock(v, _TIME), v.tzinfo),
    datetime.time: lambda v: (*_clock(v, _TIME), v.tzinfo),
    datetime.timezone: lambda v: v.__getinitargs__(),
    datetime.timedelta: lambda v: (v.days, v.seconds, v.microseconds),
    pathlib.PosixPath: lambda v: (str(v),),
    pathlib.PurePosixPath: lambda v: (str(v),),
    collections.Counter: lambda v: (dict(v),),
    collections.OrderedDict: lambda v: (list(v.items()),),
    collections.defaultdict: lambda v: (None, dict(v)),
    collections.deque: lambda v: (list(v), v.maxlen),
}
_CHANGED = (list, set, dict, bytearray, *(t for t in _MADE if t.__module__ == "collections"))
_BASES: tuple[Any, ...] = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
_TYPES: dict[str, Any] = {t.__name__: t for t in (*_BASES, *_MADE, type(None))}
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
# what is asked of the program with a number of the test's: the others may show what is expected
_SCALED = ("mul", "pow")
_COMPUTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor")
# what the judge may ask of the program's objects
_ASKED: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*_COMPARED, *_COMPUTED)},
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "neg")},
    **{f.__name__: f for f in (getattr, setattr, delattr, iter, next, len, str, repr, hash, bool)},
    "abs": abs,
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None) and None,
    "isinstance": isinstance,
    "call": lambda fn, *args, **kw: fn(*args, **kw),
}
# methods of plain data that are given what is expected: of an object they would say what it likes
_SHOWN_WHAT_IS_EXPECTED = ("startswith", "endswith", "issubset", "issuperset", "isdisjoint")


class Peer:
    """Speaks with the other process: JSON, a line each. A value is JSON's own, or [its type's name,
    what makes it]."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = os.fdopen(read, "rb"), os.fdopen(write, "wb")

    def send(self, *message: Any) -> None:
        """Sends one message. Raises OSError where the other process has ended."""
        self._write.write(json.dumps(message).encode() + b"\n")
        self._write.flush()

    def receive(self) -> list[Any]:
        """Returns the next message. Raises EOFError where the other process has ended."""
        line = self._read.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        message = json.loads(line)
        if type(message) is not list or not message:
            raise ValueError("a message is a list")
        return message

    def encode(self, value: Any) -> Any:
        """Returns a value as it is sent."""
        kind: Any = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if abs(value) < _LARGE else ["int", hex(value)]
        if kind in _CONTAINERS:
            return [kind.__name__, [self.encode(v) for v in value]]
        if kind is dict:
            return ["dict", [[self.encode(k), self.encode(v)] for k, v in value.items()]]
        zone = getattr(value, "tzinfo", None) if kind in _MADE else None
        if kind in _MADE and type(zone) in (type(None), datetime.timezone):
            return [kind.__name__, [self.encode(v) for v in _MADE[kind](value)]]
        if kind is type and (named := [n for n, t in _TYPES.items() if t is value]):
            return ["type", named[0]]
        return self._encode_object(value)

    def decode(self, sent: Any) -> Any:
        """Returns the value that was sent. Raises where it is none."""
        if type(sent) is not list:
            return sent
        tag, content = sent
        if tag == "int":
            return int(content, 16)
        if tag == "type":
            return _TYPES[content]
        if tag == "dict":
            return {self.decode(k): self.decode(v) for k, v in content}
        kind: Any = _TYPES.get(tag)
        if kind in _CONTAINERS:
            return kind([self.decode(v) for v in content])
        if kind in _MADE:
            return kind(*[self.decode(v) for v in content])
        return self._decode_object(tag, content)

    def _encode_object(self, value: Any) -> Any:
        raise NotImplementedError

    def _decode_object(self, tag: str, content: Any) -> Any:
        raise NotImplementedError

    def send_result(self, fn: Callable[[], Any], given: Sequence[Any] = ()) -> None:
        """Sends what `fn` returns, and with None what it has left of `given`; or that it raised, as
        the nearest kind of error that Python has."""
        try:
            value = fn()
            left = [self.encode(v) for v in given] if value is None else []
            message = ["value", self.encode(value), left]
        except Exception as e:
            kind = next(k.__name__ for k in type(e).__mro__ if k.__module__ == "builtins")
            message = ["error", kind, [a if type(a) in (int, str) else str(a) for a in e.args]]
        self.send(*message)


class Program(Peer):
    """Answers for the names of a program that was executed in this process."""

    def __init__(self, scope: dict[str, Any], read: int, write: int) -> None:
        super().__init__(read, write)
        self._scope = scope
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def answer(self) -> None:
        """Answers the next question."""
        self._answer(*self.receive())

    def _answer(self, op: str, sent: list[Any], named: dict[str, Any]) -> None:
        if op == "name":
            return self.send_result(lambda: self._named(sent[0]))
        args = [self.decode(v) for v in sent]
        kw = {k: self.decode(v) for k, v in named.items()}
        if op == "plain":
            return self.send_result(lambda: self._plain(args[0]))
        given = [*args[1:], *kw.values()] if op == "call" else []
        return self.send_result(lambda: _ASKED[op](*args, **kw), given)

    def _named(self, name: str) -> Any:
        if name not in self._scope:
            raise NameError(name)
        return self._scope[name]

    def _plain(self, value: Any) -> Any:
        if hasattr(value, "tolist"):  # an array
            return value.tolist()
        return next(base(value) for base in _BASES if isinstance(value, base))

    def _encode_object(self, value: Any) -> Any:
        if isinstance(value, Callback):
            return ["callback", value.number]
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            return self.encode(value.item())
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return ["object", self._numbers[id(value)]]

    def _decode_object(self, tag: str, content: Any) -> Any:
        if tag == "object":
            return self._objects[content]
        if tag == "callback":
            return Callback(self, content)
        return operator.attrgetter(content[1])(importlib.import_module(content[0]))


class Callback:
    """Is a function of the test's that the program was given."""

    def __init__(self, program: Program, number: int) -> None:
        self.program, self.number = program, number

    def __call__(self, *args: Any, **kw: Any) -> Any:
        p = self.program
        p.send("callback", self.number, [*map(p.encode, args)], {k: p.encode(kw[k]) for k in kw})
        while (message := p.receive())[0] not in ("value", "error"):
            p._answer(*message)
        if message[0] == "error":
            raise error_of(*message[1:])
        return p.decode(message[1])


class Judge(Peer):
    """Asks the program. Whatever does not follow the protocol ends the judge, and the test has
    failed: no test can catch that."""

    def __init__(self, read: int, write: int) -> None:
        super().__init__(read, write)
        self._handles: dict[int, Handle] = {}
        self._functions: list[Callable[..., Any]] = []
        # the data of objects, by their numbers: those that cannot change, and those that may where
        # the program is asked for more
        self._constants: dict[int, Any] = {}
        self._contents: dict[int, Any] = {}
        self._heard = False  # whether the test may have something that the program chose

    def ask(self, op: str, *args: Any, **kw: Any) -> Any:
        """Returns the program's answer, or raises the error that it raised. Lists, dicts and sets
        that a call was given become what the program made of them where it returns None."""
        question = (op, [*map(self.encode, args)], {k: self.encode(kw[k]) for k in kw})
        if op != "plain":
            self._contents.clear()
        try:
            self.send(*question)
            while (message := self.receive())[0] == "callback":
                self._heard = True
                self._call_back(*message[1:])
            if message[0] == "error":
                value, left = error_of(*message[1:]), []
            else:
                value, left = self.decode(message[1]), [self.decode(v) for v in message[2]]
        except Exception as e:
            leave(LOST, f"no answer: {type(e).__name__}: {e}")
        self._heard |= op != "name" or not isinstance(value, Handle)
        if message[0] == "error":
            raise value
        for argument, content in zip((*args[1:], *kw.values()), left, strict=False):
            _update(argument, content)
        return value

    def data(self, handle: Handle) -> Any:
        """Returns the plain data of an object; NotImplemented where it is none. An object says once
        what it is, lest it answers each comparison anew: a list may be another after a call."""
        for cache in (self._constants, self._contents):
            if handle.megarl_number in cache:
                return cache[handle.megarl_number]
        try:
            value = self.ask("plain", handle)
        except Exception:
            value = NotImplemented
        if isinstance(value, Handle):
            value = NotImplemented
        cache = self._constants if _is_constant(value) else self._contents
        return cache.setdefault(handle.megarl_number, value)

    def _call_back(self, number: int, args: list[Any], kw: dict[str, Any]) -> None:
        fn = self._functions[number]
        given, named = [*map(self.decode, args)], {k: self.decode(v) for k, v in kw.items()}
        self.send_result(lambda: fn(*given, **named))

    def _encode_object(self, value: Any) -> Any:
        if isinstance(value, Handle):
            return ["object", value.megarl_number]
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if module == "builtins" or module in sys.stdlib_module_names - {"__main__"}:
            try:
                if operator.attrgetter(name)(sys.modules[module]) is value:
                    return ["named", [module, name]]
            except AttributeError:
                pass
        if callable(value):
            self._functions.append(value)
            return ["callback", len(self._functions) - 1]
        # a program must not end the run by an answer that cannot be handed on
        code = FAILED if self._heard else REFUSED
        leave(code, f"hands a {type(value).__name__} to the program, which is no plain data")

    def _decode_object(self, tag: str, content: Any) -> Any:
        if tag == "callback":
            return self._functions[content]
        if tag != "object" or type(content) is not int:
            raise ValueError(f"no kind of value: {tag}")
        return self._handles.setdefault(content, Handle(self, content))


class Handle:
    """Is an object of the program's, in the judge's process."""

    __slots__ = ("megarl_judge", "megarl_number")

    def __init__(self, judge: Judge, number: int) -> None:
        object.__setattr__(self, "megarl_judge", judge)
        object.__setattr__(self, "megarl_number", number)

    def __call__(self, *args: Any, **kw: Any) -> Any:
        return self.megarl_judge.ask("call", self, *args, **kw)

    def __getattr__(self, name: str) -> Any:
        # numpy and others do as an object's hidden names say
        if name in _SHOWN_WHAT_IS_EXPECTED or (name.startswith("__") and name != "__name__"):
            raise AttributeError(name)
        return self.megarl_judge.ask("getattr", self, name)

    def __iter__(self) -> Iterator[Any]:
        iterator = self.megarl_judge.ask("iter", self)
        while True:
            try:
                value = self.megarl_judge.ask("next", iterator)
            except StopIteration:
                return
            yield value

    def __enter__(self) -> Any:
        return self.megarl_judge.ask("enter", self)

    def __exit__(self, *error: Any) -> None:
        # what the test raised is not shown, and goes on: it may say what is expected
        with contextlib.suppress(*[Exception] if error[0] else []):
            self.megarl_judge.ask("exit", self)

    def __instancecheck__(self, other: Any) -> bool:
        return isinstance(other, Handle) and self.megarl_judge.ask("isinstance", other, self)


def _method(op: str) -> Callable[..., Any]:
    return lambda self, *args: self.megarl_judge.ask(op, self, *args)


def _operator(op: str, *, reflected: bool = False) -> Callable[..., Any]:
    """Returns a method that asks the program about two objects of its own. With data, the object's
    own data is compared, and computed with where it is a number; the program is asked for no more
    than its product with a number, or its power."""

    def method(self: Handle, other: Any) -> Any:
        judge = self.megarl_judge
        if isinstance(other, Handle):
            return judge.ask(op, self, other)
        data = judge.data(self)
        if op not in _COMPARED and not isinstance(data, _NUMBERS):
            if op not in _SCALED or not isinstance(other, _NUMBERS):
                return NotImplemented
            return judge.ask(op, other, self) if reflected else judge.ask(op, self, other)
        if data is NotImplemented:
            return data
        return getattr(operator, op)(*((other, data) if reflected else (data, other)))

    return method


for _name in ("setattr", "delattr", "getitem", "setitem", "delitem", "neg"):
    setattr(Handle, f"__{_name}__", _method(_name))
for _name in ("abs", "next", "len", "str", "repr", "hash", "bool"):
    setattr(Handle, f"__{_name}__", _method(_name))
for _name in (*_COMPARED, *_COMPUTED):
    setattr(Handle, f"__{_name.strip('_')}__", _operator(_name))
for _name in _COMPUTED:
    setattr(Handle, f"__r{_name.strip('_')}__", _operator(_name, reflected=True))


def error_of(kind: str, args: list[Any]) -> Exception:
    """Returns an error of one of Python's kinds. Raises where there is none."""
    for error in getattr(builtins, kind).__mro__:
        if issubclass(error, Exception):
            try:
                return error(*[a if type(a) in (int, str) else str(a) for a in args])
            except TypeError:
                continue
    raise ValueError(f"no kind of error: {kind}")


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_is_constant, value))
    return type(value) not in _CHANGED


def _update(argument: Any, content: Any) -> None:
    if type(argument) is list and type(content) is list:
        argument[:] = content
    elif type(argument) is type(content) and type(argument) in (dict, set):
        argument.clear()
        argument.update(content)


def leave(code: int, why: str) -> NoReturn:
    """Ends the judge, which nothing can catch."""
    print(why, file=sys.stderr, flush=True)
    os._exit(code)


def judge(text: str, names: list[str], modules: dict[str, str], read: int, write: int) -> None:
    """Executes a test in this process, and ends it with PASSED or another of the codes."""
    asking = Judge(read, write)
    scope: dict[str, Any] = {"__name__": "__main__"}
    try:
        for name, module in modules.items():
            scope[name] = importlib.import_module(module)
        tree = ast.parse(text)
        tree.body = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        exec(compile(tree, "test", "exec"), {"__name__": "__main__"})
    except ImportError as e:  # nothing of the program's was asked for yet
        leave(REFUSED, f"cannot import what it needs: {e}")
    except BaseException:
        leave(FAILED, traceback.format_exc())
    try:
        for name in names:
            try:
                scope[name] = asking.ask("name", name)
            except NameError:  # the test says so where it comes to it
                continue
        exec(compile(text, "test", "exec"), scope)
    except BaseException:
        leave(FAILED, traceback.format_exc())
    os._exit(PASSED)


def serve(program: str, read: int, write: int) -> None:
    """Executes a program in this process, and answers for its names until nobody asks."""
    scope: dict[str, Any] = {"__name__": "program"}
    exec(compile(program, "program.py", "exec"), scope)
    answering = Program(scope, read, write)
    while True:
        answering.answer()
