"""The ways through the house are no longer than pyproject.toml allows (see tests/walks.py)."""

from __future__ import annotations

import runpy

from tests import walks


def test_no_walk_has_become_longer() -> None:
    found = walks.measure()
    allowed = walks.limits()
    assert set(allowed) == set(walks.WALKS)
    longer = [
        name
        for name, most in allowed.items()
        if len(found[name].files) > most["files"] or len(found[name].entered) > most["functions"]
    ]
    shown = "\n".join(f"{name}:\n{walks.listing(found[name])}" for name in longer)
    assert not longer, f"{walks.table(found)}\n{shown}"


def test_digits_inside_of_other_numbers_are_not_the_value() -> None:
    """As the kernel's table of sockets has them, which a server's start reads."""
    names = runpy.run_path(str(walks.ROOT / "tests/walk_tracer/sitecustomize.py"))["names"]
    for text in ("bucket_mb=1021", "{a: 1021, b: 2}", "1021", "is 1021.", '"1021"'):
        assert names(1021, text)
    for text in ("00000000     0        0 3110213 1", "0.1021", "1021.5", "a1021b", "102 1"):
        assert not names(1021, text)
