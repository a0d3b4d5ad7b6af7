"""get_logger: prefix with the rank, INFO on rank 0, WARNING elsewhere."""

import logging
import subprocess
import sys

import pytest

from megarl.observability.logging import get_logger, warn_on_rank_zero


@pytest.fixture
def unconfigured(monkeypatch):
    """The megarl logger as a new process has it; restored afterwards."""
    root = logging.getLogger("megarl")
    handlers, level, propagate = list(root.handlers), root.level, root.propagate
    root.handlers.clear()
    monkeypatch.delenv("MEGARL_LOG_LEVEL", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    yield monkeypatch
    root.handlers[:] = handlers
    root.setLevel(level)
    root.propagate = propagate


def test_rank_zero_says_info_with_its_rank_and_module(unconfigured, capsys):
    get_logger("megarl.engine.optimizer").info("hello %d", 3)
    get_logger("megarl.engine.optimizer").debug("quiet")
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.rstrip().endswith("r0 INFO    engine.optimizer: hello 3")


def test_other_ranks_warn_only(unconfigured, capsys):
    unconfigured.setenv("RANK", "3")
    log = get_logger("actor")
    log.info("quiet")
    log.warning("loud")
    err = capsys.readouterr().err
    assert "quiet" not in err and "r3 WARNING actor: loud" in err


def test_what_every_rank_sees_is_said_once(unconfigured, capsys):
    for rank in "012":
        unconfigured.setenv("RANK", rank)
        warn_on_rank_zero(get_logger("x"), "gap %s", 0.5)
    assert capsys.readouterr().err.count("gap 0.5") == 1


def test_level_from_the_environment(unconfigured, capsys):
    unconfigured.setenv("RANK", "3")
    unconfigured.setenv("MEGARL_LOG_LEVEL", "debug")
    get_logger("x").debug("seen")
    assert "seen" in capsys.readouterr().err


def test_bad_level_names_itself(unconfigured):
    unconfigured.setenv("MEGARL_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match="MEGARL_LOG_LEVEL='loud'"):
        get_logger("x")


def test_asking_again_adds_no_second_handler(capsys):
    get_logger("a")
    get_logger("b").warning("once")
    assert capsys.readouterr().err.count("once") == 1


def test_importing_the_logger_does_not_import_torch():
    """Launchers and --help use it."""
    code = (
        "import megarl.observability.logging, megarl.observability.intervals, sys; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
