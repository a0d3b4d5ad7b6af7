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
    # of two values Student's interval is 12.7 standard errors to either side
    assert "| `better` | 85.0 ± 63.5 | +40.0, +40.0 |  | 2 of 2 | 1.25 |" in lines[2]
    assert "| `worse` | 35.5 ± 69.9 | +1.0, -20.0 | 49.5 ± 133.4 | 0 of 2, 1 worse |" in lines[3]
    study.plot(tmp_path / "plot.svg", results)
    drawn = ET.parse(tmp_path / "plot.svg")
    assert len(drawn.findall(f".//{SVG}polyline")) == 2 * (2 + 2)  # seeds, mean, the other's mean
    assert "1  better  85.0" in "".join(drawn.getroot().itertext())


def test_a_run_that_ended_is_not_made_again(
    study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, ...]] = []
    monkeypatch.setattr(study, "launch", lambda *words, **_: made.append(words))
    for name, status in (("gspo", "finished"), ("grpo", "failed: killed")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stats.jsonl").write_text('{"step": 0, "eval/accuracy": 0.4}\n')
        (tmp_path / name / "summary.json").write_text(f'{{"status": "{status}"}}')
        assert study.train(tmp_path, 1, name).rows[0]["step"] == 0
    assert [words[0] for words in made] == ["quickstart_grpo.yaml"]
    assert "algorithm=grpo" in made[0]
