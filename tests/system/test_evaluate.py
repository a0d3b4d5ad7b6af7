"""`megarl eval` as a user gives it, with a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.tiny_model import make_model
from tests.leftovers import Mark

ROOT = Path(__file__).resolve().parents[2]


def evaluate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl.cli", "eval", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_a_model_is_evaluated_and_every_answer_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = Mark()
    for name, value in mark.env.items():
        monkeypatch.setenv(name, value)
    make_model(tmp_path / "model", hidden=64, layers=1)
    out = tmp_path / "out"
    done = evaluate(
        str(tmp_path / "model"), "--datasets", "arithmetic", "--n", "4", "--out", str(out),
        "valid_dataset.size=20", "valid_dataset.options.level=1", "server.context_length=64",
        "eval_gconfig.max_new_tokens=3",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    mark.assert_none_left()
    found = json.loads((out / "results.json").read_text())["results"]["arithmetic"]
    assert (found["prompts"], found["samples"]) == (20, 80)
    assert 0 <= found["pass@1"] <= found["pass@2"] <= found["pass@4"] <= 1
    assert found["pass@1"] == pytest.approx(found["accuracy"])
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 80
    assert sum(s["reward"] >= 1 for s in samples) == round(80 * found["accuracy"])
    assert len({s["completion"] for s in samples if s["prompt_number"] == 0}) > 1  # sampled
    assert "pass@4" in done.stdout and str(out / "samples.jsonl") in done.stdout


def two_of_twenty_fail(prompt: str, completion: str, *_: object, **row: object) -> float:
    """Is 1 for every answer, but to two of the rows."""
    if row["row_id"] in (3, 4):
        raise RuntimeError("the judge is out")
    return 1.0


@pytest.mark.parametrize(("bound", "status"), [(0.1, 0), (0.05, 1)])
def test_what_fails_is_said_and_too_much_of_it_is_no_result(
    tmp_path: Path, bound: float, status: int
) -> None:
    make_model(tmp_path / "model", hidden=64, layers=1)
    out = tmp_path / "out"
    done = evaluate(
        str(tmp_path / "model"), "--datasets", "arithmetic", "--n", "2", "--out", str(out),
        "valid_dataset.size=20", "valid_dataset.options.level=1", "server.context_length=64",
        "eval_gconfig.max_new_tokens=3", "rollout.on_reward_error=reject",
        f"valid_dataset.reward={__name__}:two_of_twenty_fail", f"evaluator.max_failed={bound}",
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    found = json.loads((out / "results.json").read_text())["results"]["arithmetic"]
    assert (found["prompts"], found["samples"], found["failed"]) == (18, 36, 0.1)
    assert found["accuracy"] == found["pass@2"] == (None if status else 1.0)
    assert len((out / "samples.jsonl").read_text().splitlines()) == 36
    assert "failed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere", "--datasets", "arithmetic"], "no config.json in 'nowhere'"),
        (["ADAPTER", "--datasets", "arithmetic"], "base_model_name_or_path"),
        (["GPT2", "--datasets", "arithmetic"], "GPT2LMHeadModel"),
        (["TINY", "--datasets", "chat", "valid_dataset.path=ROWS"], "options.columns.messages"),
        ([], "give MODEL, or --compare A B"),
        (["MODEL"], "give --datasets or --config"),
        (["MODEL", "--datasets", "arithmetic", "--n", "0"], "--n: 0: use a whole number"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("adapter", "gpt2"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "gpt2" / "config.json").write_text(
        json.dumps({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n")
    make_model(tmp_path / "tiny", hidden=64, layers=1)
    places = {"MODEL": ".", "ADAPTER": "adapter", "GPT2": "gpt2", "TINY": "tiny"}
    arguments = [str(tmp_path / places[a]) if a in places else a for a in arguments]
    arguments = [a.replace("ROWS", str(tmp_path / "rows.jsonl")) for a in arguments]
    done = evaluate(*arguments, "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and why in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()  # no server was started to find that out


def test_an_evaluation_can_be_repeated_and_is_never_overwritten(tmp_path: Path) -> None:
    make_model(tmp_path / "final", hidden=64, layers=1)
    asked = [
        str(tmp_path / "final"), "--datasets", "arithmetic", "--n", "2", "valid_dataset.size=6",
        "valid_dataset.options.level=1", "server.context_length=64",
        "eval_gconfig.max_new_tokens=3", "seed=7",
    ]  # fmt: skip
    command = [sys.executable, "-m", "megarl.cli", "eval", *asked]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=240)
        assert done.returncode == 0, done.stderr
    first, second = tmp_path / "eval" / "final", tmp_path / "eval" / "final-2"
    assert (first / "samples.jsonl").read_text() == (second / "samples.jsonl").read_text()
    record = json.loads((second / "results.json").read_text())
    assert record["gconfig"]["n_samples"] == 2 and record["gconfig"]["seed"] == 7
    assert record["datasets"]["arithmetic"]["size"] == 6
    found = record["results"]["arithmetic"]
    for end in ("", "_lo", "_hi"):  # one number has one interval
        assert found[f"pass@1{end}"] == pytest.approx(found[f"accuracy{end}"])
    compared = evaluate("--compare", str(first), str(second / "results.json"))
    assert compared.returncode == 0, compared.stderr
    assert "6 prompts of both" in compared.stdout
    assert "0 better, 0 worse, 6 the same" in compared.stdout and "pass@2" in compared.stdout
    refused = evaluate(*asked, "--out", str(first))
    assert refused.returncode == 2 and str(first) in refused.stderr


def test_supervised_training_evaluates_by_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sets, answered by a server that the run starts and brings every step's weights."""
    mark = Mark()
    for name, value in mark.env.items():
        monkeypatch.setenv(name, value)
    make_model(tmp_path / "model", hidden=64, layers=1)
    pairs = [{"messages": f"{i}+{i}", "response": str(2 * i)} for i in range(5, 10)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    command = [sys.executable, "-m", "megarl.run", "recipe=sft", f"fileroot={tmp_path}"]
    command += [f"model.path={tmp_path / 'model'}", "model.optimizer.lr=1e-3"]
    command += ["experiment_name=e", "trial_name=t", "total_train_steps=2", "recover.mode=disabled"]
    command += ["train_dataset.size=16", "train_dataset.options.level=1", "evaluator.freq_steps=1"]
    command += ["valid_datasets.sums.size=10", "valid_datasets.sums.split=test"]
    command += ["valid_datasets.mine.type=chat", f"valid_datasets.mine.path={tmp_path}/pairs.jsonl"]
    command += ["valid_datasets.mine.reward=exact", "evaluator.overlap=keep"]
    command += ["generation.server.context_length=64", "generation.gconfig.max_new_tokens=3"]
    command += ["generation.weight_sync.verify=full", "generation.gconfig.n_samples=2"]
    command += ["generation.gconfig.greedy=false"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    mark.assert_none_left()
    run = tmp_path / "e" / "t"
    rows = [json.loads(line) for line in (run / "stats.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        for name, prompts in (("sums", 10), ("mine", 5)):
            assert row[f"eval/{name}/samples"] == 2 * prompts and f"eval/{name}/loss" in row
            assert row[f"eval/{name}/pass_at_1"] <= row[f"eval/{name}/pass_at_2"]
        both = [row[f"eval/{name}/accuracy"] for name in ("sums", "mine")]
        assert row["eval/accuracy"] == pytest.approx(sum(both) / 2)
    kept = [json.loads(line) for line in (run / "eval_rewards.jsonl").read_text().splitlines()]
    assert [(k["step"], k["dataset"]) for k in kept] == [
        (step, name) for step in (0, 1, 2) for name in ("sums", "mine")
    ]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {(s["when"], s["dataset"]) for s in samples} == {
        (when, name) for when in ("before", "after") for name in ("sums", "mine")
    }
    assert {s["answer"] for s in samples if s["dataset"] == "mine"} == {
        "10",
        "12",
        "14",
        "16",
        "18",
    }
    assert "tensors agree with all ranks of server" in done.stdout + done.stderr
    status = subprocess.run(
        [sys.executable, "-m", "megarl.cli", "status", str(run)],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "sums 0" in status.stdout and "mine 0" in status.stdout
