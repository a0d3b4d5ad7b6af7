"""`megarl eval --compare A B`: two evaluations, prompt by prompt."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.cli import main
from megarl.config.run import EvaluatorConfig
from megarl.observability.intervals import Estimate, bootstrap_ci, difference_ci, wilson
from megarl.rollout.executor import Answered
from megarl.trainer.evaluation import SetEvaluator

TOKENIZER = SimpleNamespace(decode=lambda ids, skip_special_tokens: str(ids))


def evaluation(place: Path, rewards: dict[str, list[float]], **asked: Any) -> Path:
    """Writes what `megarl eval` does of rewards by prompt, rendered with a template of its own."""
    rows = [
        {"prompt": f"<{place.name}>{q}", "messages": [{"role": "user", "content": q}], "row_id": i}
        for i, q in enumerate(rewards)
    ]
    n = sum(map(len, rewards.values()))
    batch = {
        "input_ids": torch.arange(2 * n).view(n, 2),
        "attention_mask": torch.ones(n, 2, dtype=torch.bool),
        "loss_mask": torch.tensor([[False, True]] * n),
        "rewards": torch.tensor([r for of in rewards.values() for r in of]),
        "group_ids": torch.tensor([i for i, of in enumerate(rewards.values()) for _ in of]),
    }
    executor = SimpleNamespace(answer=lambda rows, workflow: Answered(batch, [0] * len(rows)))
    own: Any = {"workflow": None, "tokenizer": TOKENIZER, "config": EvaluatorConfig(), "seed": 0}
    figures, samples, _ = SetEvaluator(rows=rows, **own).measure(executor)  # type: ignore[arg-type]
    place.mkdir()
    lines = (json.dumps({"dataset": "sums"} | sample) + "\n" for sample in samples)
    (place / "samples.jsonl").write_text("".join(lines))
    record = {
        "results": {"sums": figures},
        "datasets": {"sums": {"type": "chat", "reward": {"type": "exact"}}},
        "gconfig": {"n_samples": len(next(iter(rewards.values())))},
        "seed": 1,
    }
    (place / "results.json").write_text(json.dumps(record | asked))
    return place


def compared(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """What the command prints, and each figure: A's, B's, the difference and its ends."""
    assert main(["eval", "--compare", str(a), str(b)]) == 0
    text = capsys.readouterr().out
    number = r"([+-]?\d\.\d{3})"
    lines = re.findall(
        rf"^  (\S+) +{number} -> {number}, {number} \[{number}, {number}\]$", text, re.M
    )
    return text, {name: list(map(float, values)) for name, *values in lines}


def test_the_difference_is_paired_by_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """30 of 100 prompts against the same 30 and 10 others: against Newcombe's method 10 by hand,
    with the phi coefficient of the table (30, 0, 10, 60)."""
    a = evaluation(tmp_path / "a", {f"q{i}": [float(i < 30)] for i in range(100)})
    order = sorted(range(100), key=lambda i: -i)  # rows may come in another order
    b = evaluation(tmp_path / "b", {f"q{i}": [float(i < 40)] for i in order})
    text, figures = compared(a, b / "results.json", capsys)
    phi = (30 * 60 - 0 * 10) / (30 * 70 * 40 * 60) ** 0.5
    x, y = (Estimate(p, *wilson(p, 100)) for p in (0.3, 0.4))
    low, high = difference_ci(x, y, correlation=phi)
    assert figures["accuracy"] == pytest.approx([0.3, 0.4, 0.1, low, high], abs=5e-4)  # 3 digits
    assert low > 0  # of other prompts it would not be
    assert difference_ci(x, y)[0] < 0
    assert "100 prompts of both" in text and "10 better, 0 worse, 90 the same" in text
    assert figures["reward"] == figures["accuracy"] and len(figures) == 2
    assert "not the same" not in text


def test_several_answers_and_prompts_that_one_side_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = evaluation(tmp_path / "a", {"1": [1, 0], "2": [0, 0], "3": [1, 1], "4": [1, 0.5]})
    b = evaluation(tmp_path / "b", {"3": [0, 1], "2": [0, 1], "1": [0, 1], "5": [1, 1]}, seed=2)
    text, figures = compared(a, b, capsys)
    assert "3 prompts of both (A has 4, B 4)" in text and "not the same: seed: 1 | 2" in text
    assert "1 better, 1 worse, 1 the same" in text
    assert figures["accuracy"][:3] == [0.5, 0.5, 0.0]
    assert figures["pass@2"][:3] == pytest.approx([2 / 3, 1.0, 1 / 3], abs=5e-4)
    graded = [
        evaluation(tmp_path / n, {"1": [v], "2": [w]})
        for n, v, w in (("c", 0.2, 0.4), ("d", 0.6, 0.4))
    ]
    _, figures = compared(*graded, capsys)
    x, y = (Estimate(v, *bootstrap_ci(s)) for v, s in ((0.3, [0.2, 0.4]), (0.5, [0.6, 0.4])))
    ends = difference_ci(x, y, correlation=-1.0)
    assert figures["reward"] == pytest.approx([0.3, 0.5, 0.2, *ends], abs=5e-4)


def test_equal_prompts_are_paired_one_by_one(tmp_path, capsys) -> None:
    found = []
    for name, apart in (("equal", False), ("apart", True)):
        places = []
        for side, rewards in (("a", ([1.0], [0.0], [0.0])), ("b", ([1.0], [1.0], [0.0]))):
            by_prompt = {f"q{i}": rewards[i] for i in range(3)}
            places.append(evaluation(tmp_path / f"{name}-{side}", by_prompt))
        if not apart:  # the first two prompts are the same
            for place in places:
                lines = [json.loads(x) for x in (place / "samples.jsonl").read_text().splitlines()]
                lines[1]["key"] = lines[0]["key"]
                (place / "samples.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        text, figures = compared(*places, capsys)
        assert (
            "3 prompts of both (A has 3, B 3)" in text and "1 better, 0 worse, 2 the same" in text
        )
        found.append(figures)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "results",
    ["[]", "null", "[" * 100_000, '{"results": []}', '{"results": {"sums": 1}}', "1" * 5000],
)
def test_results_that_are_none_are_one_line(results, tmp_path, capsys) -> None:
    a = evaluation(tmp_path / "a", {"1": [1.0]})
    b = evaluation(tmp_path / "b", {"1": [1.0]})
    (b / "results.json").write_text(results)
    assert main(["eval", "--compare", str(a), str(b)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("reward", ['"1"x', "null", "[1]", "NaN", "Infinity", "1" + "0" * 400])
def test_rewards_that_are_none_are_one_line(reward, tmp_path, capsys) -> None:
    a = evaluation(tmp_path / "a", {"1": [1.0]})
    b = evaluation(tmp_path / "b", {"1": [1.0]})
    text = (b / "samples.jsonl").read_text()
    (b / "samples.jsonl").write_text(text.replace('"reward": 1.0', f'"reward": {reward}'))
    assert main(["eval", "--compare", str(a), str(b)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_pipe_is_refused_and_control_characters_stay_out(tmp_path, capsys) -> None:
    a = evaluation(tmp_path / "a", {"1": [1.0]}, seed="\x1b]0;title\x07")
    b = evaluation(tmp_path / "b", {"1": [1.0]})
    assert main(["eval", "--compare", str(a), str(b)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    (b / "samples.jsonl").unlink()
    os.mkfifo(b / "samples.jsonl")
    assert main(["eval", "--compare", str(a), str(b)]) == 2
    assert "samples.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gconfig": {"n_samples": 8}}, "gconfig.n_samples: 1 | 8: evaluate both alike"),
        ({"datasets": {"sums": {"type": "chat", "reward": {"type": "gsm8k"}}}}, "exact | gsm8k"),
        ({"results": {"sums": {"accuracy": None}}}, "too many failed"),
        ("prompts", "sums: no prompt in common"),
        ("old", "'key'"),
        ("gone", "No such file"),
        ("lost", "samples.jsonl lacks answers"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    change: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = evaluation(tmp_path / "a", {"1": [1.0]})
    own = change if isinstance(change, dict) else {}
    b = evaluation(tmp_path / "b", {"2" if change == "prompts" else "1": [1.0]}, **own)
    if change == "old":  # written before samples had keys
        samples = b / "samples.jsonl"
        samples.write_text(samples.read_text().replace('"key"', '"k"'))
    if change in ("gone", "lost"):
        (b / {"gone": "results.json", "lost": "samples.jsonl"}[change]).unlink()
    assert main(["eval", "--compare", str(a), str(b)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("config error: --compare") and why in error and error.count("\n") == 1
    assert ("run megarl eval again" in error) == (
        change in ("old", "gone", "lost") or "results" in own
    )


def test_a_model_or_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["model", "--compare", "a", "b"]):
        assert main(["eval", *words]) == 2
        assert "give MODEL, or --compare A B" in capsys.readouterr().err
