"""Shows an error of the user's code by the user's lines; the rest of its trace goes to a file."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep


def user_lines(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns the frames of the user's files in the traces of an error and of its causes, the
    innermost error first; none where only megarl's and libraries' were on the way."""
    return [
        frame
        for each in _causes(error)
        for frame in traceback.extract_tb(each.__traceback__)
        if not frame.filename.startswith((_PACKAGE, _STDLIB, "<"))
        and "site-packages" not in frame.filename
        and Path(frame.filename).is_file()  # compiled libraries name files of where they were built
    ]


def in_users_lines(error: BaseException, file: Path) -> str | None:
    """Returns an error as the user's lines and its message, and writes the whole trace to `file`;
    None, and writes nothing, where no line is the user's or there is no room for the file."""
    if not (lines := user_lines(error)):
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return None
    shown = "".join([*traceback.format_list(lines), *traceback.format_exception_only(error)])
    return f"Traceback, your own lines (the whole is in {file}):\n{shown.rstrip()}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error's first cause, what came of it, and so on up to the error."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    yield from reversed(chain)
