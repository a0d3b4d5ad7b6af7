"""The task of `make bench-async`, and what it prints and draws of its runs."""

from __future__ import annotations

import statistics
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.long_tail import result_is_right, sums
from megarl.config.dataset import DatasetConfig

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def test_answers_have_a_long_tail_that_earns_nothing() -> None:
    problems = sums(DatasetConfig(type="arithmetic", size=2000), seed=3)
    responses = [p.response or "" for p in problems]
    lengths = sorted(map(len, responses))
    assert lengths[1000] < 6 < statistics.fmean(lengths) < 50 < lengths[1960]
    for problem, response in zip(problems, responses, strict=True):
        assert result_is_right("", response, [], [], answer=problem.answer) == 1.0
        assert result_is_right("", response + ".", [], [], answer=problem.answer) == 0.0


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from benchmarks import async_study

    return async_study


def test_the_table_pairs_runs_and_the_plot_shows_every_seed(study: object, tmp_path: Path) -> None:
    def turn(bound: int, decoupled: bool, seconds: float, after: float) -> object:
        numbers = dict.fromkeys(study.Turn.__dataclass_fields__, 0.0)  # type: ignore[attr-defined]
        numbers |= {"bound": bound, "decoupled": decoupled, "seconds": seconds, "after": after}
        return study.Turn(**numbers)  # type: ignore[attr-defined]

    pairs = []
    for seed in (0, 1):
        sync = turn(0, False, 3.0, 0.5)
        pairs += [
            (sync, sync),
            (turn(2, False, 2.0 - seed, 0.6), sync),
            (turn(2, True, 1.5, 0.7), sync),
        ]
    lines = list(study.table(pairs))  # type: ignore[attr-defined]
    assert len(lines) == 5 and len({line.count("|") for line in lines}) == 1
    assert "| 2.25 (1.50 to 3.00) |" in lines[3] and "| 70.0 |" in lines[4]
    study.plot(tmp_path / "plot.svg", pairs)  # type: ignore[attr-defined]
    drawn = ET.parse(tmp_path / "plot.svg")
    assert len(drawn.findall(f".//{SVG}circle")) == 16
    assert len(drawn.findall(f".//{SVG}polyline")) == 4
