"""An error of the user's code is shown by the user's lines."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import logging
import pickle
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import megarl
from megarl.api.failures import Failure, merged
from megarl.config.compose import read_yaml
from megarl.observability.logging import warn_recurring
from megarl.utils.user_errors import RemoteTrace, in_one_line, in_users_lines, user_lines


def test_the_users_lines_come_with_the_message_and_the_rest_goes_to_a_file(tmp_path: Path) -> None:
    theirs = tmp_path / "mine.py"
    theirs.write_text("def score(x):\n    return {}[x]\n")
    spec = importlib.util.spec_from_file_location("mine", theirs)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    trace = tmp_path / "run" / "logs" / "error_0.txt"
    try:
        try:
            module.score("my bug")
        except KeyError as e:
            raise RuntimeError("the reward failed") from e
    except RuntimeError as e:
        shown = in_users_lines(e, trace)
    assert shown is not None and str(theirs) in shown and "line 2" in shown
    assert shown.splitlines()[-1] == "RuntimeError: the reward failed"
    assert str(trace) in shown and "KeyError" in trace.read_text()


@pytest.mark.parametrize("library", [megarl.__file__, json.__file__])
def test_a_folder_whose_name_only_begins_like_a_librarys_is_the_users(library: str) -> None:
    folder = Path(library).parent
    if library == json.__file__:
        folder = folder.parent  # the standard library's own
    theirs = str(folder) + "_mine/x.py"
    code = compile("raise ValueError('x')", theirs, "exec")
    with pytest.raises(ValueError) as caught:
        exec(code)
    with mock.patch("os.path.isfile", return_value=True):
        assert theirs in [line.filename for line in user_lines(caught.value)]


@pytest.mark.parametrize("folder", ["importlib", "site-packages-of-mine", "torch/megarl"])
def test_a_users_folder_may_have_any_name(tmp_path: Path, folder: str) -> None:
    theirs = tmp_path / folder / "theirs.py"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("raise ValueError('x')")
    with pytest.raises(ValueError) as caught:
        exec(compile(theirs.read_text(), str(theirs), "exec"))
    assert str(theirs) in [line.filename for line in user_lines(caught.value)]
    assert in_one_line(caught.value) == f"ValueError: x ({theirs}, line 1, in <module>)"


def test_an_error_of_none_of_the_users_lines_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(Exception) as caught:
        read_yaml("a: [")
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without this test's own line
    assert in_users_lines(error, tmp_path / "error.txt") is None
    assert not (tmp_path / "error.txt").exists()


def test_an_error_of_another_process_is_shown_by_the_users_line_there(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.py"
    theirs.write_text("def loss():\n    raise ValueError('bad')\n")
    names: dict[str, Any] = {}
    exec(compile(theirs.read_text(), str(theirs), "exec"), names)
    with pytest.raises(ValueError) as caught:
        names["loss"]()
    trace = pickle.loads(pickle.dumps(RemoteTrace.of(caught.value)))
    error: Exception = RuntimeError("worker 3 failed")
    error.__cause__ = trace
    told = Failure.of(error)  # and on to another rank
    other = merged("train_batch", {3: pickle.loads(pickle.dumps(told))})
    for each in (error, other):
        assert each is not None
        assert in_one_line(each).endswith(f"({theirs}, line 2, in loss)")
        assert user_lines(each)[-1].line == "raise ValueError('bad')"
        assert "ValueError: bad" in "".join(traceback.format_exception(each))


def test_a_handled_error_is_not_the_place_of_the_one_that_follows() -> None:
    def fails() -> None:
        try:
            raise KeyError("handled")
        except KeyError:
            raise ValueError("not handled")  # noqa: B904

    with pytest.raises(ValueError) as caught:
        fails()
    lines, first = inspect.getsourcelines(fails)
    at = first + next(i for i, text in enumerate(lines) if "not handled" in text)
    assert in_one_line(caught.value) == f"ValueError: not handled ({__file__}, line {at}, in fails)"


def test_a_problem_that_recurs_is_logged_in_powers_of_ten(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("a test of what recurs")

    async def meet(times: int) -> None:
        for i in range(times):
            try:
                json.loads("{")
            except ValueError as e:
                warn_recurring(log, f"row {i}", e)
            warn_recurring(log, f"row {i}", "another")

    asyncio.run(meet(120))
    rows = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert rows == [f"row {i}" for i in (0, 0, 9, 9, 99, 99)]
    assert __file__ in caplog.records[0].getMessage() and "100" in caplog.records[-1].getMessage()
    caplog.clear()
    asyncio.run(meet(1))  # another run
    assert len(caplog.records) == 2


def test_an_error_in_a_directory_that_is_gone_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        exec("raise KeyError('k')")
    except KeyError as e:
        assert "KeyError" in in_one_line(e) and RemoteTrace.of(e).text


class Mute(RuntimeError):
    """An error of which nothing can be asked."""

    def __str__(self) -> str:
        raise ValueError("no text")

    def __eq__(self, other: object) -> bool:
        raise ValueError("no comparison")


def odd_errors() -> list[Exception]:
    """A name of a file that the system refuses to look up, an error without text, a surrogate."""
    sources = {"/" + "f" * 5000: "raise KeyError('k')", "mine.py": "raise Mute from Mute()"}
    sources["other.py"] = "raise RuntimeError('caf\\udce9')"
    sources["caf\ud800.py"] = "raise IndexError('i')"
    errors: list[Exception] = []
    for name, source in sources.items():
        try:
            exec(compile(source, name, "exec"), {"Mute": Mute})
        except Exception as e:
            errors.append(e)
    return errors


@pytest.mark.parametrize("error", odd_errors(), ids=("name", "text", "surrogate", "file"))
def test_an_odd_error_is_shown_and_travels(error: Exception, tmp_path: Path) -> None:
    name, printable = type(error).__name__, not isinstance(error, IndexError)
    assert in_one_line(error).startswith(name)
    assert Failure.of(error).text.startswith(name)
    travelled = pickle.loads(pickle.dumps(RemoteTrace.of(error)))
    assert (name in travelled.text) == printable
    theirs = tmp_path / "mine.py"
    theirs.write_text("def raised(error):\n    raise error\n")
    spec = importlib.util.spec_from_file_location("mine", theirs)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(type(error)) as raised:
        module.raised(error)
    shown = in_users_lines(raised.value, tmp_path / "trace.txt")
    if not printable:
        assert shown is None
        return
    assert shown is not None and "mine.py" in shown
    assert name in (tmp_path / "trace.txt").read_text()
