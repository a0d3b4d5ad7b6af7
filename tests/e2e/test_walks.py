"""The ways through the house are no longer than pyproject.toml allows (see tests/walks.py)."""

from __future__ import annotations

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
