"""Shows an error by the user's own lines, also an error that another process raised."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

PACKAGE = os.path.join(os.path.realpath(Path(__file__).parents[1]), "")
STDLIB = os.path.join(os.path.realpath(sysconfig.get_path("stdlib")), "")
Line = tuple[str, int, str, str | None]  # file, line, function, text


class RemoteTrace(Exception):
    """The traceback of an error in another process, as the cause of the error that stands for it.

    lines: the user's lines in the traceback. text: the complete traceback."""

    def __init__(self, lines: Sequence[Line], text: str) -> None:
        super().__init__(lines, text)
        self.lines, self.text = lines, text

    @classmethod
    def of(cls, error: BaseException) -> RemoteTrace:
        """Returns the trace of an error of this process, which can be pickled; one without lines if
        Python cannot print the error."""
        lines = [(f.filename, f.lineno or 0, f.name, f.line) for f in user_lines(error)]
        try:
            return cls(lines, "".join(traceback.format_exception(error)))
        except Exception as e:
            return cls(lines, f"(Python cannot print the traceback: {type(e).__name__})")

    def __str__(self) -> str:
        return f"\n{self.text.rstrip()}"


def user_lines(error: BaseException) -> traceback.StackSummary:
    """Returns the frames of the user's files in the traces of an error and of its causes, the
    innermost error first; none where only megarl's and libraries' were on the way."""
    lines = [line for each in reversed(_chain(error)) for line in _lines_of(each)]
    return traceback.StackSummary.from_list(lines)


def text_of(error: BaseException) -> str:
    """Returns the message of an error, also if its `__str__` raises."""
    try:
        return str(error)
    except Exception as e:
        return f"(its __str__ raised {type(e).__name__})"


def in_one_line(error: BaseException) -> str:
    """Returns an error as one line: its type, its message, and the user's file, line and function
    where its first cause was raised, if there are such. A SyntaxError's message has them."""
    text = " ".join(f"{type(error).__name__}: {text_of(error)}".split()).removesuffix(":")[:1000]
    if isinstance(error, SyntaxError):
        return text
    for each in reversed(_chain(error, implicit=False)):
        if lines := _lines_of(each):
            file, line, function, _ = lines[-1]
            return f"{text} ({file}, line {line}, in {function})"
    return text


def in_users_lines(error: BaseException, file: Path) -> str | None:
    """Returns an error as the user's lines and its message, and writes the whole trace to `file`;
    None, and writes nothing, where no line is the user's or there is no room for the file."""
    if not (lines := user_lines(error)):
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        trace = "".join(traceback.format_exception(error))
        file.write_bytes(trace.encode(errors="backslashreplace"))
    except (OSError, ValueError):
        return None
    shown = "".join([*lines.format(), *traceback.format_exception_only(error)])
    return f"Traceback, your own lines (the whole is in {file}):\n{shown.rstrip()}"


def _lines_of(error: BaseException) -> Sequence[Line]:
    """Returns the user's lines in the trace of an error itself."""
    if isinstance(error, RemoteTrace):
        return error.lines
    packages = [p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages")]
    libraries = tuple(os.path.join(os.path.realpath(p), "") for p in packages)
    try:
        frames = traceback.extract_tb(error.__traceback__)
    except ValueError:  # the name of a file cannot be encoded
        return []
    return [
        (frame.filename, frame.lineno or 0, frame.name, frame.line)
        for frame in frames
        # Compiled libraries name files of the machine that built them. isfile raises nothing for a
        # name that cannot be looked up; realpath fails in a working directory that is gone.
        if os.path.isfile(frame.filename)
        and not os.path.realpath(frame.filename).startswith((PACKAGE, STDLIB, *libraries))
    ]


def _chain(error: BaseException, *, implicit: bool = True) -> list[BaseException]:
    """Returns an error, its cause, and so on down to the first cause. implicit: whether an error
    that was being handled counts as the cause of an error that names none."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and not any(at is known for known in chain):
        chain.append(at)
        at = at.__cause__ or (at.__context__ if implicit and not at.__suppress_context__ else None)
    return chain
