"""What `make bench-algos` runs, prints and draws."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from megarl.config.loader import load_config
from megarl.config.presets import PRESETS
from megarl.observability.report import Run

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from benchmarks import algos

    return algos


def run(*accuracies: float) -> Run:
    rows = []
    for i, accuracy in enumerate(accuracies):
        rows.append({
            "step": 4 * i, "eval/accuracy": accuracy, "entropy": 0.1, "clip_frac": 0.25,
            "eval/accuracy_lo": accuracy - 0.02, "eval/accuracy_hi": accuracy + 0.02,
            "tokens/trained": 500.0 * i, "rollout/accepted": 32.0, "rollout/rejected": 8.0,
        })  # fmt: skip
    return Run(label="x", rows=rows)


def test_every_preset_makes_as_many_answers(study: Any) -> None:
    assert set(PRESETS) < set(study.ALGORITHMS)
    for name in study.ALGORITHMS:
        config, *words = study.overrides(name)
        cfg = load_config(ROOT / "configs" / config, [*words, "actor.path=nowhere"])
        answers = cfg.train_dataset.batch_size * cfg.gconfig.n_samples
        assert answers == study.PROMPTS * study.SAMPLES, name
        assert cfg.total_train_steps == study.STEPS
        assert (cfg.ref is not None) == (name == study.CRITIC or "ref" in PRESETS[name]), name


def test_the_table_ranks_and_the_plot_shows_every_seed(study: Any, tmp_path: Path) -> None:
    results = [
        study.Result("better", [run(0.4, 0.6, 0.8), run(0.5, 0.7, 0.9)]),
        study.Result("worse", [run(0.4, 0.4, 0.41), run(0.5, 0.4, 0.3)]),
    ]
    lines = list(study.table(results))
    assert study.starts(results) == (
        "The starts are at 40.0 (sd 0.0), 50.0 (sd 0.0) %. A run trains 1,500 to 1,500 tokens."
    )
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert "| `better` | 85.0 | 80.0, 90.0 |  | 2 of 2 | 1.25 |" in lines[2]
    assert "| `worse` | 35.5 | 41.0, 30.0 | 49.5 ± " in lines[3]
    assert "| 0 of 2, 1 worse |" in lines[3]
    page = tmp_path / "page.md"
    page.write_text(f"above\n{study.BEGIN}\nan older one\n{study.END}\nbelow\n")
    study.put_table(page, "\n".join(lines))
    found = page.read_text()
    assert found.startswith("above\n") and found.endswith("\nbelow\n") and lines[3] in found
    assert "older" not in found and (ROOT / "docs/bench_algos.md").read_text().count("<!-- ") == 2
    page.write_text("no marks")
    with pytest.raises(ValueError, match="for the table to stand between"):
        study.put_table(page, "")
    study.plot(tmp_path / "plot.svg", results)
    drawn = ET.parse(tmp_path / "plot.svg")
    assert len(drawn.findall(f".//{SVG}polyline")) == 2 * (2 + 2)  # seeds, mean, the other's mean
    assert "1  better  85.0" in "".join(drawn.getroot().itertext())


def test_the_interval_is_that_of_a_two_way_analysis_of_variance(study: Any) -> None:
    """Rows 1 2 3, 2 4 3 and 6 5 7 by hand: what is left adds up to 10/3 over 4 degrees of freedom;
    t of 4 is 2.776."""
    rows = [(0.01, 0.02, 0.03), (0.02, 0.04, 0.03), (0.06, 0.05, 0.07)]
    results = [study.Result(str(i), [run(x) for x in row]) for i, row in enumerate(rows)]
    grand, means, seeds = 11 / 3, (2, 3, 6), (3, 11 / 3, 13 / 3)
    left = sum(
        (100 * x - m - s + grand) ** 2 for row, m in zip(rows, means) for x, s in zip(row, seeds)
    )
    assert left == pytest.approx(10 / 3)
    want = 2.776 * (2 * left / 4 / 3) ** 0.5
    assert study.tells_apart(results) == pytest.approx(want, rel=0.01)
    assert [study.student(n) for n in (10, 23, 46)] == pytest.approx(
        [2.228, 2.069, 2.013], abs=1e-3
    )
    assert study.tells_apart(results[:1]) != study.tells_apart(results[:1])  # NaN: one algorithm


def test_a_run_that_ended_is_not_made_again_and_another_is_begun_anew(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, ...]] = []

    def write(name: str, step: int) -> None:
        (tmp_path / name).mkdir()  # as a run does, which takes no directory of another
        (tmp_path / name / "stats.jsonl").write_text(f'{{"step": {step}}}\n')

    def launch(*words: str, **_: Any) -> None:
        made.append(words)
        write("grpo", 7)

    monkeypatch.setattr(study, "launch", launch)
    for name, status, first in (("gspo", "finished", 0), ("grpo", "failed: killed", 7)):
        write(name, 0)
        (tmp_path / name / "summary.json").write_text(f'{{"status": "{status}"}}')
        assert study.train(tmp_path, 1, name).rows[0]["step"] == first
    assert [words[0] for words in made] == ["quickstart_grpo.yaml"]
    assert "algorithm=grpo" in made[0]
