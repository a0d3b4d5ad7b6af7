"""The probe that sends slices from GPU to GPU, over gloo between processes."""

from __future__ import annotations

import re

import pytest

from tests.unit.test_first_day import first_day

pytestmark = pytest.mark.system


def test_slices_pass_and_that_is_noted() -> None:
    done = first_day("--small", "slices")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\| sync (\d)", done.stdout, re.M) == ["1", "2", "3", "4"]
    assert re.search(r"^\| noted for servers of \S+\+megarl in /", done.stdout, re.M)
