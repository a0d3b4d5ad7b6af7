"""Writes which functions of megarl a process enters, and when.

Python imports this file at the start of every process that has this folder on PYTHONPATH.
MEGARL_WALKS is a JSON object: `out`, the folder to write to; `root`, the repository; `verbs`, for
each walk the qualified name of its function, of megarl or of tests/walks.py; whether it is a matter
of one `thread`, and whether its first call alone counts (`once`); `value`, a rare number (or null).

A process writes <pid>.log, a line for each of these, with tabs between the words:

    parent <pid>
    begin <walk> <time>              the first call of its function
    end <walk> <time> <returns>      the last return of it
    step <walk> <file> <function>    entered in the walk for the first time
    enter <time> <file> <function>   entered in this process for the first time
    value <time> <file> <function>   has the value in an argument or in its result

Bodies of modules and classes are not entered, nor is what they call as they are imported. A return
is a call into a file that the walk has left before.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

OPTIMIZED = 1  # the flag of functions, which bodies of modules and classes lack
PARTS = (
    "<listcomp>",
    "<dictcomp>",
    "<setcomp>",
    "<genexpr>",
)  # of a function that is there already
HEARTBEAT = "megarl-presence"  # the thread that writes now and then, in whatever walk that falls
DEPTH, LENGTH = 3, 100  # how far a value is looked for in what is given


def names(value: int, text: str) -> bool:
    """Whether a text has the value as a word of its own: the digits of another number, such as a
    socket's in /proc/net/tcp, may be the same by chance."""
    return str(value) in text and bool(re.search(rf"(?<![\w.]){value}(?!\w|\.\d)", text))


class Here(threading.local):
    """What one thread is in: so many imports; walks; the file it entered last."""

    imports = 0
    file = ""

    def __init__(self) -> None:
        self.walks: list[str] = []
        self.beats = threading.current_thread().name == HEARTBEAT


class Tracer:
    """Follows all threads of this process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.out, self.root = spec["out"], os.path.join(spec["root"], "megarl", "")
        self.program = os.path.join(spec["root"], "tests", "walks.py")
        self.verbs: dict[str, dict[str, Any]] = spec["verbs"]
        self.value: int | None = spec["value"]
        self.names = {v["function"] for v in self.verbs.values()}
        # id -> (the code, so that nothing else gets its id; file and function of megarl's)
        self.known: dict[int, tuple[CodeType, tuple[str, str] | None]] = {}
        self.here = Here()
        self.start()

    def start(self) -> None:
        """Begins a file, also in a process that was forked."""
        path = os.path.join(self.out, f"{os.getpid()}.log")
        self.log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.seen: set[tuple[str, ...]] = set()
        self.everywhere: list[str] = []  # walks that all threads are in
        self.over: set[str] = set()
        self.files: dict[str, set[str]] = {}  # of a walk
        self.returns: dict[str, int] = {}
        self.write("parent", str(os.getppid()))

    def write(self, *words: str) -> None:
        """Writes a line, at once: a process may end in any way."""
        os.write(self.log, ("\t".join(words) + "\n").encode())

    def classify(self, code: CodeType) -> tuple[CodeType, tuple[str, str] | None]:
        """Returns the code, and its file and function where it is a function of megarl."""
        place = None
        is_ours = code.co_filename.startswith(self.root) and code.co_flags & OPTIMIZED
        if is_ours and code.co_name not in PARTS:
            place = code.co_filename[len(self.root) :], code.co_qualname
        elif code.co_filename == self.program and code.co_qualname in self.names:
            place = "", code.co_qualname
        return code, place

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """Is called as functions begin and end."""
        if event != "call" and event != "return":
            return
        code = frame.f_code
        if code.co_name == "<module>":
            if frame.f_globals.get("__name__") != "__main__":
                self.here.imports += 1 if event == "call" else -1
            return
        found = self.known.get(id(code))
        if found is None:
            found = self.known[id(code)] = self.classify(code)
        if found[1] is None or self.here.imports > 0:
            return
        if event == "call":
            self.called(found[1], frame)
        else:
            self.returned(found[1], arg)

    def called(self, place: tuple[str, str], frame: FrameType) -> None:
        """Writes what a call of a function of megarl tells."""
        if place[1] in self.names:
            self.begin(place[1])
        if not place[0]:
            return
        self.once("enter", *place, when=True)
        for walk in (*self.here.walks, *(() if self.here.beats else self.everywhere)):
            self.once("step", walk, *place)
            files = self.files[walk]
            if place[0] != self.here.file and place[0] in files:
                self.returns[walk] += 1
            files.add(place[0])
        self.here.file = place[0]
        if self.value is not None and any(self.holds(v) for v in list(frame.f_locals.values())):
            self.once("value", *place, when=True)

    def returned(self, place: tuple[str, str], result: Any) -> None:
        """Writes what a function's end tells."""
        if self.value is not None and self.holds(result):
            self.once("value", *place, when=True)
        if place[1] in self.names:
            self.end(place[1])

    def begin(self, function: str) -> None:
        """Begins the walks of a function."""
        for walk, verb in self.verbs.items():
            if verb["function"] == function and walk not in self.over:
                self.once("begin", walk, when=True)
                (self.here.walks if verb["thread"] else self.everywhere).append(walk)
                self.files[walk], self.returns[walk] = set(), 0

    def end(self, function: str) -> None:
        """Ends them."""
        for walk, verb in self.verbs.items():
            walks = self.here.walks if verb["thread"] else self.everywhere
            if verb["function"] == function and walk in walks:
                walks.remove(walk)
                self.write("end", walk, repr(time.monotonic()), str(self.returns[walk]))
                if verb["once"]:
                    self.over.add(walk)

    def once(self, kind: str, *words: str, when: bool = False) -> None:
        """Writes a line that is not there yet, with the time where that is wanted."""
        if (kind, *words) in self.seen:
            return
        self.seen.add((kind, *words))
        if not when:
            self.write(kind, *words)
        elif kind == "begin":
            self.write(kind, *words, repr(time.monotonic()))
        else:
            self.write(kind, repr(time.monotonic()), *words)

    def holds(self, what: Any, depth: int = DEPTH) -> bool:
        """Whether `what` is the value (or so many MiB in bytes), or a text that `names` it, or has
        it: as an item of lists and dicts in each other, or as an object's own attribute."""
        assert self.value is not None
        if type(what) in (int, float):
            return what in (self.value, self.value << 20)
        if type(what) is str:
            return names(self.value, what)
        if depth == 0 or len(what) > LENGTH if isinstance(what, (dict, list, tuple)) else False:
            return False
        if isinstance(what, dict):
            return any(self.holds(v, depth - 1) for v in list(what.values()))
        if isinstance(what, (list, tuple)):
            return any(self.holds(v, depth - 1) for v in list(what))
        own = getattr(what, "__dict__", None)
        return type(own) is dict and any(
            type(v) is int and v in (self.value, self.value << 20) for v in list(own.values())
        )


def unseen(find: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that imports, not followed where the module is new: nothing counts there,
    and it would take most of the time."""

    @functools.wraps(find)
    def imports(name: str, *args: Any, **named: Any) -> Any:
        profile = sys.getprofile()
        if profile is None or name in sys.modules:
            return find(name, *args, **named)
        sys.setprofile(None)
        try:
            return find(name, *args, **named)
        finally:
            sys.setprofile(profile)

    return imports


if "MEGARL_WALKS" in os.environ:
    tracer = Tracer(json.loads(os.environ["MEGARL_WALKS"]))
    os.register_at_fork(after_in_child=tracer.start)
    builtins.__import__ = unseen(builtins.__import__)
    importlib.import_module = unseen(importlib.import_module)
    threading.setprofile(tracer.profile)
    sys.setprofile(tracer.profile)
