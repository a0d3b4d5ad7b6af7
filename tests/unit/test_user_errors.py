"""An error of the user's code is shown by the user's lines."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from megarl.config.words import read_yaml
from megarl.utils.user_errors import in_users_lines


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


def test_an_error_of_none_of_the_users_lines_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(Exception) as caught:
        read_yaml("a: [")
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without this test's own line
    assert in_users_lines(error, tmp_path / "error.txt") is None
    assert not (tmp_path / "error.txt").exists()
